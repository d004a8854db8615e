"""A function that someone else wrote → a call of it that neither stops the loop, nor lasts for ever, nor ends the run.

Sync functions never run on the event loop's own thread (but for those that work nowhere else): see `Hook` and `Lane`.
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

PROMOTE_AFTER = 2
QUICK_S = 0.005
SLOW_S = 0.05
MAX_BLOCKED = 512
MAX_STUCK = 64
NEVER_AWAITED = frozenset((NoneType, bool, int, float, str, list, dict, tuple))


class _Inline(threading.local):
    depth = 0


inline = _Inline()


# --- how long it may take -----------------------------------------------------------------------------------------

Kind = Literal["reward", "hook"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimits:
    """The seconds that one call of a reward function or of an environment's hook may take."""

    reward_s: float = 600.0
    hook_s: float = 3600.0
    chosen: frozenset[str] = frozenset()  # for the whole run: what an environment says by itself gives way

    def __post_init__(self) -> None:
        for name, seconds in (("reward_timeout_s", self.reward_s), ("hook_timeout_s", self.hook_s)):
            if not seconds > 0:
                raise ValueError(f"{name}={seconds!r} must be a number of seconds above 0")


limits: contextvars.ContextVar[TimeLimits] = contextvars.ContextVar("time_limits", default=TimeLimits())  # noqa: B039


@contextmanager
def time_limits(*, reward_s: float | None = None, hook_s: float | None = None, for_all: bool = False) -> Iterator[None]:
    """While this lasts, calls have these limits; None leaves one as it is, and so does one that was set ``for_all``.

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
            self._expect_on_loop()

    def _expect_on_loop(self) -> None:
        """Let it be recognised, should it hold the loop."""
        code = code_of(self.function)
        if code is not None:
            on_loop[code] = self

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
            kind = type(result)
            if kind in NEVER_AWAITED or (kind is not CoroutineType and not inspect.isawaitable(result)):
                return result
            if not self.is_async:
                self.is_async = True
                self._expect_on_loop()
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
                f"{len(self.stuck)} calls of it have not returned, and each holds a thread: no more are made"
            )
        call = Call(self, functools.partial(self.function, *args, **kwargs), loop, limit_s)
        try:
            if self.is_quick:
                return await lane_of(loop).submit(call)  # the lane sees to its limit
            if home.get() is not None:  # nested in another hook, which holds a slot already: waiting could deadlock
                return await _within(limit_s, in_thread(call.run))
            async with self._slot(loop):
                return await _within(limit_s, in_thread(call.run))
        except ValueError as error:
            if "signal only works in main thread" not in str(error):
                raise
            self.is_main_only = True
            self._expect_on_loop()
            return self._call_on_loop(args, kwargs)
        finally:
            if not call.has_ended:  # one that is given up is remembered for as long as it goes on
                call.give_up()

    def _slot(self, loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
        slots = self._slots.get(loop)
        if slots is None:
            slots = self._slots[loop] = asyncio.Semaphore(MAX_BLOCKED)
        return slots

    def _leave_loop_if_it_blocks(self) -> None:
        """An async function that awaits nothing, and took that long, held the loop: from now on it runs in threads."""
        code = code_of(self.function)
        if code is not None and not _awaits(code):
            self.function = functools.partial(_run_unawaited, self.function)
            self.is_async, self.is_pinned = False, True

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


# --- tasks that it starts -----------------------------------------------------------------------------------------

is_foreign: contextvars.ContextVar[bool] = contextvars.ContextVar("is_foreign", default=False)
"""Is this code of someone else's, or a task that it started?"""


class _Guarded(Coroutine[Any, Any, Any]):
    """A coroutine in a task of its own: ``sys.exit()`` in there would end the loop, and now ends that task only."""

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
        """Frameworks look at the state of a task's coroutine."""
        return getattr(self._coroutine, name)


@contextmanager
def guarded_tasks() -> Iterator[None]:
    """While this lasts, no task that foreign code starts can end the running loop; a task factory of others stays."""
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


def _run_unawaited(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an async function that awaits nothing as what it is."""
    try:
        function(*args, **kwargs).send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("it awaited something after all")


def _awaits(code: CodeType) -> bool:
    import dis

    names = {instruction.opname for instruction in dis.get_instructions(code)}
    return any("AWAIT" in name or "ASYNC" in name or "ANEXT" in name for name in names)


def code_of(function: Any) -> CodeType | None:
    """The code of a function, seen through partials, bound methods and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    if not inspect.isroutine(function):
        function = getattr(type(function), "__call__", None)  # noqa: B004
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return code if isinstance(code, CodeType) else None


on_loop: WeakValueDictionary[CodeType, Hook] = WeakValueDictionary()
"""Functions of others that run on an event loop's own thread, by their code: for whoever looks who holds it."""


def is_async_callable(function: Any) -> bool:
    """Does calling this give a coroutine? Sees through partials, bound methods and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.iscoroutinefunction(function) or hasattr(function, "coroutine"):
        return True
    return not inspect.isroutine(function) and inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
