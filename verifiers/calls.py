"""One API for sync and async callers, and one way to call functions that users write.

Only this module and those below it need to know whether the caller has an event loop, and whether a hook is sync or
async, quick or blocking.
"""

from __future__ import annotations

import asyncio
import collections.abc
import contextvars
import functools
import inspect
import threading
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from verifiers.escapes import EscapedError, TimeLimitError, contained, has_escaped, is_cancelled
from verifiers.foreign import MAX_BLOCKED, QUICK_S, Hook, inline, is_async_callable, time_limits
from verifiers.lanes import home
from verifiers.threads import in_thread, leave_threads_behind

__all__ = [
    "MAX_BLOCKED",
    "QUICK_S",
    "Deferred",
    "EscapedError",
    "Hook",
    "PerLoop",
    "TimeLimitError",
    "asynchronous",
    "blocking",
    "both",
    "contained",
    "has_escaped",
    "has_running_loop",
    "in_thread",
    "is_async_callable",
    "is_cancelled",
    "is_default",
    "maybe_await",
    "run",
    "time_limits",
]

P = ParamSpec("P")
T = TypeVar("T")

ENDING_S = 5.0  # how long to wait for cancelled work before its thread is abandoned


def has_running_loop() -> bool:
    """Whether the caller runs inside an event loop."""
    return asyncio._get_running_loop() is not None


def run(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to completion and return its result, from any thread, with or without a running loop.

    >>> async def four(): return 4
    >>> run(four)
    4
    """
    if has_running_loop():
        return _run_in_new_thread(start)
    loop = home.get()
    if loop is not None and loop.is_running() and not inline.depth:
        return asyncio.run_coroutine_threadsafe(start(), loop).result()
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        leave_threads_behind(runner.get_loop())
        return runner.run(start())


def _run_in_new_thread(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    outcome: list[T] = []
    raised: list[BaseException] = []
    stops: list[Callable[[], object]] = []

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        stops.append(functools.partial(task.get_loop().call_soon_threadsafe, task.cancel))
        return await start()

    def target() -> None:
        try:
            outcome.append(run(main))
        except BaseException as error:  # raised again in the caller's thread
            raised.append(error)

    context = contextvars.copy_context()
    context.run(home.set, None)  # the caller's loop is blocked until this ends, so it must not be used
    thread = threading.Thread(target=context.run, args=(target,), daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:  # Ctrl-C in a notebook: cancel the work in the thread too
        for stop in stops:
            stop()
        thread.join(ENDING_S)  # it may ignore the cancellation; then the daemon thread is abandoned
        raise
    if raised:
        raise raised[0]
    return outcome[0]


class Deferred(collections.abc.Coroutine[Any, Any, T], Generic[T]):
    """The return value of a `both` call inside a running loop: await it, or use it as the result.

    If it is used without being awaited (unpacked, indexed, printed, as in a notebook cell), it runs on its own loop.
    """

    __slots__ = ("_coroutine", "_name", "_result", "_start")

    def __init__(self, start: Callable[[], Coroutine[Any, Any, T]], name: str = "a call") -> None:
        self._start = start
        self._name = name
        self._coroutine: Coroutine[Any, Any, T] | None = None
        self._result: list[T] = []

    def _running(self) -> Coroutine[Any, Any, T]:
        if self._coroutine is None:
            self._coroutine = self._run()
        return self._coroutine

    async def _run(self) -> T:
        if not self._result:
            self._result.append(await self._start())
        return self._result[0]

    def __del__(self) -> None:
        if self._coroutine is None and not self._result:
            warnings.warn(f"{self._name} was called inside a running loop and never awaited", RuntimeWarning, 2)

    def send(self, value: Any) -> Any:
        return self._running().send(value)

    def throw(self, *args: Any) -> Any:
        return self._running().throw(*args)

    def close(self) -> None:
        self._running().close()

    def __await__(self) -> Generator[Any, Any, T]:
        return (self._run() if self._result else self._running()).__await__()

    def _settle(self) -> T:
        if not self._result:
            running = self._running()
            if inspect.getcoroutinestate(running) != inspect.CORO_CREATED:
                raise RuntimeError(f"{self._name} is already running, or has failed: await it once and keep the result")
            _run_in_new_thread(lambda: running)
        return self._result[0]

    def __iter__(self) -> Any:
        return iter(self._settle())  # type: ignore[call-overload]

    def __getitem__(self, key: Any) -> Any:
        return self._settle()[key]  # type: ignore[index]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._settle()[key] = value  # type: ignore[index]

    def __bool__(self) -> bool:
        return True  # asyncio tests a task's coroutine when it prints the task; that must not run it

    def __eq__(self, other: object) -> bool:
        return self is other if isinstance(other, Deferred) else bool(self._settle() == other)

    __hash__ = object.__hash__

    def __len__(self) -> int:
        return len(self._settle())  # type: ignore[arg-type]

    def __contains__(self, key: object) -> bool:
        return key in self._settle()  # type: ignore[operator]

    def __str__(self) -> str:
        return str(self._settle())

    def __repr__(self) -> str:
        return repr(self._result[0]) if self._result else f"<{self._name}: not awaited or used yet>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Show the result in a notebook: a cell whose last line is the call runs it."""
        result = self._settle()
        shown = getattr(result, "_repr_html_", None)
        return {"text/plain": str(result), **({} if shown is None else {"text/html": shown()})}

    def __float__(self) -> float:
        return float(self._settle())  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("cr_", "gi_", "ag_")):
            return getattr(self._running(), name)
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._settle(), name)


