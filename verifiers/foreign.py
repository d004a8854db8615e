"""A function that a user wrote → a call that cannot block the event loop, run without a limit, or end the run.

Sync functions do not run in the event loop's thread, except those that work in no other: see `Hook` and `Lane`.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType, CoroutineType, NoneType
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakValueDictionary

from verifiers import deadlines
from verifiers.escapes import TimeLimitError, contained
from verifiers.lanes import Call, home, lane_of
from verifiers.threads import in_thread

PROMOTE_AFTER = 2  # quick calls in a row, until a function moves to the shared thread
QUICK_S = 0.005
SLOW_S = 0.05
MAX_BLOCKED = 512  # calls of one function at a time in worker threads
MAX_STUCK = 64  # calls of one function that exceeded their limit and still run
NEVER_AWAITED = frozenset((NoneType, bool, int, float, str, list, dict, tuple))


class _Inline(threading.local):
    depth = 0


inline = _Inline()


# --- time limits --------------------------------------------------------------------------------------------------

Kind = Literal["reward", "hook"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimits:
    """The time limits for one call of a reward function or of an environment's hook."""

    reward_s: float = 600.0
    hook_s: float = 3600.0
    chosen: frozenset[str] = frozenset()  # limits set for the whole run, which an environment cannot change

    def __post_init__(self) -> None:
        for name, seconds in (("reward_timeout_s", self.reward_s), ("hook_timeout_s", self.hook_s)):
            if not seconds > 0:
                raise ValueError(f"{name}={seconds!r} must be a number of seconds above 0")


limits: contextvars.ContextVar[TimeLimits] = contextvars.ContextVar("time_limits", default=TimeLimits())  # noqa: B039


@contextmanager
def time_limits(*, reward_s: float | None = None, hook_s: float | None = None, for_all: bool = False) -> Iterator[None]:
    """Calls within the block have these limits. None keeps a limit, and a limit set with ``for_all`` stays fixed.

    >>> with time_limits(reward_s=5):
    ...     Hook(print, kind="reward").limit_s, Hook(print, kind="hook").limit_s
    (5, 3600.0)
    """
    now = limits.get()
    wanted = {"reward_s": reward_s, "hook_s": hook_s}
    given = {name: value for name, value in wanted.items() if value is not None and name not in now.chosen}
    token = limits.set(replace(now, chosen=now.chosen | given.keys() if for_all else now.chosen, **given))
    try:
        yield
    finally:
        limits.reset(token)


# --- calls --------------------------------------------------------------------------------------------------------


