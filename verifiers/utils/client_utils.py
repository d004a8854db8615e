"""Classic import path: a configuration → a client."""

from __future__ import annotations

import os
from typing import Any

from verifiers.clients import Client, as_client
from verifiers.types import ClientConfig

__all__ = ["setup_client", "setup_openai_client"]


def setup_client(config: ClientConfig) -> Client:
    """The client that a configuration describes; the key is read from the environment now."""
    return as_client(config)


def setup_openai_client(config: ClientConfig) -> Any:
    """The same as an ``AsyncOpenAI`` of the openai package, for a judge, as from 0.1.11 on."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(
        base_url=config.api_base_url,
        api_key=os.environ.get(config.api_key_var) or "EMPTY",
        timeout=config.timeout,
        max_retries=config.max_retries,
        default_headers=config.extra_headers,
    )
