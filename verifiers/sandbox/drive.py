"""Runs generators that wait for file descriptors, for synchronous callers and for event loops.

A protocol is written once, as a generator that yields what it waits for. Synchronous callers poll; in an event loop,
a reader or writer callback is registered.
"""

from __future__ import annotations

import asyncio
import functools
import os
import select
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import RLock
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from verifiers.calls import Deferred, has_running_loop

LONGEST_MS = 1e9
THREADS = 2

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Until:
    """Wait until a descriptor is readable (or writable), or the deadline (of ``time.monotonic``) has passed."""

    fd: int
    deadline: float
    is_write: bool = False


Steps = Generator[Until | Future[Any], bool, T]
"""Yields what it waits for; receives True when that happened, and False if the deadline passed first."""


def either(function: Callable[Concatenate[S, P], Steps[T]]) -> Callable[Concatenate[S, P], Any]:
    """Make a method that returns steps callable from synchronous code, and awaitable inside a running loop.

    Like `calls.both`, but synchronous callers need no event loop.
    """

    @functools.wraps(function)
    async def coroutine(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return await drive_async(function(self, *args, **kwargs))

    @functools.wraps(function)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> Any:
        if has_running_loop():
            return Deferred(lambda: coroutine(self, *args, **kwargs), function.__qualname__)
        return drive(function(self, *args, **kwargs))

    call.coroutine = coroutine  # type: ignore[attr-defined]
    return cast(Callable[Concatenate[S, P], Any], call)


def drive(steps: Steps[T]) -> T:
    """Run the steps, blocking this thread while they wait."""
    try:
        wanted = next(steps)
        while True:
            try:
                came = _wait(wanted)
            except BaseException as error:  # Ctrl-C: let the steps clean up
                wanted = steps.throw(error)
            else:
                wanted = steps.send(came)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


async def drive_async(steps: Steps[T]) -> T:
    """Run the steps, yielding to the event loop while they wait."""
    try:
        wanted = next(steps)
        while True:
            try:
                came = await _arrival(wanted)
            except BaseException as error:  # cancelled: let the steps clean up
                wanted = steps.throw(error)
            else:
                wanted = steps.send(came)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


def _wait(wanted: Until | Future[Any]) -> bool:
    if isinstance(wanted, Future):
        wanted.result()
        return True
    poll = select.poll()
    poll.register(wanted.fd, select.POLLOUT if wanted.is_write else select.POLLIN)
    left_ms = (wanted.deadline - time.monotonic()) * 1000
    return bool(poll.poll(max(0.0, min(left_ms, LONGEST_MS))))


async def _arrival(wanted: Until | Future[Any]) -> bool:
    if isinstance(wanted, Future):
        await asyncio.wrap_future(wanted)
        return True
    loop = asyncio.get_running_loop()
    came: asyncio.Future[bool] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if wanted.is_write else (loop.add_reader, loop.remove_reader)
    add(wanted.fd, _settle, came, True)
    timer = loop.call_later(max(0, wanted.deadline - time.monotonic()), _settle, came, False)
    try:
        return await came
    finally:
        timer.cancel()
        remove(wanted.fd)


def _settle(came: asyncio.Future[bool], result: bool) -> None:
    if not came.done():
        came.set_result(result)


def apart(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Steps[T]:
    """Call a slow function; in a worker thread if this thread runs an event loop."""
    if not has_running_loop():
        return function(*args, **kwargs)
    future: Future[T] = _threads().submit(function, *args, **kwargs)
    yield future
    return future.result()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="sandbox-replies")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not survive a fork


class Gate:
    """A fair (FIFO) semaphore that works across threads and event loops."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = RLock()  # reentrant, because a finalizer may call `leave` while this thread holds it
        self._inside = 0
        self._line: deque[Future[None]] = deque()

    def is_busy(self) -> bool:
        """Whether any place is taken."""
        return self._inside > 0

    def try_enter(self) -> bool:
        """Take a place if one is free, without waiting."""
        with self._lock:
            if self._inside >= self.limit:
                return False
            self._inside += 1
            return True

    def enter(self) -> Steps[None]:
        """Wait for a place; if the wait is cancelled, the place goes to the next in line."""
        with self._lock:
            if self.try_enter():
                return
            ticket: Future[None] = Future()
            self._line.append(ticket)
        try:
            yield ticket
        except BaseException:
            if not ticket.cancel() and not ticket.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        with self._lock:
            while self._line:
                ticket = self._line.popleft()
                if ticket.set_running_or_notify_cancel():
                    break
            else:
                self._inside -= 1
                return
        ticket.set_result(None)
