"""One API for sync and async callers, and one way to call the functions that users write.

Nothing else in the package knows whether its caller has an event loop, or whether a hook is sync, async, quick or
blocking.
"""

from __future__ import annotations

import asyncio
import collections.abc
import contextvars
import functools
import inspect
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from types import CoroutineType
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

P = ParamSpec("P")
T = TypeVar("T")

PROMOTE_AFTER = 2
QUICK_S = 0.005
SLOW_S = 0.05
MAX_BLOCKED = 512

_home: contextvars.ContextVar[asyncio.AbstractEventLoop | None] = contextvars.ContextVar("home_loop", default=None)


def has_running_loop() -> bool:
    """Is the caller inside an event loop?"""
    return asyncio._get_running_loop() is not None


def run(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end and return what it returns, whatever thread or loop the caller is in.

    >>> async def four(): return 4
    >>> run(four)
    4
    """
    if has_running_loop():
        return _run_in_new_thread(start)
    home = _home.get()
    if home is not None and home.is_running() and not getattr(_inline, "depth", 0):
        return asyncio.run_coroutine_threadsafe(start(), home).result()
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
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
        except BaseException as error:  # handed to the caller's thread, whatever it is
            raised.append(error)

    context = contextvars.copy_context()
    context.run(_home.set, None)  # the caller's loop is blocked until this is done: it cannot be the one to do it
    thread = threading.Thread(target=context.run, args=(target,), daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:  # Ctrl-C in a notebook: the work must not go on unseen
        for stop in stops:
            stop()
        thread.join()
        raise
    if raised:
        raise raised[0]
    return outcome[0]


def is_cancelled() -> bool:
    """Was the current task told to stop, or did a CancelledError come from within what it awaits?"""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Deferred(collections.abc.Coroutine[Any, Any, T], Generic[T]):
    """What a call made inside a running loop returns: await it, or just use it as the result.

    Touched without being awaited (unpacked, indexed, printed: a notebook cell), it runs on a loop of its own.
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
                raise RuntimeError(f"{self._name} is under way already, or has failed; await it and keep the result")
            _run_in_new_thread(lambda: running)
        return self._result[0]

    def __iter__(self) -> Any:
        return iter(self._settle())  # type: ignore[call-overload]

    def __getitem__(self, key: Any) -> Any:
        return self._settle()[key]  # type: ignore[index]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._settle()[key] = value  # type: ignore[index]

    def __bool__(self) -> bool:
        return True  # asyncio asks this of a task's coroutine when it shows it: no reason to run it

    def __len__(self) -> int:
        return len(self._settle())  # type: ignore[arg-type]

    def __contains__(self, key: object) -> bool:
        return key in self._settle()  # type: ignore[operator]

    def __str__(self) -> str:
        return str(self._settle())

    def __repr__(self) -> str:
        return repr(self._result[0]) if self._result else f"<{self._name}: not awaited or used yet>"

    def __float__(self) -> float:
        return float(self._settle())  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("cr_", "gi_", "ag_")):
            return getattr(self._running(), name)
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._settle(), name)