class Hook:
    """A function that a user wrote, sync or async: ``await hook(...)`` calls it.

    A sync function first runs in worker threads, where it may block. After two quick calls in a row it shares one
    thread with all other quick functions (`Lane`), which costs far less. If a call then takes long, the function goes
    back to worker threads for good. It sees no running loop in either place, so sync code may call
    ``env.rollout(...)`` or ``asyncio.run``. A call that exceeds its limit (its own ``timeout_s``, or that of its
    ``kind``) ends with `TimeLimitError`, and its thread is abandoned. Whatever a function raises becomes an Exception.
    """

    __slots__ = (
        "__weakref__",
        "_quick_calls",
        "_slots",
        "function",
        "is_async",
        "is_main_only",
        "is_pinned",
        "is_quick",
        "kind",
        "stuck",
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
        self.stuck: set[Call] = set()
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        if self.is_async:
            self._register_on_loop()

    def _register_on_loop(self) -> None:
        """Register the function's code, so that the watchdog can name it if it blocks the loop."""
        code = code_of(self.function)
        if code is not None:
            on_loop[code] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process starts without the measurements: the function may be slow there."""
        return functools.partial(Hook, timeout_s=self.timeout_s, kind=self.kind), (self.function,)

    @property
    def limit_s(self) -> float | None:
        """The time limit of a call in the current context, in seconds."""
        if self.timeout_s is not None or self.kind is None:
            return self.timeout_s
        return limits.get().reward_s if self.kind == "reward" else limits.get().hook_s

    async def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        limit_s = self.limit_s
        try:
            if self.is_async:
                result = self.function(*args, **kwargs)
            elif self.is_main_only:
                result = self._call_on_loop(args, kwargs)
            else:
                result = await self._call_elsewhere(args, kwargs, limit_s)
            kind = type(result)
            if kind in NEVER_AWAITED or (kind is not CoroutineType and not inspect.isawaitable(result)):
                return result
            if not self.is_async:
                self.is_async = True
                self._register_on_loop()
            began = time.perf_counter()
            token = is_foreign.set(True)
            try:
                result = await _within(limit_s, result)
            finally:
                is_foreign.reset(token)
            if time.perf_counter() - began > deadlines.HELD_S:
                self._leave_loop_if_it_blocks()
            return result
        except Exception:
            raise
        except BaseException as error:  # foreign code
            raise contained(error) from error

    async def _call_elsewhere(self, args: tuple[Any, ...], kwargs: dict[str, Any], limit_s: float | None) -> Any:
        loop = asyncio.get_running_loop()
        if self.stuck and len(self.stuck) >= MAX_STUCK:
            raise TimeLimitError(
                f"{len(self.stuck)} earlier calls have not returned, and each holds a thread: it is not called again"
            )
        call = Call(self, functools.partial(self.function, *args, **kwargs), loop, limit_s)
        try:
            if self.is_quick:
                return await lane_of(loop).submit(call)  # the lane enforces the limit
            if home.get() is not None:  # nested in another hook, which already holds a slot: waiting could deadlock
                return await _within(limit_s, in_thread(call.run))
            async with self._slot(loop):
                return await _within(limit_s, in_thread(call.run))
        except ValueError as error:
            if "signal only works in main thread" not in str(error):
                raise
            self.is_main_only = True
            self._register_on_loop()
            return self._call_on_loop(args, kwargs)
        finally:
            if not call.has_ended:  # an abandoned call counts as stuck until it returns
                call.give_up()

    def _slot(self, loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
        slots = self._slots.get(loop)
        if slots is None:
            slots = self._slots[loop] = asyncio.Semaphore(MAX_BLOCKED)
        return slots

    def _leave_loop_if_it_blocks(self) -> None:
        """If the function awaits nothing, its slow call blocked the loop: run it in threads from now on."""
        code = code_of(self.function)
        if code is not None and not _awaits(code):
            self.function = functools.partial(_run_unawaited, self.function)
            self.is_async, self.is_pinned = False, True

    def _call_on_loop(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that works only in the main thread, with the running loop hidden from it."""
        loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        inline.depth += 1
        try:
            return self.function(*args, **kwargs)
        finally:
            inline.depth -= 1
            asyncio._set_running_loop(loop)

    def note(self, took_s: float) -> None:
        """Record a call's duration: a function that was quick twice in a row shares a thread until one slow call."""
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


# --- tasks that foreign code starts -------------------------------------------------------------------------------

is_foreign: contextvars.ContextVar[bool] = contextvars.ContextVar("is_foreign", default=False)
"""Whether foreign code is running, or a task that it started."""


class _Guarded(Coroutine[Any, Any, Any]):
    """The coroutine of a task that foreign code starts: its ``sys.exit()`` ends only that task, not the loop."""

    def __init__(self, coroutine: Any) -> None:
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._coroutine.throw, *error)

    def _step(self, step: Callable[..., Any], *args: Any) -> Any:
        try:
            return step(*args)
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            raise contained(error) from error

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        """Frameworks read attributes of a task's coroutine."""
        return getattr(self._coroutine, name)


@contextmanager
def guarded_tasks() -> Iterator[None]:
    """Within the block, no task that foreign code starts can end the running loop. Keeps an existing task factory."""
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is not None:
        yield
        return
    loop.set_task_factory(_make_task)
    try:
        yield
    finally:
        if loop.get_task_factory() is _make_task:
            loop.set_task_factory(None)


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(_Guarded(coroutine) if is_foreign.get() else coroutine, loop=loop, **options)


def _run_unawaited(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run an async function that awaits nothing like a sync function."""
    try:
        function(*args, **kwargs).send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("it awaited something, although its code contains no await")


def _awaits(code: CodeType) -> bool:
    import dis

    names = {instruction.opname for instruction in dis.get_instructions(code)}
    return any("AWAIT" in name or "ASYNC" in name or "ANEXT" in name for name in names)


def code_of(function: Any) -> CodeType | None:
    """The code object of a function, partial, bound method or callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    if not inspect.isroutine(function):
        function = getattr(type(function), "__call__", None)  # noqa: B004
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return code if isinstance(code, CodeType) else None


on_loop: WeakValueDictionary[CodeType, Hook] = WeakValueDictionary()
"""User functions that run in an event loop's thread, by code object, so that the watchdog can find a blocking one."""


def is_async_callable(function: Any) -> bool:
    """Whether a call returns a coroutine; also for partials, bound methods and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.iscoroutinefunction(function) or hasattr(function, "coroutine"):
        return True
    return not inspect.isroutine(function) and inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
