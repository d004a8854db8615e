"""A function that someone else wrote → a call of it that neither stops the loop, nor lasts for ever, nor ends the run.

Sync functions never run on the event loop's own thread (but for those that work nowhere else): see `Hook` and `Lane`.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CoroutineType
from typing import Any, Literal
from weakref import WeakKeyDictionary

from verifiers import deadlines
from verifiers.threads import in_thread, threads

PROMOTE_AFTER = 2
QUICK_S = 0.005
SLOW_S = 0.05
MAX_BLOCKED = 512
MAX_STUCK = 64
POST_EVERY_S = 0.002

home: contextvars.ContextVar[asyncio.AbstractEventLoop | None] = contextvars.ContextVar("home_loop", default=None)


class _Inline(threading.local):
    depth = 0


inline = _Inline()


# --- what it raises -----------------------------------------------------------------------------------------------


class EscapedError(RuntimeError):
    """Foreign code raised what is no Exception, such as ``pytest.fail()`` or GeneratorExit."""


class TimeLimitError(TimeoutError):
    """A call did not return within its limit."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, as our own signal handler raises it where nothing else would get through."""


def is_cancelled() -> bool:
    """Was the current task told to stop, or did a CancelledError come from within what it awaits?"""
    if asyncio._get_running_loop() is None:
        return False
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def contained(error: BaseException) -> Exception:
    """What foreign code raised, as an Exception; only what really stops this task or this program is raised again.

    >>> contained(SystemExit(3)), contained(KeyError("x"))
    (RuntimeError('it called exit(3)'), KeyError('x'))
    """
    if isinstance(error, Exception):
        return error
    if _is_stop(error):
        raise error
    made: Exception
    if isinstance(error, SystemExit):
        made = RuntimeError(f"it called exit({error.code!r})")
    elif isinstance(error, asyncio.CancelledError):
        made = RuntimeError("something it awaited was cancelled")
    else:
        made = EscapedError(f"it raised {type(error).__name__}: {error}")
    made.__cause__ = error
    return made


def _is_stop(error: BaseException) -> bool:
    if isinstance(error, asyncio.CancelledError):
        return is_cancelled()
    if isinstance(error, GeneratorExit):  # thrown in from outside it was raised nowhere deeper than where it is caught
        return error.__traceback__ is not None and error.__traceback__.tb_next is None
    if not isinstance(error, KeyboardInterrupt) or isinstance(error, Interrupted):
        return isinstance(error, Interrupted)
    if threading.current_thread() is not threading.main_thread():
        return False
    return not getattr(signal.getsignal(signal.SIGINT), "is_ours", False)  # ours raises `Interrupted`


# --- how long it may take -----------------------------------------------------------------------------------------

