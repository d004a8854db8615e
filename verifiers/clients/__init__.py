"""A request → a completion: over HTTP, through an SDK object, from a fake, a cassette or a cache."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from verifiers.clients.protocol import Client, Completion, Request, Tokens

if TYPE_CHECKING:
    from verifiers.clients.anthropic import AnthropicClient
    from verifiers.clients.cache import CachedClient
    from verifiers.clients.cassette import Cassette, NotRecordedError
    from verifiers.clients.endpoints import load_endpoints, resolve_endpoint
    from verifiers.clients.fake import FakeClient
    from verifiers.clients.fake_server import Chaos, FakeServer
    from verifiers.clients.http import HTTPClient
    from verifiers.clients.nemo_rl import NeMoRLChatCompletionsClient
    from verifiers.clients.replicas import ReplicaClient
    from verifiers.clients.resolve import as_client
    from verifiers.clients.responses import ResponsesClient
    from verifiers.clients.sdk import SDKClient

_HOMES = {
    "AnthropicClient": "anthropic",
    "CachedClient": "cache",
    "Cassette": "cassette",
    "Chaos": "fake_server",
    "FakeClient": "fake",
    "FakeServer": "fake_server",
    "HTTPClient": "http",
    "NeMoRLChatCompletionsClient": "nemo_rl",
    "NotRecordedError": "cassette",
    "ReplicaClient": "replicas",
    "ResponsesClient": "responses",
    "SDKClient": "sdk",
    "as_client": "resolve",
    "load_endpoints": "endpoints",
    "resolve_endpoint": "endpoints",
}

__all__ = [
    "Client",
    "Completion",
    "Request",
    "Tokens",
    "AnthropicClient",
    "HTTPClient",
    "NeMoRLChatCompletionsClient",
    "ReplicaClient",
    "ResponsesClient",
    "SDKClient",
    "as_client",
    "load_endpoints",
    "resolve_endpoint",
    "CachedClient",
    "Cassette",
    "NotRecordedError",
    "Chaos",
    "FakeClient",
    "FakeServer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'verifiers.clients' has no attribute {name!r}")
    return getattr(importlib.import_module(f"verifiers.clients.{_HOMES[name]}"), name)
