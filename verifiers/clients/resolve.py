"""The user's ``client`` argument → a client; the same argument always gives the same client."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from verifiers.clients.protocol import Client
from verifiers.clients.sdk import SDKClient, find_create
from verifiers.clients.secrets import hide_in_url
from verifiers.types import ClientConfig

OPENAI_URL = "https://api.openai.com/v1"
NO_LIMIT_S = 86_400.0
SDK_DEFAULT_RETRIES = 2
OUR_DEFAULT_RETRIES = 8

# An SDKClient keeps its object alive, so an id in here cannot be reused by another object.
_called: WeakValueDictionary[int, SDKClient] = WeakValueDictionary()


def as_client(value: Any = None, model: Any = None) -> Client:
    """A client from one of our clients, an SDK object, a model, a configuration, a URL, or None.

    None means the endpoint that ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` set. The same object or the same settings
    give the same client, so that one endpoint has one limit.

    >>> as_client("http://localhost:8000/v1") is as_client("http://localhost:8000/v1")
    True
    """
    if value is None:
        return _from_environment()
    if isinstance(value, str):
        return _from_url(value)
    if isinstance(value, ClientConfig):
        return from_config(value)
    if _is_ours(value):
        client: Client = value
        return client
    if kind := plain_sdk(value):
        return _from_plain_sdk(value, kind)
    if find_create(value, "chat") or (find_create(value, "completion") and not _is_anthropic(value)):
        return _from_object(value)
    if callable(getattr(value, "generate", None)) and hasattr(value, "config"):
        return _from_model(value, model)
    raise TypeError(
        f"a {type(value).__name__} is not a client: pass an OpenAI or AsyncOpenAI object, another object with "
        ".chat.completions.create, one of our clients, a ClientConfig, a URL, or None"
    )


def server_of(value: Any) -> str | int:
    """What identifies the server behind a client: its URL without secrets, or else the object's id.

    >>> server_of("http://me:pass99@localhost:8000/v1/")
    'http://me:[hidden]@localhost:8000/v1'
    """
    if value is None:
        url: Any = os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
    elif isinstance(value, str):
        url = value
    else:
        url = value.api_base_url if isinstance(value, ClientConfig) else getattr(value, "base_url", "")
    address = str(url).rstrip("/")
    return hide_in_url(address) if address.startswith(("http://", "https://")) else id(value)


def _is_ours(value: Any) -> bool:
    if _is_mock(value):  # a bare mock has every attribute, so only its spec counts
        return hasattr(getattr(value, "_spec_class", None), "complete")
    return callable(getattr(value, "complete", None))


def _is_mock(value: Any) -> bool:
    return any(base.__module__ == "unittest.mock" for base in type(value).__mro__)


def _is_anthropic(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "anthropic"


def _from_object(value: Any) -> SDKClient:
    client = _called.get(id(value))
    if client is None:
        client = _called[id(value)] = SDKClient(value)
    return client


def _from_model(value: Any, name: Any) -> Client:
    try:
        engine = importlib.import_module("verifiers.engine")
    except ImportError as error:
        raise ImportError(
            f"a {type(value).__name__} in this process needs the local engine: run pip install 'verifiers[local]'"
        ) from error
    client: Client = engine.as_client(value, model=name)
    return client


# --- settings → a client over HTTP --------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def http_client(
    kind: str,
    base_url: str,
    api_key: str | None,
    *,
    headers: tuple[tuple[str, str], ...] = (),
    timeout_s: float = 600.0,
    max_retries: int = OUR_DEFAULT_RETRIES,
    max_concurrent: int | None = None,
    prices: tuple[tuple[str, float], ...] = (),
    **bounds: Any,
) -> Client:
    """The one HTTP client with these settings; ``kind`` is openai, anthropic or responses.

    ``bounds`` are ``down_after_s`` and ``max_reply_bytes``.
    """
    # Imported here, because aiohttp is slow to import.
    from verifiers.clients.anthropic import AnthropicClient
    from verifiers.clients.http import HTTPClient
    from verifiers.clients.responses import ResponsesClient

    cls = {"openai": HTTPClient, "anthropic": AnthropicClient, "responses": ResponsesClient}[kind]
    return cls(
        base_url.rstrip("/"),
        api_key,
        headers=dict(headers) or None,
        timeout_s=timeout_s,
        max_retries=max_retries,
        max_concurrent=max_concurrent,
        prices=dict(prices) or None,
        **bounds,
    )


def _from_environment() -> Client:
    base_url = os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
    api_key = os.environ.get("OPENAI_API_KEY") or None
    if api_key is None and is_openai(base_url):
        raise ValueError(
            "no client was given and OPENAI_API_KEY is not set: set it, or set OPENAI_BASE_URL to your own server, "
            "or pass client= (vf.FakeClient(...) needs no server)"
        )
    return http_client("openai", base_url, api_key)


def _from_url(url: str) -> Client:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise TypeError(
            f"client={hide_in_url(url)!r} is not a URL like http://localhost:8000/v1; pass a model's name as model="
        )
    trusted = {urlsplit(OPENAI_URL).netloc, urlsplit(os.environ.get("OPENAI_BASE_URL", "")).netloc}
    api_key = os.environ.get("OPENAI_API_KEY") if parts.netloc in trusted else None  # never sent to other hosts
    return http_client("openai", url, api_key or None)


def from_config(config: ClientConfig) -> Client:
    """The client that a classic ``ClientConfig`` describes; the key is read from the environment now."""
    api_key = os.environ.get(config.api_key_var) or None
    if api_key is None and is_openai(config.api_base_url):
        raise ValueError(f"the environment variable {config.api_key_var} is not set; {config.api_base_url} needs a key")
    is_default = config.max_connections == ClientConfig().max_connections
    return http_client(
        "openai",
        config.api_base_url,
        api_key,
        headers=tuple((config.extra_headers or {}).items()),
        timeout_s=config.timeout,
        max_retries=config.max_retries,
        max_concurrent=None if is_default else config.max_connections,
    )


def is_openai(url: str) -> bool:
    return urlsplit(url).hostname == urlsplit(OPENAI_URL).hostname


# --- SDK objects that our own HTTP client can replace -------------------------------------------------------------


_SDKS = {
    ("openai", "OpenAI"): "openai",
    ("openai", "AsyncOpenAI"): "openai",
    ("anthropic", "Anthropic"): "anthropic",
    ("anthropic", "AsyncAnthropic"): "anthropic",
}
# If one of these is set, the SDK does something that our client does not support.
_SPECIAL = (
    "_api_key_provider",
    "_custom_query",
    "_middleware",
    "_provider",
    "_token_cache",
    "_workload_identity_auth",
    "auth_token",
    "credentials",
    "workload_identity",
)


def plain_sdk(value: Any) -> str | None:
    """``openai`` or ``anthropic`` for an SDK's own client object on its default transport; None for anything else.

    This imports nothing: an object of a class only exists if its module is already imported.
    """
    cls = type(value)
    kind = _SDKS.get((cls.__module__, cls.__name__))
    if kind is None or getattr(sys.modules.get(cls.__module__), cls.__name__, None) is not cls:
        return None
    if any(getattr(value, name, None) for name in _SPECIAL) or not isinstance(value.api_key, str):
        return None
    steps = [name for name in ("post", "request", "_prepare_options", "_prepare_request") if hasattr(value, name)]
    if not all(_is_original(value, name) for name in steps):
        return None
    resources = (value.chat.completions, value.completions) if kind == "openai" else (value.messages,)
    if not all(_is_original(resource, "create") for resource in resources):
        return None
    return kind if _is_default_transport(getattr(value, "_client", None)) else None


def _is_default_transport(http: Any) -> bool:
    if type(http).__name__ not in ("SyncHttpxClientWrapper", "AsyncHttpxClientWrapper"):
        return False
    if not type(http).__module__.endswith("._base_client"):
        return False
    try:
        transport = http._transport
        is_direct = http._transport_for_url(http.base_url) is transport  # a proxy would have its own transport
        is_bare = http.auth is None and not any(http.event_hooks.values()) and not len(http.cookies)
    except AttributeError:
        return False
    verb = "handle_async_request" if type(http).__name__.startswith("Async") else "handle_request"
    pool = getattr(transport, "_pool", None)
    is_untouched = _is_original(http, "send") and _is_original(transport, verb) and _is_original(pool, verb)
    return is_direct and is_bare and is_untouched


def _is_original(holder: Any, name: str) -> bool:
    """Is this method defined by its class's own package? Instrumentation and test doubles replace methods."""
    if name in getattr(holder, "__dict__", ()):
        return False
    for cls in type(holder).__mro__:
        if name in vars(cls):
            function = vars(cls)[name]
            package = cls.__module__.partition(".")[0]
            if not isinstance(function, types.FunctionType):
                return False
            return str(function.__globals__.get("__name__", "")).partition(".")[0] == package
    return False


def _from_plain_sdk(value: Any, kind: str) -> Client:
    headers = {name: text for name, text in value._custom_headers.items() if isinstance(text, str)}
    for attribute, name in (("organization", "OpenAI-Organization"), ("project", "OpenAI-Project")):
        if isinstance(setting := getattr(value, attribute, None), str):
            headers.setdefault(name, setting)
    retries = value.max_retries
    return http_client(
        kind,
        str(value.base_url),
        value.api_key or None,
        headers=tuple(headers.items()),
        timeout_s=_seconds(value.timeout),
        # 2 is the SDK's default, so probably not chosen; a run of thousands of requests needs more retries.
        max_retries=OUR_DEFAULT_RETRIES if retries == SDK_DEFAULT_RETRIES else retries,
    )


def _seconds(timeout: Any) -> float:
    timeout = getattr(timeout, "read", timeout)
    return float(timeout) if isinstance(timeout, (int, float)) else NO_LIMIT_S
