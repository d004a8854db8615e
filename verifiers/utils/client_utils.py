"""Classic import path: a configuration → a client."""

from __future__ import annotations

from verifiers.clients import Client, as_client
from verifiers.types import ClientConfig

__all__ = ["setup_client"]


def setup_client(config: ClientConfig) -> Client:
    """The client that a configuration describes; the key is read from the environment now."""
    return as_client(config)
