"""A reply → a real HTTP server on this machine that gives it, in the formats of three APIs, with optional faults."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from verifiers import errors
from verifiers.clients.fake import FakeClient
from verifiers.clients.fake_dialects import CREATED, Dialect, dialect_of, without_texts
from verifiers.clients.server_access import lost_client
from verifiers.clients.server_thread import ServerThread

KINDS = ("rate_limit", "server_error", "reset", "slow", "broken_json", "empty")
DAMAGE = ("bad_utf8", "null_content")  # a reply that parses but is not the model's text
ALL_KINDS = (*KINDS, *DAMAGE, "endless")

# How the endpoint reports an error that the reply function raises: as a fault, or as a status and an error code.
_FAULT_OF: dict[type[errors.Error], str] = {
    errors.ConnectionFailedError: "reset",
    errors.BadReplyError: "broken_json",
    errors.EmptyModelResponseError: "empty",
    errors.RateLimitError: "rate_limit",
}
_STATUS_OF: dict[type[errors.Error], tuple[int, str]] = {
    errors.OverlongPromptError: (400, "context_length_exceeded"),
    errors.RequestRefusedError: (400, "invalid_request"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Chaos:
    """How often requests get a fault, and which. The same seed and requests give the same faults."""

    rate: float = 0.3
    kinds: tuple[str, ...] = KINDS
    retry_after_s: float = 0.02
    slow_s: float = 0.2

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate <= 1.0:
            raise ValueError(f"rate must be a fraction of requests between 0 and 1, not {self.rate}")
        if unknown := set(self.kinds) - set(ALL_KINDS):
            raise ValueError(f"unknown faults {sorted(unknown)}; choose from {', '.join(ALL_KINDS)}")
        if not self.kinds:
            raise ValueError(f"kinds is empty; choose from {', '.join(ALL_KINDS)}")

    def fault(self, seed: int, body: bytes, attempt: int) -> str | None:
        """The fault for the ``attempt``-th arrival of a body, or None.

        >>> Chaos(rate=1.0, kinds=("slow",)).fault(0, b"{}", 0)
        'slow'
        """
        digest = hashlib.blake2b(body, digest_size=16, key=f"{seed}/{attempt}".encode()).digest()
        if int.from_bytes(digest[:8], "big") / 2**64 >= self.rate:
            return None
        return self.kinds[int.from_bytes(digest[8:], "big") % len(self.kinds)]


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """One request as received, for assertions on what a client really sends."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]


