"""A request's bytes → the reply's bytes, over connections that all clients of one event loop share.

Importing this imports aiohttp, which is slow, so clients import it on their first request.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import lru_cache
from io import BytesIO
from typing import Any
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from verifiers import deadlines
from verifiers.clients.access import NEAR_PROBATION_S, PROBATION_S, Access
from verifiers.clients.endpoints import is_local
from verifiers.clients.limits import Limit, open_files_cap
from verifiers.clients.protocol import Completion
from verifiers.clients.retries import LONGEST_PAUSE_S, Failure
from verifiers.clients.wire import Call, Reply
from verifiers.errors import BadReplyError, ConnectionFailedError, DeadlineError, RequestRefusedError

CONNECT_TIMEOUT_S = 30.0
KEEPALIVE_S = 30.0
CONNECTING_AT_ONCE = 64  # per host: a burst of handshakes overflows its backlog and permanently takes memory
LARGE_BYTES = 1 << 20
_ONE_LINE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*").fullmatch
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS)  # out of descriptors or ports


class Pool:
    """The session and the limits of one event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.session = aiohttp.ClientSession(
            connector=_Connector(limit=0, ttl_dns_cache=300, keepalive_timeout=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        self._cap = open_files_cap()
        self._limits: dict[str | tuple[str, int], Limit] = {}
        self._accesses: dict[tuple[str, str | None, str], Access] = {}

    def limit(self, endpoint: str) -> Limit:
        """The adaptive limit that all clients of an endpoint share."""
        limit = self._limits.get(endpoint)
        if limit is None:
            limit = self._limits[endpoint] = Limit(cap=self._cap)
        return limit

    def access(self, endpoint: str, api_key: str | None, model: str) -> Access:
        """Whether this key may use this model here, as far as known."""
        access = self._accesses.get((endpoint, api_key, model))
        if access is None:
            probation_s = NEAR_PROBATION_S if is_local(endpoint) else PROBATION_S
            access = self._accesses[endpoint, api_key, model] = Access(probation_s)
        return access

    def gate(self, endpoint: str, size: int) -> Limit:
        """The fixed limit set by ``max_concurrent``; the endpoint's adaptive one applies as well."""
        gate = self._limits.get((endpoint, size))
        if gate is None:
            gate = self._limits[endpoint, size] = Limit(start=size, cap=size)
            self.limit(endpoint).expect(size)
        return gate

    async def ask(
        self,
        call: Call,
        read: Callable[[Reply], Completion | Failure],
        endpoint: str,
        max_concurrent: int | None = None,
    ) -> Completion | Failure:
        """One attempt: wait for a slot, send, read the whole reply within the deadline, update the limit.

        Failures are returned, not raised, because aiohttp's exceptions contain the request's headers and so its key.
        """
        limit = self.limit(endpoint)
        limit.check()
        gate = None if max_concurrent is None else self.gate(endpoint, max_concurrent)
        patience_s = 2 * (call.timeout_s + LONGEST_PAUSE_S)
        if gate is not None and not gate.try_enter():
            await gate.enter(patience_s=patience_s)
        try:
            if not limit.try_enter():
                await limit.enter(patience_s=patience_s)
            epoch = limit.epoch
            outcome: Completion | Failure | None = None
            try:
                address, proxy = _address(call.url)
                with deadlines.within(call.timeout_s):
                    response = await self.session.post(
                        address, data=_payload(call.body), headers=call.headers, allow_redirects=False, proxy=proxy
                    )
                    body = await _whole(response, call.max_reply_bytes)
                outcome = read(Reply(response.status, response.headers, body))
            except _TooLongError as error:
                outcome = Failure(error=BadReplyError, text=str(error), is_costly=True)
            except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
                outcome = _failure(error, call.timeout_s)
            finally:
                self._learn(limit, gate, outcome, epoch)
                limit.leave()
        finally:
            if gate is not None:
                gate.leave()
        return outcome

    def _learn(self, limit: Limit, gate: Limit | None, outcome: Completion | Failure | None, epoch: int) -> None:
        """Update the limits before the slot goes to the next request in the queue."""
        now = deadlines.current().clock.now()
        if outcome is not None:
            limit.note(isinstance(outcome, Failure) and outcome.is_refusal, now)
        if isinstance(outcome, Completion):
            limit.succeeded(now)
            if gate is not None:
                gate.succeeded(now)
        elif outcome is not None and outcome.is_overload:
            limit.overloaded(epoch, outcome.retry_after_s)

    async def close(self) -> None:
        await self.session.close()


class _TooLongError(Exception):
    """A reply is longer than ``max_reply_bytes``."""


async def _whole(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body of a reply. Closes the connection and raises once it is longer than ``most`` bytes."""
    size = response.content_length
    if size is not None and size <= most and "Content-Encoding" not in response.headers:
        return await response.read()
    chunks: list[bytes] = []
    left = most - (size or 0)
    try:
        if left >= 0:
            left = most
            async for chunk in response.content.iter_any():
                chunks.append(chunk)
                left -= len(chunk)
                if left < 0:
                    break
        if left < 0:
            raise _TooLongError(f"the reply is longer than max_reply_bytes={most:,}")
    except BaseException:
        response.close()  # the rest of the body is still in transit
        raise
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class _Connector(aiohttp.TCPConnector):
    """Limits how many connections to one host are opened at the same time."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._turns: defaultdict[Any, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(CONNECTING_AT_ONCE))

    async def _create_connection(self, req: Any, *args: Any, **kwargs: Any) -> Any:
        async with self._turns[req.connection_key]:
            try:
                with deadlines.within(CONNECT_TIMEOUT_S):
                    return await super()._create_connection(req, *args, **kwargs)
            except TimeoutError as error:
                raise aiohttp.ServerTimeoutError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from error


def prepared(*layers: Mapping[str, Any]) -> CIMultiDictProxy[str]:
    """Headers in the form that is cheapest to send repeatedly; later layers override earlier ones."""
    headers: CIMultiDict[str] = CIMultiDict()
    for layer in layers:
        headers.update({name: str(value) for name, value in layer.items() if value is not None})
    if bad := sorted({name for name, value in headers.items() if not _ONE_LINE(name + value)}):
        raise RequestRefusedError(f"the header {bad[0]!r} contains a line break or another character that HTTP forbids")
    return CIMultiDictProxy(headers)


def _payload(body: bytes) -> bytes | BytesIO:
    """A large body (images) as a stream; aiohttp warns about large bodies that are plain bytes."""
    return body if len(body) <= LARGE_BYTES else BytesIO(body)


@lru_cache(maxsize=1024)
def _address(url: str) -> tuple[URL, URL | None]:
    """A URL, and the environment's proxy for it (cached, because aiohttp's own lookup uses a thread each time)."""
    address = URL(url)
    proxy = getproxies_environment().get(address.scheme)
    if not proxy or proxy_bypass_environment(address.host or ""):
        return address, None
    return address, URL(proxy if "://" in proxy else f"http://{proxy}")


def _failure(error: Exception, timeout_s: float) -> Failure:
    if isinstance(error, ValueError):  # aiohttp refuses to send this: a broken URL, two kinds of authorization
        return Failure(error=RequestRefusedError, text=_say(error), is_final=True)
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return Failure(error=ConnectionFailedError, text=_say(error), is_final=True)
    if isinstance(error, aiohttp.ClientResponseError):
        return Failure(error=BadReplyError, text=f"the HTTP reply cannot be parsed: {error.message or _say(error)}")
    if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
        return Failure(error=DeadlineError, text=f"no complete reply within {timeout_s:g} s", is_costly=True)
    is_overload = isinstance(error, OSError) and error.errno in _EXHAUSTED
    return Failure(error=ConnectionFailedError, text=_say(error), is_overload=is_overload)


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