def both(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Any]:
    """Make an async function callable from sync code too.

    Without a running loop the call runs to completion and returns the result; inside a loop it returns a `Deferred`.
    The async function itself is available as ``.coroutine``.

    >>> @both
    ... async def double(x): return 2 * x
    >>> double(2)
    4
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        def start() -> Coroutine[Any, Any, T]:
            return function(*args, **kwargs)

        return Deferred(start, function.__qualname__) if has_running_loop() else run(start)

    call.coroutine = function  # type: ignore[attr-defined]
    return call


def blocking(function: Callable[P, Any]) -> Callable[P, Any]:
    """The ``*_sync`` variant of a `both` function: always returns the result, even inside a running loop."""
    coroutine = function.coroutine  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        return run(lambda: coroutine(*args, **kwargs))

    return call


def asynchronous(function: Callable[P, Any]) -> Callable[P, Awaitable[Any]]:
    """The ``*_async`` variant of a `both` function: always a coroutine."""
    coroutine: Callable[P, Awaitable[Any]] = function.coroutine  # type: ignore[attr-defined]
    return coroutine


# --- calling what users write -------------------------------------------------------------------------------------


def is_default(function: Any) -> bool:
    """Whether this is a method that `both` made, not a user's override."""
    return inspect.isfunction(function) and hasattr(function, "coroutine")


async def maybe_await(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function directly, and await its result if that is awaitable."""
    result = function(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


# --- resources that belong to a loop ------------------------------------------------------------------------------


class PerLoop(Generic[T]):
    """One resource per event loop, created on first use and closed when that loop shuts down."""

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[None]] | None = None) -> None:
        self._make = make
        self._close = close
        self._held: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[None, None] | None]] = (
            WeakKeyDictionary()
        )

    async def get(self) -> T:
        loop = asyncio.get_running_loop()
        held = self._held.get(loop)
        if held is not None:
            return held[0]
        resource = self._make()
        guard = self._guard(loop, resource) if self._close is not None else None
        self._held[loop] = (resource, guard)
        if guard is not None:
            await guard.__anext__()
        return resource

    async def _guard(self, loop: asyncio.AbstractEventLoop, resource: T) -> AsyncGenerator[None, None]:
        """An async generator that the loop closes on shutdown: the only shutdown hook that every loop offers."""
        try:
            yield
        finally:
            self._held.pop(loop, None)
            if self._close is not None:
                await self._close(resource)

    async def close(self) -> None:
        """Close this loop's resource now."""
        held = self._held.pop(asyncio.get_running_loop(), None)
        if held is not None and held[1] is not None:
            await held[1].aclose()
