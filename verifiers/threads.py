"""A function that may block → a worker thread that runs it. Idle threads are reused, hanging ones abandoned."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

EXIT_S = 2.0  # how long the exit of Python waits for threads that are still running a function


class _Worker(threading.Thread):
    """One reusable thread. It is a daemon, so that a hook that hangs does not keep the interpreter from exiting."""

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
    """As many threads as there are blocking calls: a limit would deadlock hooks that call hooks."""

    def __init__(self, idle_s: float = 10.0) -> None:
        self.idle: deque[_Worker] = deque()
        self.idle_s = idle_s
        self.has_begun = False

    def retire(self, worker: _Worker) -> bool:
        """True if the worker was idle and may end; False if a job was just handed to it."""
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
            if not self.has_begun:
                self.has_begun = True
                atexit.register(_end_running)
            worker = _Worker(self)
            worker.job = job
            try:
                worker.start()
            except RuntimeError as error:
                if "shutdown" not in str(error):  # no thread can be started: the caller gets the error
                    raise
                job()
                return
        worker.ready.release()


threads = _Threads()


def _end_running() -> None:
    """End the functions that still run when Python exits: a thread that is inside torch by then would abort the process
    (SIGABRT). One that does not return to Python within `EXIT_S` is left behind."""
    running = [one for one in threading.enumerate() if isinstance(one, _Worker) and one.job is not None]
    if not running:
        return
    import ctypes  # here, because importing the package must stay quick

    for worker in running:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident or 0), ctypes.py_object(SystemExit))
    until = time.monotonic() + EXIT_S
    while any(one.job is not None and one.is_alive() for one in running) and time.monotonic() < until:
        time.sleep(0.01)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=threads.idle.clear)  # threads do not survive a fork


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a function in a worker thread. If the future is cancelled, the thread is abandoned."""
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
        except BaseException as error:  # foreign code; raised again where the future is awaited
            if isinstance(error, StopIteration):  # a future cannot hold it
                error = RuntimeError("StopIteration")
            outcome = (None, error)
        try:
            loop.call_soon_threadsafe(settle, *outcome)
        except RuntimeError:  # the loop was closed while the function ran
            return

    threads.submit(job)
    return future


class DaemonExecutor(ThreadPoolExecutor):
    """The executor of ``asyncio.to_thread`` on our loops: daemon threads, which do not delay the exit."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # foreign code; raised again where the future is awaited
                future.set_exception(error)
            else:
                future.set_result(result)

        threads.submit(job)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Does not wait: the threads are daemons."""


def leave_threads_behind(loop: asyncio.AbstractEventLoop | None = None) -> None:
    """Make ``asyncio.to_thread`` on a loop (default: the running one) use daemon threads, unless an executor is set."""
    loop = loop or asyncio.get_running_loop()
    if getattr(loop, "_default_executor", loop) is None:
        loop.set_default_executor(DaemonExecutor())