class FakeServer(ServerThread):
    """A server on 127.0.0.1 that answers like `FakeClient`; it runs in its own thread within the block.

    ``server.url`` is the base URL for OpenAI's chat, completions, responses and models endpoints and for Anthropic's
    messages. All requests are kept in ``server.requests``; ``server.faults`` counts the injected faults.

    >>> with FakeServer("4") as server:
    ...     server.url.startswith("http://127.0.0.1:")
    True
    """

    def __init__(
        self,
        reply: Any = "",
        *,
        chaos: Chaos | None = None,
        seed: int = 0,
        latency_s: float = 0.0,
        api_key: str | None = None,
        tokens: bool = False,
    ) -> None:
        super().__init__()
        self.chaos = chaos
        self.seed = seed
        self.api_key = api_key
        self.requests: list[ReceivedRequest] = []
        self.fault_kinds: Counter[str] = Counter()
        self._model = FakeClient(reply, latency_s=latency_s, tokens=tokens)
        self._arrivals: Counter[bytes] = Counter()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/v1"

    @property
    def faults(self) -> int:
        """How many faults have been injected so far."""
        return self.fault_kinds.total()

    def make_runner(self) -> web.ServerRunner:
        server = web.Server(self._answer, access_log=None, keepalive_timeout=600.0)
        return web.ServerRunner(server, shutdown_timeout=0.01)

    # --- replies --------------------------------------------------------------------------------------------------

    async def _answer(self, http: web.BaseRequest) -> web.StreamResponse:
        content = await http.read()
        if (refusal := self._refuse_key(http)) is not None:  # a response without items is false before aiohttp 3.12
            return refusal
        if http.method == "GET" and http.path.endswith("/models"):
            model = {"id": "fake", "object": "model", "created": CREATED, "owned_by": "verifiers"}
            return _json({"object": "list", "data": [model]})
        dialect = dialect_of(http.path)
        if dialect is None or http.method != "POST":
            return _error(404, "not_found", f"no {http.method} {http.path} here")
        try:
            body = msgspec.json.decode(content, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            return _error(400, "invalid_request", f"the body is not a JSON object: {error}")
        self.requests.append(ReceivedRequest(http.path, http.headers, body))
        fault = self._next_fault(http.path.encode() + content)
        try:
            if fault is not None and fault != "slow" and fault not in DAMAGE:
                return await self._fail(http, dialect, fault)
            return await self._reply(http, dialect, body, fault)
        except ConnectionError as error:
            if (nobody := lost_client(http, error)) is not None:
                return nobody
            raise

    async def _reply(self, http: web.BaseRequest, dialect: Dialect, body: Any, fault: str | None) -> web.StreamResponse:
        if body.get("stream") or body.get("n", 1) != 1:
            return _error(400, "invalid_request", "the fake server gives one complete reply: leave out stream and n")
        try:
            request = dialect.read(body)
        except (KeyError, TypeError, AttributeError) as error:
            return _error(400, "invalid_request", f"a field is missing or has the wrong shape: {error!r}")
        try:
            completion = await self._model.complete(request)
        except errors.Error as error:
            return await self._say_error(http, dialect, error)
        said = dialect.write(completion, request)
        written = msgspec.json.encode(without_texts(said) if fault == "null_content" else said)
        if fault == "bad_utf8":
            text = msgspec.json.encode(completion.text)[1:-1]
            written = written.replace(text, b"\xff" + text)
        return await self._send_slowly(http, written) if fault == "slow" else _bytes(written)

    async def _say_error(self, http: web.BaseRequest, dialect: Dialect, error: errors.Error) -> web.StreamResponse:
        if fault := _FAULT_OF.get(type(error)):
            return await self._fail(http, dialect, fault)
        status, code = _STATUS_OF.get(type(error), (500, "server_error"))
        return _error(status, code, str(error))

    def _refuse_key(self, http: web.BaseRequest) -> web.Response | None:
        given = http.headers.get("x-api-key") or http.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.api_key is None or given == self.api_key:
            return None
        # Real endpoints repeat the key in this message; a client must not show it.
        return _error(401, "invalid_api_key", f"Incorrect API key provided: {given}")

    # --- faults ---------------------------------------------------------------------------------------------------

    def _next_fault(self, content: bytes) -> str | None:
        if self.chaos is None:
            return None
        body = hashlib.blake2b(content, digest_size=16).digest()
        fault = self.chaos.fault(self.seed, body, self._arrivals[body])
        self._arrivals[body] += 1
        if fault is not None:
            self.fault_kinds[fault] += 1
        return fault

    async def _fail(self, http: web.BaseRequest, dialect: Dialect, fault: str) -> web.StreamResponse:
        if fault == "reset":
            return _reset(http)
        if fault == "endless":
            return await self._send_for_ever(http)
        if fault == "rate_limit":
            wait_s = (self.chaos or Chaos()).retry_after_s
            headers = {"Retry-After": f"{wait_s:g}", "retry-after-ms": f"{1000 * wait_s:g}"}
            return _error(429, "rate_limit_exceeded", "too many requests", headers=headers)
        if fault == "server_error":
            return _error(500, "server_error", "the server had an error")
        written = msgspec.json.encode(dialect.empty)
        return _bytes(written[: len(written) // 2] if fault == "broken_json" else written)

    async def _send_for_ever(self, http: web.BaseRequest) -> web.StreamResponse:
        """Send a body that never ends."""
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(http)
        await response.write(b'{"choices": [')
        while True:
            await response.write(b" " * 65536)

    async def _send_slowly(self, http: web.BaseRequest, written: bytes) -> web.StreamResponse:
        pieces = 5
        size = -(-len(written) // pieces)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = len(written)
        await response.prepare(http)
        for start in range(0, len(written), size):
            await asyncio.sleep((self.chaos or Chaos()).slow_s / pieces)
            await response.write(written[start : start + size])
        await response.write_eof()
        return response


def _reset(http: web.BaseRequest) -> web.Response:
    """Drop the connection like a crashed server: the peer sees a reset, not an end of stream."""
    if http.transport is not None:
        connection = http.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        http.transport.abort()
    return web.Response(status=500)


def _bytes(written: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=written, status=status, headers=headers, content_type="application/json")


def _json(body: Any) -> web.Response:
    return _bytes(msgspec.json.encode(body))


def _error(status: int, code: str, message: str, *, headers: Mapping[str, str] | None = None) -> web.Response:
    body = {"type": "error", "error": {"message": message, "type": code, "code": code, "param": None}}
    return _bytes(msgspec.json.encode(body), status, headers)
