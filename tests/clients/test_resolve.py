"""Whatever is handed in as a client: when our own HTTP client does the work, and when the object itself is called."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, patch

import httpx2
import openai
import pytest

from verifiers.clients import (
    AnthropicClient,
    CachedClient,
    FakeClient,
    FakeServer,
    HTTPClient,
    Request,
    SDKClient,
    as_client,
)
from verifiers.types import ClientConfig

REQUEST = Request(model="m", prompt=[{"role": "user", "content": "2+2?"}])
KINDS = [openai.OpenAI, openai.AsyncOpenAI]


def test_our_own_clients_are_taken_as_they_are(tmp_path: Path) -> None:
    for client in (
        FakeClient("4"),
        HTTPClient("http://localhost/v1"),
        CachedClient(FakeClient("4"), tmp_path / "c.db"),
    ):
        assert as_client(client) is client


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_sdk_object_becomes_our_http_client_with_its_settings(kind: Any) -> None:
    sdk = kind(
        base_url="http://localhost:1/v1/",
        api_key="k",
        organization="org",
        max_retries=5,
        timeout=17,
        default_headers={"X-Title": "mine"},
    )
    client = as_client(sdk)
    assert type(client) is HTTPClient
    assert (client.base_url, client.api_key) == ("http://localhost:1/v1", "k")
    assert (client.max_retries, client.timeout_s) == (5, 17.0)
    assert client.headers == {"X-Title": "mine", "OpenAI-Organization": "org"}


def test_retries_and_timeouts_nobody_chose_are_ours_and_no_timeout_means_a_day() -> None:
    default = as_client(openai.OpenAI(base_url="http://localhost:1/v1", api_key="k"))
    assert (default.max_retries, default.timeout_s) == (8, 600.0)
    patient = as_client(openai.OpenAI(base_url="http://localhost:1/v1", api_key="k", timeout=None, max_retries=0))
    assert (patient.max_retries, patient.timeout_s) == (0, 86_400.0)
    timeout = httpx2.Timeout(30, connect=2)
    assert as_client(openai.OpenAI(base_url="http://localhost:1/v1", api_key="k", timeout=timeout)).timeout_s == 30


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_sdk_object_works_against_a_server(kind: Any) -> None:
    with FakeServer("4", api_key="k") as server:
        client = as_client(kind(base_url=server.url, api_key="k", default_headers={"X-Title": "mine"}))
        assert asyncio.run(client.complete(REQUEST)).text == "4"
        assert server.requests[0].headers["X-Title"] == "mine"
        assert "X-Stainless-Lang" not in server.requests[0].headers, "the SDK itself was not called"


def custom_transport(kind: Any) -> Any:
    is_async = kind is openai.AsyncOpenAI
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "from the transport"}}
    body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    transport = httpx2.MockTransport(lambda request: httpx2.Response(200, json=body))
    http = httpx2.AsyncClient(transport=transport) if is_async else httpx2.Client(transport=transport)
    return kind(base_url="http://localhost:1/v1", api_key="k", http_client=http)


@pytest.mark.parametrize("kind", KINDS)
def test_an_sdk_object_with_its_own_transport_is_called_itself(kind: Any) -> None:
    client = as_client(custom_transport(kind))
    assert type(client) is SDKClient
    assert asyncio.run(client.complete(REQUEST)).text == "from the transport"


def plain(kind: Any = openai.OpenAI, **kwargs: Any) -> Any:
    return kind(**{"base_url": "http://localhost:1/v1", "api_key": "k", **kwargs})


class Subclass(openai.AsyncOpenAI):
    pass


def with_hook(sdk: Any) -> Any:
    sdk._client.event_hooks = {"request": [lambda request: None]}
    return sdk


def with_instance_patch(sdk: Any) -> Any:
    sdk.chat.completions.create = lambda **kwargs: None
    return sdk


def with_swapped_transport(sdk: Any) -> Any:
    sdk._client._transport = httpx2.MockTransport(lambda request: httpx2.Response(200))
    return sdk


@pytest.mark.parametrize(
    "sdk",
    [
        Subclass(base_url="http://localhost:1/v1", api_key="k"),
        openai.AzureOpenAI(azure_endpoint="http://localhost:1", api_key="k", api_version="1"),
        plain(default_query={"api-version": "1"}),
        plain(api_key=lambda: "made when asked"),
        plain(http_client=openai.DefaultHttpxClient(proxy="http://localhost:2")),
        with_hook(plain()),
        with_instance_patch(plain()),
        with_swapped_transport(plain()),
        with_swapped_transport(plain(openai.AsyncOpenAI)),
    ],
    ids=[
        "subclass",
        "azure",
        "query",
        "key function",
        "own http client",
        "hook",
        "patched",
        "mounted",
        "mounted async",
    ],
)
def test_an_sdk_object_that_does_anything_of_its_own_is_called_itself(sdk: Any) -> None:
    client = as_client(sdk)
    assert type(client) is SDKClient
    assert client.sdk is sdk


def test_a_proxy_of_the_environment_is_left_to_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://localhost:2")
    monkeypatch.setenv("NO_PROXY", "localhost")
    assert type(as_client(plain(base_url="http://elsewhere.example/v1"))) is SDKClient
    assert type(as_client(plain())) is HTTPClient


@pytest.mark.parametrize(
    "target",
    [
        "openai.resources.chat.completions.AsyncCompletions.create",
        "openai.AsyncOpenAI.post",
        "httpx2.AsyncHTTPTransport.handle_async_request",
        "httpcore2.AsyncConnectionPool.handle_async_request",
    ],
)
def test_a_class_that_was_instrumented_is_noticed(target: str) -> None:
    sdk = plain(openai.AsyncOpenAI)

    async def instead(*args: Any, **kwargs: Any) -> None: ...

    with patch(target, instead):
        assert type(as_client(sdk)) is SDKClient
    with patch(target, MagicMock()):
        assert type(as_client(sdk)) is SDKClient
    assert type(as_client(sdk)) is HTTPClient


def test_mocks_are_called_themselves() -> None:
    specced = MagicMock(spec=openai.AsyncOpenAI)
    specced.chat.completions.create = AsyncMock()
    for mock in (MagicMock(), AsyncMock(), specced):
        assert type(as_client(mock)) is SDKClient
    ours = MagicMock(spec=HTTPClient)
    assert as_client(ours) is ours


@pytest.mark.parametrize("kind", ["Anthropic", "AsyncAnthropic"])
def test_a_plain_anthropic_object_becomes_our_client_too(kind: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    with FakeServer("4", api_key="k") as server:
        client = as_client(getattr(anthropic, kind)(base_url=server.url.removesuffix("/v1"), api_key="k"))
        assert type(client) is AnthropicClient
        assert asyncio.run(client.complete(REQUEST)).text == "4"
    with pytest.raises(TypeError, match="is not a client"):
        as_client(getattr(anthropic, kind)(api_key="k", default_query={"a": "b"}))


def test_the_same_thing_gives_the_same_client() -> None:
    plain_object, own_transport = plain(), custom_transport(openai.OpenAI)
    for value in (
        plain_object,
        own_transport,
        "http://localhost:1/v1",
        ClientConfig(api_base_url="http://localhost:1"),
    ):
        assert as_client(value) is as_client(value)
    assert as_client(plain()) is as_client(plain_object)
    assert as_client(plain(api_key="other")) is not as_client(plain_object)


def test_an_object_that_is_called_itself_is_not_kept_alive() -> None:
    sdk = SimpleNamespace(completions=SimpleNamespace(create=print))
    gone = weakref.ref(as_client(sdk))
    del sdk
    gc.collect()
    assert gone() is None


def test_an_object_need_not_be_hashable_or_weakly_referable() -> None:
    class Slotted:
        __slots__ = ("completions",)
        __hash__ = None  # type: ignore[assignment]

        def __init__(self) -> None:
            self.completions = SimpleNamespace(create=print)

    sdk = Slotted()
    client = as_client(sdk)
    assert as_client(sdk) is client


def test_a_configuration_names_the_variable_of_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "k")
    config = ClientConfig(
        api_key_var="MY_KEY",
        api_base_url="https://api.example.com/v1",
        timeout=5,
        max_retries=1,
        max_connections=7,
        extra_headers={"X-Title": "mine"},
    )
    client = as_client(config)
    assert isinstance(client, HTTPClient)
    assert (client.api_key, client.timeout_s, client.max_retries, client.max_concurrent) == ("k", 5, 1, 7)
    assert client.headers == {"X-Title": "mine"}
    with pytest.raises(ValueError, match="OPENAI_API_KEY is not set"):
        as_client(ClientConfig())


def test_nothing_means_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="OPENAI_API_KEY is not set: set it, or set OPENAI_BASE_URL"):
        as_client(None)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:1/v1")
    assert (as_client(None).base_url, as_client().api_key) == ("http://localhost:1/v1", None)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert as_client(None).api_key == "k"


def test_the_key_of_the_environment_goes_to_no_other_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert as_client("https://stranger.example/v1").api_key is None
    assert as_client("https://api.openai.com/v1").api_key == "k"
    monkeypatch.setenv("OPENAI_BASE_URL", "https://mine.example/v1")
    assert as_client("https://mine.example/v1").api_key == "k"
    assert as_client("http://mine.example.stranger.example/v1").api_key is None


@pytest.mark.parametrize("value", [42, object(), {}, [], print])
def test_anything_else_is_refused_with_what_would_do(value: Any) -> None:
    with pytest.raises(TypeError, match=r"is not a client: pass an OpenAI or AsyncOpenAI object"):
        as_client(value)


def test_the_name_of_a_model_is_no_url() -> None:
    with pytest.raises(TypeError, match="pass a model's name as model="):
        as_client("gpt-5-mini")


def test_a_model_in_this_process_needs_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(generate=print, config={})
    monkeypatch.setitem(sys.modules, "verifiers.engine", None)
    with pytest.raises(ImportError, match=r"pip install 'verifiers\[local\]'"):
        as_client(model)
    engine = SimpleNamespace(as_client=lambda value, model: ("engine for", value, model))
    monkeypatch.setitem(sys.modules, "verifiers.engine", engine)
    assert as_client(model, model="qwen") == ("engine for", model, "qwen")


def test_importing_the_clients_and_resolving_imports_no_sdk_and_no_server(repo: Path) -> None:
    code = (
        "import sys, verifiers.clients; from verifiers.clients import as_client, FakeClient, Cassette; "
        "as_client(FakeClient('4')); as_client('http://localhost:1/v1'); "
        "print(sorted({'openai', 'anthropic', 'httpx', 'aiohttp', 'sqlite3'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=repo, capture_output=True, text=True, check=True).stdout.strip() == "[]"
