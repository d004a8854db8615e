"""Calls of quick functions → their results, computed in one shared thread.

All calls made in one iteration of the event loop are handed over at once, because a thread switch per call would cost
more than the calls.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from verifiers import deadlines
from verifiers.escapes import TimeLimitError, contained
from verifiers.threads import threads

POST_EVERY_S = 0.002  # how often results are sent back to the loop while more calls wait

home: contextvars.ContextVar[asyncio.AbstractEventLoop | None] = contextvars.ContextVar("home_loop", default=None)
"""The event loop from which the function that runs in this thread was called."""


class Owner(Protocol):
    """The hook to which a call belongs."""

    is_quick: bool
    is_pinned: bool
    stuck: set[Any]

    def note(self, took_s: float) -> None: ...


class Call:
    """One call of a sync function in a thread."""

    __slots__ = ("began", "context", "function", "future", "has_ended", "hook", "is_given_up", "limit_s")

    def __init__(
        self, hook: Owner, function: Callable[[], Any], loop: asyncio.AbstractEventLoop, limit_s: float | None
    ) -> None:
        self.hook = hook
        self.limit_s = limit_s
        self.function = function
        self.context = contextvars.copy_context()
        self.context.run(home.set, loop)
        self.future: asyncio.Future[Any] | None = None
        self.began = 0.0
        self.has_ended = self.is_given_up = False

    def run(self) -> Any:
        if self.is_given_up:
            return None
        self.began = began = time.perf_counter()
        try:
            result = self.context.run(self.function)
        except Exception:
            raise
        except BaseException as error:  # foreign code
            raise contained(error) from error
        else:
            self.hook.note(time.perf_counter() - began)
            return result
        finally:
            self.has_ended = True
            self.hook.stuck.discard(self)

    def limit(self, loop: asyncio.AbstractEventLoop) -> None:
        """Enforce the time limit of a call that turned out to be slow."""
        if self.limit_s is not None:
            loop.call_later(self.began + self.limit_s - time.perf_counter(), self._expire)

    def _expire(self) -> None:
        if self.future is not None and not self.future.done():
            self.future.set_exception(TimeLimitError(f"it did not return within {self.limit_s:g} s"))

    def give_up(self) -> None:
        self.is_given_up = True
        if self.began:
            self.hook.stuck.add(self)
            if self.has_ended:  # it ended in the meantime
                self.hook.stuck.discard(self)


class Lane:
    """The quick calls of one event loop, which run one after the other in one thread.

    Calls made in one iteration of the loop are handed over at once, and so are their results. The loop watches the
    thread: if a call runs for longer than `HELD_S`, it keeps that thread, and the others continue in another one.
    """

    def __init__(self) -> None:
        self._gathered: list[Call] = []
        self._runner = _Runner()
        self._is_watched = False  # not the timer handle, which references the loop and would keep it alive

    def submit(self, call: Call) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        call.future = loop.create_future()
        if not self._gathered:
            loop.call_soon(self._send)
        self._gathered.append(call)
        return call.future

    def _send(self) -> None:
        calls, self._gathered = self._gathered, []
        loop = asyncio.get_running_loop()
        self._runner.take(calls, loop)
        if not self._is_watched:
            self._watch(loop)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_watched = True
        loop.call_later(deadlines.HELD_S / 2, self._look)

    def _look(self) -> None:
        runner, loop = self._runner, asyncio.get_running_loop()
        self._is_watched = False
        runner.settle()  # deliver the results of calls that ended before the one that blocks the lane
        held_by = runner.current
        if held_by is not None and time.perf_counter() - held_by.began > deadlines.HELD_S:
            held_by.hook.is_quick, held_by.hook.is_pinned = False, True
            held_by.limit(loop)
            self._runner = _Runner()
            if rest := runner.replace():
                self._runner.take(rest, loop)
        if self._runner.is_busy:
            self._watch(loop)


class _Runner:
    """The thread of a lane. It runs only while there are calls."""

    def __init__(self) -> None:
        self.current: Call | None = None
        self.is_busy = False
        self._calls: deque[Call] = deque()
        self._ended: deque[_Outcome] = deque()
        self._mutex = threading.Lock()

    def take(self, calls: list[Call], loop: asyncio.AbstractEventLoop) -> None:
        with self._mutex:
            self._calls.extend(calls)
            was_busy, self.is_busy = self.is_busy, True
        if not was_busy:
            threads.submit(functools.partial(self._run, loop))

    def replace(self) -> list[Call]:
        """Take away the waiting calls, because the current one is slow."""
        with self._mutex:
            rest = list(self._calls)
            self._calls.clear()
        return rest

    def _next(self) -> Call | None:
        with self._mutex:
            if self._calls:
                return self._calls.popleft()
            self.is_busy = False
            return None

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        posted = time.perf_counter()
        while (call := self._next()) is not None:
            outcome: _Outcome
            call.began = time.perf_counter()
            self.current = call
            try:
                outcome = (call, call.run(), None)
            except Exception as error:  # foreign code; raised again where the call is awaited
                outcome = (call, None, _carried(error))
            self.current = None
            self._ended.append(outcome)
            if time.perf_counter() - posted > POST_EVERY_S and self._calls:
                self._post(loop)
                posted = time.perf_counter()
        self._post(loop)

    def _post(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.call_soon_threadsafe(self.settle)
        except RuntimeError:  # the loop was closed while the functions ran
            return

    def settle(self) -> None:
        """Deliver the results of ended calls. Runs on the loop."""
        while self._ended:
            call, result, error = self._ended.popleft()
            future = call.future
            if future is None or future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


_Outcome = tuple[Call, Any, Exception | None]


def _carried(error: Exception) -> Exception:
    """A future cannot hold a StopIteration."""
    return RuntimeError("StopIteration") if isinstance(error, StopIteration) else error


_lanes: WeakKeyDictionary[asyncio.AbstractEventLoop, Lane] = WeakKeyDictionary()


def lane_of(loop: asyncio.AbstractEventLoop) -> Lane:
    lane = _lanes.get(loop)
    if lane is None:
        lane = _lanes[loop] = Lane()
    return lane
