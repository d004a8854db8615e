"""The connections under the clients: shared, reused, bounded, closed; what goes over them and where."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import subprocess
import sys
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.clients.scripted import CHAT, KEY, Server, ask, hurry, run
from verifiers import errors
from verifiers.clients import transport
from verifiers.clients.anthropic import AnthropicClient
from verifiers.clients.http import HTTPClient
from verifiers.clients.remote import _pools


def test_all_clients_of_a_loop_share_its_connections() -> None:
    ports = []

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        if "messages" in request.path:
            return web.json_response({"content": [{"type": "text", "text": "4"}]})
        return web.json_response(CHAT)

    async def go() -> None:
        async with Server(answer) as server:
            for client in (HTTPClient(f"{server.url}/v1"), HTTPClient(server.url), AnthropicClient(server.url)):
                for _ in range(3):
                    await client.complete(ask())

    run(go())
    assert len(ports) == 9
    assert len(set(ports)) == 1


def test_the_session_closes_with_its_loop() -> None:
    async def go() -> aiohttp.ClientSession:
        async with Server() as server:
            await HTTPClient(f"{server.url}/v1").complete(ask())
            return (await _pools.get()).session

    assert run(go()).closed


def test_a_connection_that_the_server_closed_while_idle_is_no_failure() -> None:
    async def go() -> list[str]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            body = json.dumps(CHAT).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            await writer.drain()
            writer.close()  # although it promised to keep the connection

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = HTTPClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        hurry(client)
        replies = [(await client.complete(ask())).text for _ in range(5)]
        server.close()
        return replies

    assert run(go()) == ["4"] * 5


def test_only_so_many_connections_are_being_opened_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CONNECTING_AT_ONCE", 3)
    opening = most = 0
    connect = aiohttp.TCPConnector._create_connection

    async def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal opening, most
        opening += 1
        most = max(most, opening)
        try:
            return await connect(*args, **kwargs)
        finally:
            opening -= 1

    monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", watched)

    async def slowly(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        return web.json_response(CHAT)

    async def go() -> None:
        async with Server(slowly) as server:
            client = HTTPClient(f"{server.url}/v1")
            await asyncio.gather(*(client.complete(ask()) for _ in range(20)))

    run(go())
    assert most == 3


def test_large_and_compressed_bodies_pass_both_ways() -> None:
    text = "x" * 3_000_000
    chat = {**CHAT, "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}
    packed = gzip.compress(json.dumps(chat).encode())

    async def go() -> int:
        async with Server((200, packed, {"Content-Encoding": "gzip"})) as server:
            completion = await HTTPClient(f"{server.url}/v1").complete(ask([{"role": "user", "content": text}]))
            assert server.seen[0].body["messages"][0]["content"] == text
            return len(completion.text)

    assert run(go()) == len(text)


def test_cookies_are_not_kept() -> None:
    async def go() -> bool:
        async with Server((200, CHAT, {"Set-Cookie": "a=b"})) as server:
            client = HTTPClient(f"{server.url}/v1")
            await client.complete(ask())
            await client.complete(ask())
            return "Cookie" in server.seen[1].headers

    assert not run(go())


def test_a_redirect_never_carries_the_key_elsewhere() -> None:
    async def go() -> int:
        async with Server() as elsewhere:
            async with Server((308, b"", {"Location": f"{elsewhere.url}/v1/chat/completions"})) as server:
                with pytest.raises(errors.RequestRefusedError, match="fix base_url"):
                    await HTTPClient(f"{server.url}/v1", KEY).complete(ask())
            return len(elsewhere.seen)

    assert run(go()) == 0


def test_the_proxy_that_the_environment_names_is_used_unless_the_host_is_exempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def go() -> tuple[str, int]:
        async with Server() as proxy, Server() as server:
            monkeypatch.setenv("http_proxy", proxy.url)
            transport._address.cache_clear()
            await HTTPClient("http://model.invalid/v1").complete(ask())
            monkeypatch.setenv("no_proxy", "127.0.0.1")
            await HTTPClient(f"{server.url}/v1").complete(ask())
            return proxy.seen[0].headers["Host"], len(server.seen)

    try:
        assert run(go()) == ("model.invalid", 1)
    finally:
        transport._address.cache_clear()


def test_a_machine_out_of_files_counts_as_overload_so_that_the_limit_shrinks() -> None:
    failure = transport._failure(aiohttp.ClientOSError(errno.EMFILE, "Too many open files"), 1.0)
    assert (failure.error, failure.is_overload) == (errors.ConnectionFailedError, True)


def test_reply_that_is_not_http_is_a_bad_reply() -> None:
    async def go() -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = HTTPClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", KEY, max_retries=1)
        hurry(client)
        with pytest.raises(errors.BadReplyError) as caught:
            await client.complete(ask())
        server.close()
        return str(caught.value)

    assert "HTTP reply cannot be parsed" in run(go())


def test_importing_and_building_clients_loads_no_aiohttp_and_opens_nothing() -> None:
    code = (
        "import sys, asyncio\n"
        "from verifiers.clients.http import HTTPClient\n"
        "from verifiers.clients.anthropic import AnthropicClient\n"
        "from verifiers.clients.responses import ResponsesClient\n"
        "[cls(api_key='k') for cls in (HTTPClient, AnthropicClient, ResponsesClient)]\n"
        "print([name for name in ('aiohttp', 'openai', 'anthropic', 'yarl') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-W", "error", "-c", code], text=True).strip() == "[]"
