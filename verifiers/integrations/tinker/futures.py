"""Pending and finished requests, by request id."""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from verifiers import errors

MOST_FETCHED = 256  # fetched results that are kept, in case the response was lost
WAIT_S = 20.0  # before a client is told to ask again; clients close a connection after 45 s


@dataclass(eq=False, slots=True)
class Pending:
    """One request: its id, its future result, and the reply to its submission."""

    id: str
    future: Future[Any]
    told: dict[str, Any] = field(default_factory=dict)
    owner: str = ""
    key: Hashable = None
    cancel: Callable[[], Any] | None = None


class Futures:
    """All submitted requests. A repeated submission (because its reply was lost) gives the same request."""

    def __init__(self) -> None:
        self._all: dict[str, Pending] = {}
        self._fetched: OrderedDict[str, None] = OrderedDict()
        self._by_key: dict[Hashable, Pending] = {}

    def known(self, key: Hashable) -> Pending | None:
        return self._by_key.get(key)

    def add(self, kind: str, future: Future[Any], *, key: Hashable = None, owner: str = "", **told: Any) -> Pending:
        one = Pending(f"{kind}:{uuid.uuid4().hex}", future, told, owner, key)
        self._all[one.id] = one
        if key is not None:
            self._by_key[key] = one
        one.told["request_id"] = one.id
        return one

    async def result(self, request_id: Any) -> Any:
        """The result of a request; raises TimeoutError after `WAIT_S`, and KeyError for an unknown id."""
        one = self._all[request_id]
        if not one.future.done():
            await _end_of(one.future)
        self._fetched[request_id] = None
        self._fetched.move_to_end(request_id)
        while len(self._fetched) > MOST_FETCHED:
            self._drop(next(iter(self._fetched)))
        return one.future.result()

    def cancel(self, request_id: Any) -> None:
        one = self._all.get(request_id)
        if one is not None and one.cancel is not None:
            one.cancel()

    def forget(self, owner: str) -> None:
        """Drop all requests of a session, and cancel the pending ones."""
        for request_id in [one.id for one in self._all.values() if one.owner == owner]:
            self.cancel(request_id)
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        self._fetched.pop(request_id, None)
        one = self._all.pop(request_id)
        self._by_key.pop(one.key, None)


async def _end_of(future: Future[Any]) -> None:
    """Wait until a future is done, without consuming it; raises TimeoutError after `WAIT_S`."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def note(_: Future[Any]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(ended.set)

    future.add_done_callback(note)
    async with asyncio.timeout(WAIT_S):
        await ended.wait()


def failure(error: BaseException) -> dict[str, str]:
    """The result of a failed request: the message, and whether the user or the server is to blame."""
    is_users = isinstance(error, errors.RequestRefusedError | ValueError | errors.OverlongPromptError)
    if isinstance(error, errors.Error | ValueError):
        return {"error": str(error), "category": "user" if is_users else "server"}
    return {"error": f"{type(error).__name__}: {error}", "category": "server"}