def both(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Any]:
    """Make an async function callable from plain code too.

    Called with no loop running it runs to its end and returns the result; inside a loop it returns a `Deferred`.
    The async function itself stays reachable as ``.coroutine``.

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
    """The ``*_sync`` name of a `both` function: returns the result itself, even inside a running loop."""
    coroutine = function.coroutine  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        return run(lambda: coroutine(*args, **kwargs))

    return call


def asynchronous(function: Callable[P, Any]) -> Callable[P, Awaitable[Any]]:
    """The ``*_async`` name of a `both` function: always a coroutine."""
    coroutine: Callable[P, Awaitable[Any]] = function.coroutine  # type: ignore[attr-defined]
    return coroutine


# --- calling what users write -------------------------------------------------------------------------------------


class _Inline(threading.local):
    depth = 0


_inline = _Inline()


class Hook:
    """A function that a user wrote, sync or async: ``await hook(...)`` calls it and never blocks the loop for long.

    A sync function starts out in worker threads, where it may block. Once it has shown to be quick it is called
    directly; if it then blocks the loop once, it goes back to threads for good. Either way it sees no running loop,
    so sync code may call ``env.rollout(...)`` or ``asyncio.run``.
    """

    __slots__ = ("_quick_calls", "_slots", "function", "is_async", "is_inline", "is_pinned", "timeout_s")

    def __init__(
        self, function: Callable[..., Any], *, timeout_s: float | None = None, may_inline: bool = True
    ) -> None:
        self.function = function
        self.timeout_s = timeout_s
        self.is_async = is_async_callable(function)
        self.is_inline = False
        self.is_pinned = not may_inline
        self._quick_calls = 0
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """What was learned about the function does not travel: it may be slow over there."""
        return functools.partial(Hook, timeout_s=self.timeout_s), (self.function,)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if self.is_async:
                result = self.function(*args, **kwargs)
            elif self.is_inline:
                result = self.call_inline(*args, **kwargs)
            else:
                result = await self._call_in_thread(args, kwargs)
            if type(result) is not CoroutineType and not inspect.isawaitable(result):
                return result
            self.is_async = True
            if self.timeout_s is None:
                return await result
            async with asyncio.timeout(self.timeout_s):
                return await result
        except SystemExit as error:
            raise _exit_error(error) from error
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise RuntimeError("something it awaited was cancelled") from error

    def call_inline(self, *args: Any, **kwargs: Any) -> Any:
        """Call a sync function on this very thread, with the running loop out of sight; note when it blocks."""
        loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        _inline.depth += 1
        began = time.perf_counter()
        try:
            return self.function(*args, **kwargs)
        except SystemExit as error:
            raise _exit_error(error) from error
        finally:
            _inline.depth -= 1
            asyncio._set_running_loop(loop)
            if time.perf_counter() - began > SLOW_S:
                self.note_slow()

    def note_slow(self) -> None:
        """The function blocked the loop: from now on it runs in threads, unless it can only run in the main one."""
        if not self.is_pinned:
            self.is_inline, self.is_pinned = False, True

    async def _call_in_thread(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        if _home.get() is not None:  # nested in another hook, which holds a slot already: waiting here could deadlock
            return await self._timed(loop, args, kwargs)
        slots = self._slots.get(loop)
        if slots is None:
            slots = self._slots[loop] = asyncio.Semaphore(MAX_BLOCKED)
        async with slots:
            return await self._timed(loop, args, kwargs)

    async def _timed(self, loop: asyncio.AbstractEventLoop, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        context = contextvars.copy_context()
        context.run(_home.set, loop)

        def call() -> tuple[Any, float]:
            began = time.perf_counter()
            return context.run(functools.partial(self.function, *args, **kwargs)), time.perf_counter() - began

        try:
            result, took_s = await asyncio.wait_for(in_thread(call), self.timeout_s)
        except ValueError as error:
            if "signal only works in main thread" not in str(error):
                raise
            self.is_inline = self.is_pinned = True
            return self.call_inline(*args, **kwargs)
        self._quick_calls = self._quick_calls + 1 if took_s < QUICK_S else 0
        if self._quick_calls >= PROMOTE_AFTER and not self.is_pinned:
            self.is_inline = True
        return result


def _exit_error(error: SystemExit) -> RuntimeError:
    """A function that calls ``exit()`` (or runs code that does) ends its own rollout, not the run."""
    return RuntimeError(f"it called exit({error.code!r})")


def is_default(function: Any) -> bool:
    """Is this a method of the library made by `both`, and not something written in its place?"""
    return inspect.isfunction(function) and hasattr(function, "coroutine")


def is_async_callable(function: Any) -> bool:
    """Does calling this give a coroutine? Sees through partials, bound methods and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.iscoroutinefunction(function) or hasattr(function, "coroutine"):
        return True
    return not inspect.isroutine(function) and inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def maybe_await(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function directly and await what it returned if that can be awaited."""
    result = function(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


class _Worker(threading.Thread):
    """One idle-able thread. Daemonic: a hook that hangs for ever must not keep the interpreter from ending."""

    def __init__(self, pool: _Threads) -> None:
        super().__init__(daemon=True, name="verifiers-hook")
        self.pool = pool
        self.job: Callable[[], None] | None = None
        self.ready = threading.Semaphore(0)

    def run(self) -> None:
        while self.ready.acquire(timeout=self.pool.idle_s) or not self.pool.retire(self):
            if self.job is not None:
                self.job()
                self.job = None
                self.pool.idle.append(self)


class _Threads:
    """As many threads as there are blocked calls: a bound would deadlock hooks that call hooks."""

    def __init__(self, idle_s: float = 10.0) -> None:
        self.idle: deque[_Worker] = deque()
        self.idle_s = idle_s

    def retire(self, worker: _Worker) -> bool:
        """True when the worker was idle and may end; False when a job was just handed to it."""
        try:
            self.idle.remove(worker)
        except ValueError:
            return False
        return True

    def submit(self, job: Callable[[], None]) -> None:
        try:
            worker = self.idle.pop()
            worker.job = job
        except IndexError:
            worker = _Worker(self)
            worker.job = job
            try:
                worker.start()
            except RuntimeError:  # Python is shutting down, and some versions start no threads then
                job()
                return
        worker.ready.release()


_threads = _Threads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.idle.clear)  # threads do not survive a fork


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a function in a worker thread; if the future is cancelled, the thread is left to end by itself."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def job() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (function(), None)
        except BaseException as error:  # foreign code; the awaiting side decides
            if isinstance(error, StopIteration):  # a future cannot carry it
                error = RuntimeError("StopIteration")
            outcome = (None, error)
        try:
            loop.call_soon_threadsafe(settle, *outcome)
        except RuntimeError:  # the loop was closed while the function still ran
            return

    _threads.submit(job)
    return future


# --- resources that belong to a loop ------------------------------------------------------------------------------


class PerLoop(Generic[T]):
    """One resource for each event loop, made on first use and closed when that loop shuts down."""

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
        """An async generator that a loop closes when it shuts down: the only hook that every loop offers for that."""
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
