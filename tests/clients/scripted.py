"""A real server on loopback that answers from a script, for the tests of the clients over HTTP."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from aiohttp import web

from verifiers.clients.protocol import Request
from verifiers.clients.retries import Backoff

KEY = "sk-very-secret-0123456789"
CHAT = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12},
}
Step = Callable[[web.Request], Awaitable[web.StreamResponse]]


def ask(prompt: Any = None, **kwargs: Any) -> Request:
    prompt = [{"role": "user", "content": "2+2?"}] if prompt is None else prompt
    return Request(model="m", prompt=prompt, **kwargs)


@dataclass
class Sleeps:
    """A backoff that waits no time at all, and remembers what it would have waited."""

    seconds: list[float] = field(default_factory=list)

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        await asyncio.sleep(0)


def hurry(client: Any) -> Sleeps:
    """Let a client retry without waiting."""
    sleeps = Sleeps()
    client.backoff = Backoff(rng=lambda: 0.0, sleep=sleeps)
    return sleeps


@dataclass
class Seen:
    """One request as the server saw it."""

    path: str
    query: str
    headers: Any
    body: Any


class Server:
    """Answers each request with the next step of its script; the last step is repeated.

    A step is a JSON value (status 200), bytes, a ``(status, value)`` or ``(status, value, headers)`` tuple, or an async
    function of the request.
    """

    def __init__(self, *script: Any) -> None:
        self.script = list(script) or [CHAT]
        self.seen: list[Seen] = []

    async def __aenter__(self) -> Server:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.seen.append(Seen(request.path, request.query_string, request.headers, json.loads(raw)))
        step = self.script[min(len(self.seen), len(self.script)) - 1]
        if callable(step):
            return await step(request)
        status, value, *headers = step if isinstance(step, tuple) else (200, step)
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        return web.Response(status=status, body=body, headers=headers[0] if headers else None)


async def drop(request: web.Request) -> web.StreamResponse:
    """Close the connection without a word."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def break_off(request: web.Request) -> web.StreamResponse:
    """Promise a body, send half of it, and close the connection."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    assert request.transport is not None
    request.transport.abort()
    return response


async def drip(request: web.Request) -> web.StreamResponse:
    """Send one byte now and then, for ever: no single read ever waits long."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    for _ in range(1000):
        await response.write(b" ")
        await asyncio.sleep(0.02)
    return response


async def echo_key(request: web.Request) -> web.StreamResponse:
    """What a careless gateway does: repeat the request's headers in its error."""
    return web.json_response({"error": {"message": "bad key", "headers": dict(request.headers)}}, status=401)


def check_params(params: Any, body: dict[str, Any]) -> None:
    """Do an SDK's own parameter types accept this body, and know every key of it?"""
    from pydantic import TypeAdapter

    def walk(value: Any) -> None:  # pydantic checks an Iterable only while it is iterated
        if isinstance(value, dict):
            value = list(value.values())
        if hasattr(value, "__iter__") and not isinstance(value, str):
            for item in value:
                walk(item)

    adapter = TypeAdapter(params)  # must outlive the iterators it hands out
    walk(adapter.validate_python(copy.deepcopy(body)))
    assert body.keys() <= get_type_hints(params).keys()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)
