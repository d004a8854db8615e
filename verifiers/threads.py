"""A function that may block → a thread that runs it, used again when it is idle, and left behind when it never is."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


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
            except RuntimeError as error:
                if "shutdown" not in str(error):  # no thread is left: whoever asked for one is told
                    raise
                job()
                return
        worker.ready.release()


threads = _Threads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=threads.idle.clear)  # threads do not survive a fork


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

    threads.submit(job)
    return future


class DaemonExecutor(ThreadPoolExecutor):
    """What ``asyncio.to_thread`` runs in on our loops: threads that nobody waits for when the loop or Python ends."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # foreign code; whoever awaits it decides
                future.set_exception(error)
            else:
                future.set_result(result)

        threads.submit(job)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing to wait for: the threads are daemons."""


def leave_threads_behind(loop: asyncio.AbstractEventLoop | None = None) -> None:
    """A loop (the running one) will not wait for what ``asyncio.to_thread`` left behind, unless someone chose so."""
    loop = loop or asyncio.get_running_loop()
    if getattr(loop, "_default_executor", loop) is None:
        loop.set_default_executor(DaemonExecutor())