Kind = Literal["reward", "hook"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimits:
    """The seconds that one call of a reward function or of an environment's hook may take."""

    reward_s: float = 600.0
    hook_s: float = 3600.0

    def __post_init__(self) -> None:
        for name, seconds in (("reward_timeout_s", self.reward_s), ("hook_timeout_s", self.hook_s)):
            if not seconds > 0:
                raise ValueError(f"{name}={seconds!r} must be a number of seconds above 0")


limits: contextvars.ContextVar[TimeLimits] = contextvars.ContextVar("time_limits", default=TimeLimits())  # noqa: B039


@contextmanager
def time_limits(*, reward_s: float | None = None, hook_s: float | None = None) -> Iterator[None]:
    """While this lasts, calls have these limits; None leaves one as it is.

    >>> with time_limits(reward_s=5):
    ...     Hook(print, kind="reward").limit_s, Hook(print, kind="hook").limit_s
    (5, 3600.0)
    """
    given = {name: value for name, value in (("reward_s", reward_s), ("hook_s", hook_s)) if value is not None}
    token = limits.set(replace(limits.get(), **given))
    try:
        yield
    finally:
        limits.reset(token)


# --- calling it ---------------------------------------------------------------------------------------------------


class Hook:
    """A function that a user wrote, sync or async: ``await hook(...)`` calls it.

    A sync function starts out in worker threads, where it may block. Once it has shown to be quick it shares one
    thread with the others that are (`Lane`), which costs far less; if it then takes long once, it goes back to threads
    of its own for good. It sees no running loop in either place, so sync code may call ``env.rollout(...)`` or
    ``asyncio.run``. Past its limit (its own ``timeout_s``, or that of its ``kind``) a call ends with `TimeLimitError`,
    and its thread is left behind. Whatever a function raises comes out as an Exception.
    """

    __slots__ = (
        "__weakref__",
        "_quick_calls",
        "_slots",
        "_stuck",
        "function",
        "is_async",
        "is_main_only",
        "is_pinned",
        "is_quick",
        "kind",
        "timeout_s",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        timeout_s: float | None = None,
        kind: Kind | None = None,
        may_share: bool = True,
    ) -> None:
        self.function = function
        self.timeout_s = timeout_s
        self.kind = kind
        self.is_async = is_async_callable(function)
        self.is_quick = False
        self.is_pinned = not may_share
        self.is_main_only = False
        self._quick_calls = 0
        self._stuck: set[_Call] = set()
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """What was learned about the function does not travel: it may be slow over there."""
        return functools.partial(Hook, timeout_s=self.timeout_s, kind=self.kind), (self.function,)

    @property
    def limit_s(self) -> float | None:
        """The seconds that a call may take here and now."""
        if self.timeout_s is not None or self.kind is None:
            return self.timeout_s
        return limits.get().reward_s if self.kind == "reward" else limits.get().hook_s

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        limit_s = self.limit_s
        try:
            if self.is_async:
                result = self.function(*args, **kwargs)
            elif self.is_main_only:
                result = self._call_on_loop(args, kwargs)
            else:
                result = await self._call_elsewhere(args, kwargs, limit_s)
            if type(result) is not CoroutineType and not inspect.isawaitable(result):
                return result
            self.is_async = True
            return await _within(limit_s, result)
        except Exception:
            raise
        except BaseException as error:  # foreign code
            raise contained(error) from error

    async def _call_elsewhere(self, args: tuple[Any, ...], kwargs: dict[str, Any], limit_s: float | None) -> Any:
        loop = asyncio.get_running_loop()
        if self._stuck and len(self._stuck) >= MAX_STUCK:
            raise TimeLimitError(
                f"{len(self._stuck)} calls of it have not returned, and each holds a thread: no more are made"
            )
        call = _Call(self, functools.partial(self.function, *args, **kwargs), loop)
        try:
            if self.is_quick:
                return await _finished(call, _lane_of(loop).submit(call), limit_s)
            if home.get() is not None:  # nested in another hook, which holds a slot already: waiting could deadlock
                return await _finished(call, in_thread(call.run), limit_s)
            async with self._slot(loop):
                return await _finished(call, in_thread(call.run), limit_s)
        except ValueError as error:
            if "signal only works in main thread" not in str(error):
                raise
            self.is_main_only = True
            return self._call_on_loop(args, kwargs)

    def _slot(self, loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
        slots = self._slots.get(loop)
        if slots is None:
            slots = self._slots[loop] = asyncio.Semaphore(MAX_BLOCKED)
        return slots

    def _call_on_loop(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that works in the main thread only, with the running loop out of its sight."""
        loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        inline.depth += 1
        try:
            return self.function(*args, **kwargs)
        finally:
            inline.depth -= 1
            asyncio._set_running_loop(loop)

    def note(self, took_s: float) -> None:
        """Learn from a call that has ended: quick twice in a row shares a thread, slow once never does again."""
        if took_s > SLOW_S and self.is_quick:
            self.is_quick, self.is_pinned = False, True
        self._quick_calls = self._quick_calls + 1 if took_s < QUICK_S else 0
        if self._quick_calls >= PROMOTE_AFTER and not self.is_pinned:
            self.is_quick = True


async def _within(limit_s: float | None, result: Any) -> Any:
    if limit_s is None:
        return await result
    deadline = deadlines.current().within(limit_s)
    try:
        with deadline:
            return await result
    except TimeoutError as error:
        if not deadline.is_over or isinstance(error, TimeLimitError):
            raise
        raise TimeLimitError(f"it did not return within {limit_s:g} s") from None


async def _finished(call: _Call, future: asyncio.Future[Any], limit_s: float | None) -> Any:
    """Wait for a call in another thread; one that is given up is remembered for as long as it goes on."""
    try:
        return await _within(limit_s, future)
    finally:
        if not call.has_ended:
            call.give_up()


class _Call:
    """One call of a sync function in a thread."""

    __slots__ = ("began", "context", "function", "future", "has_ended", "hook", "is_given_up")

    def __init__(self, hook: Hook, function: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.hook = hook
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
            self.hook._stuck.discard(self)

    def give_up(self) -> None:
        self.is_given_up = True
        if self.began:
            self.hook._stuck.add(self)
            if self.has_ended:  # meanwhile
                self.hook._stuck.discard(self)


# --- quick functions share a thread -------------------------------------------------------------------------------


class Lane:
    """The quick calls of one event loop, one after the other in one thread.

    All that come together in one turn of the loop go over together, and so do their results: a switch of threads for
    each would cost more than the calls. The loop keeps an eye on it: a call that holds the lane for longer than a
    fraction of a second is left alone with its thread, and the others go on in another.
    """

    def __init__(self) -> None:
        self._gathered: list[_Call] = []
        self._runner = _Runner()
        self._watch: asyncio.TimerHandle | None = None

    def submit(self, call: _Call) -> asyncio.Future[Any]:
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
        if self._watch is None:
            self._watch = loop.call_later(deadlines.HELD_S / 2, self._look)

    def _look(self) -> None:
        runner, loop = self._runner, asyncio.get_running_loop()
        self._watch = None
        runner.settle()  # what was done before a call that holds the lane
        held_by = runner.current
        if held_by is not None and time.perf_counter() - held_by.began > deadlines.HELD_S:
            held_by.hook.is_quick, held_by.hook.is_pinned = False, True
            self._runner = _Runner()
            if rest := runner.replace():
                self._runner.take(rest, loop)
        if self._runner.is_busy:
            self._watch = loop.call_later(deadlines.HELD_S / 2, self._look)


class _Runner:
    """The thread of a lane, for as long as there are calls."""

    def __init__(self) -> None:
        self.current: _Call | None = None
        self.is_busy = False
        self._calls: deque[_Call] = deque()
        self._ended: deque[_Outcome] = deque()
        self._mutex = threading.Lock()

    def take(self, calls: list[_Call], loop: asyncio.AbstractEventLoop) -> None:
        with self._mutex:
            self._calls.extend(calls)
            was_busy, self.is_busy = self.is_busy, True
        if not was_busy:
            threads.submit(functools.partial(self._run, loop))

    def replace(self) -> list[_Call]:
        """Its current call will keep it for long: take the others away."""
        with self._mutex:
            rest = list(self._calls)
            self._calls.clear()
        return rest

    def _next(self) -> _Call | None:
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
            except Exception as error:  # foreign code; the awaiting side decides
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
        except RuntimeError:  # the loop was closed while the functions still ran
            return

    def settle(self) -> None:
        """On the loop: hand over what has ended."""
        while self._ended:
            call, result, error = self._ended.popleft()
            future = call.future
            if future is None or future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


_Outcome = tuple[_Call, Any, Exception | None]


def _carried(error: Exception) -> Exception:
    """A future cannot carry a StopIteration."""
    return RuntimeError("StopIteration") if isinstance(error, StopIteration) else error


_lanes: WeakKeyDictionary[asyncio.AbstractEventLoop, Lane] = WeakKeyDictionary()


def _lane_of(loop: asyncio.AbstractEventLoop) -> Lane:
    lane = _lanes.get(loop)
    if lane is None:
        lane = _lanes[loop] = Lane()
    return lane


def is_async_callable(function: Any) -> bool:
    """Does calling this give a coroutine? Sees through partials, bound methods and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.iscoroutinefunction(function) or hasattr(function, "coroutine"):
        return True
    return not inspect.isroutine(function) and inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
