"""A CPU-bound function call → its result, from a pool of processes that can be killed.

The pool belongs to the process, not to an event loop: the first call starts it, and calls from all loops and threads
share it. Workers are new programs (see `worker_main`), not forks of this process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import pickle  # noqa: TID251 - to our own workers, never from them and never stored
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verifiers.errors import Error, GraderError, WorkerError
from verifiers.rubrics.shipping import Arguments, InWorker, Shipment, pack_arguments, ship
from verifiers.rubrics.worker_main import HEADER_BYTES

MAX_WORKERS = 8
MAX_CALLS = 1000
"""A worker is replaced after so many calls, so that the caches and leaks of libraries do not grow for ever."""
MAX_STARTS = 3
START_LIMIT_S = 60.0
LOAD_LIMIT_S = 120.0
IDLE_S = 300.0

_PROGRAM = str(Path(__file__).with_name("worker_main.py"))
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIALS")
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


async def call_in_worker(
    function: Callable[..., Any] | InWorker, kwargs: Mapping[str, Any], *, timeout_s: float | None
) -> Any:
    """Call a function in a worker process. Raises `GraderError` if it raises, crashes or takes too long.

    The limit is wall-clock time from the start of the function, without the time to wait for a worker, to start one and
    to import the function's module. States are sent as copies without live objects, and the function must return
    numbers, texts, lists or dicts.
    """
    shipment, arguments = _shipped(function), pack_arguments(kwargs)
    _check_complete(function, arguments, kwargs)
    loop = asyncio.get_running_loop()
    job = _Job(_name(function), shipment, arguments, timeout_s, loop)
    _pool.submit(job)
    try:
        return await job.future
    except asyncio.CancelledError:
        _pool.abandon(job)
        raise


def check_shippable(function: Callable[..., Any]) -> None:
    """Raise a `TypeError` with the reason if a function cannot be sent to a worker."""
    ship(function)


_shipments: dict[int, tuple[Any, Shipment]] = {}


def _shipped(function: Callable[..., Any] | InWorker) -> Shipment:
    held = _shipments.get(id(function))
    if held is not None and held[0] is function and held[1].is_current:
        return held[1]
    if len(_shipments) >= 256:
        _shipments.clear()
    shipment = ship(function)
    _shipments[id(function)] = (function, shipment)
    return shipment


def _check_complete(function: Any, arguments: Arguments, kwargs: Mapping[str, Any]) -> None:
    for name in arguments.left_out:
        if name in kwargs and name in _required(function):
            raise GraderError(
                f"{_name(function)!r} is cpu_bound and takes {name!r}, a {type(kwargs[name]).__name__} that cannot "
                f"be sent to a worker process; remove cpu_bound or the argument"
            )


def _required(function: Any) -> set[str]:
    from verifiers.signatures import signature_of

    parameters = signature_of(function).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}


def _name(function: Any) -> str:
    from verifiers.rubrics.signature import name_of

    return function.name if isinstance(function, InWorker) else name_of(function)


class WorkerTraceback(Exception):
    """The traceback of an exception that a function raised in a worker, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Job:
    """One call, and the future of its caller, in the caller's loop."""

    __slots__ = ("arguments", "future", "is_abandoned", "loop", "name", "shipment", "timeout_s", "worker")

    def __init__(
        self,
        name: str,
        shipment: Shipment,
        arguments: Arguments,
        timeout_s: float | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.name = name
        self.shipment = shipment
        self.arguments = arguments
        self.timeout_s = timeout_s
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()
        self.is_abandoned = False
        self.worker: _Worker | None = None

    def settle(self, result: Any, error: Error | None = None) -> None:
        try:
            self.loop.call_soon_threadsafe(self._settle, result, error)
        except RuntimeError:  # the loop was closed in the meantime
            return

    def _settle(self, result: Any, error: Error | None) -> None:
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def read(self, reply: Mapping[str, Any]) -> None:
        """Settle with the worker's reply."""
        raised = reply.get("error")
        if raised is None:
            return self.settle(reply["result"])
        note = f" (not sent to the worker: {', '.join(left_out)})" if (left_out := self.arguments.left_out) else ""
        error = GraderError(f"{self.name!r} raised {raised['type']}: {raised['message']}{note}")
        error.__cause__ = WorkerTraceback(raised["traceback"])
        return self.settle(None, error)


class _WorkerGoneError(Exception):
    """The worker process ended, or closed its pipe."""


class _NotAskedError(_WorkerGoneError):
    """The worker process had ended before the request was sent."""


class _Worker:
    """One worker process and its two pipes."""

    def __init__(self) -> None:
        self.calls = 0
        self._is_killed = False
        self._has_hung_up = False
        self._known: set[int] = set()
        environment = {name: value for name, value in os.environ.items() if not name.upper().endswith(_SECRET)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=_ONE_THREAD | environment,
            start_new_session=True,  # so that Ctrl-C does not reach it, and killing it also kills its children
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._poll = select.poll()
        self._poll.register(self._replies, select.POLLIN)

    def start(self) -> None:
        self._ask(_path(), START_LIMIT_S)

    @property
    def is_usable(self) -> bool:
        return self.calls < MAX_CALLS and not self._is_killed and self._process.poll() is None

    def run(self, job: _Job) -> dict[str, Any]:
        """Run a job. Raises `TimeoutError` if it takes too long, and `_WorkerGoneError` if the process ends."""
        shipment, arguments = job.shipment, job.arguments
        if shipment.key not in self._known:
            try:
                reply = self._ask(("load", shipment.key, shipment.blob, shipment.origins, _path()), LOAD_LIMIT_S)
            except TimeoutError:
                raise TimeoutError(f"was not imported within {LOAD_LIMIT_S:g} s") from None
            if "error" in reply:
                return reply
            self._known.add(shipment.key)
        self.calls += 1
        try:
            return self._ask(("call", shipment.key, arguments.blob, arguments.origins, job.timeout_s), job.timeout_s)
        except TimeoutError:
            raise TimeoutError(f"did not finish within {job.timeout_s:g} s and was stopped") from None

    def _ask(self, request: Any, limit_s: float | None) -> dict[str, Any]:
        body = pickle.dumps(request, protocol=5)
        frame = memoryview(len(body).to_bytes(HEADER_BYTES, "big") + body)
        deadline = None if limit_s is None else time.monotonic() + limit_s
        try:
            while frame:
                frame = frame[os.write(self._requests, frame) :]
        except BrokenPipeError as error:
            raise _NotAskedError from error
        size = int.from_bytes(self._read(HEADER_BYTES, deadline), "big")
        reply: dict[str, Any] = json.loads(self._read(size, deadline))
        return reply

    def _read(self, size: int, deadline: float | None) -> bytes:
        chunks = bytearray()
        while len(chunks) < size:
            left_ms = None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
            if not self._poll.poll(left_ms):
                raise TimeoutError
            chunk = os.read(self._replies, size - len(chunks))
            if not chunk:
                self._has_hung_up = True
                raise _WorkerGoneError
            chunks += chunk
        return bytes(chunks)

    def kill(self) -> None:
        self._is_killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> str:
        """Kill the process if it still runs, reap it, close the pipes. Returns its exit status or signal."""
        if self._has_hung_up:  # it is ending by itself: wait for its exit status
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        self.kill()
        self._process.__exit__(None, None, None)  # closes the pipes and waits
        status = self._process.returncode
        return f"exit status {status}" if status >= 0 else signal.Signals(-status).name

    def forget(self) -> None:
        """In a fork of the application: close the inherited pipes."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.returncode = 0  # not this process's child


class _Pool:
    """A queue of jobs, and one thread per worker process."""

    def __init__(self) -> None:
        self._is_registered = False
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._workers: set[_Worker] = set()
        self._n_threads = 0
        self._n_idle = 0
        self._is_closed = False

    def submit(self, job: _Job) -> None:
        with self._changed:
            if self._is_closed:
                raise WorkerError("the interpreter is exiting; no worker process can be started")
            if not self._is_registered:
                self._is_registered = True
                atexit.register(self.close)
                os.register_at_fork(after_in_child=self._forget)
            self._jobs.append(job)
            if len(self._jobs) > self._n_idle and self._n_threads < _cores():
                self._n_threads += 1
                threading.Thread(target=self._serve, daemon=True, name="verifiers-worker").start()
            else:
                self._changed.notify()

    def abandon(self, job: _Job) -> None:
        """Cancel a job: it is not started, or its worker is killed."""
        with self._changed:
            job.is_abandoned = True
            if job.worker is not None:
                job.worker.kill()

    def close(self) -> None:
        """End all workers, and fail the queued jobs."""
        with self._changed:
            self._is_closed = True
            for job in self._jobs:
                job.settle(None, WorkerError("the interpreter exited before the call was made"))
            for worker in self._workers:
                worker.kill()
            self._changed.notify_all()
        deadline = time.monotonic() + 2.0
        with self._changed:
            while self._n_threads and time.monotonic() < deadline:
                self._changed.wait(0.1)

    def _forget(self) -> None:
        """In a fork of the application: start with an empty pool, since workers and threads are the parent's."""
        workers = self._workers
        self._reset()
        for worker in workers:
            worker.forget()

    def _serve(self) -> None:
        worker: _Worker | None = None
        while (job := self._next()) is not None:
            worker = self._run(job, worker)
            del job
        if worker is not None:
            self._end(worker)
        with self._changed:
            if self._is_closed:
                self._n_threads -= 1
                self._changed.notify_all()

    def _next(self) -> _Job | None:
        """The next job; None if this thread should end."""
        with self._changed:
            self._n_idle += 1
            self._changed.wait_for(lambda: self._jobs or self._is_closed, IDLE_S)
            self._n_idle -= 1
            if self._jobs and not self._is_closed:
                return self._jobs.popleft()
            if not self._is_closed:
                self._n_threads -= 1
            return None

    def _run(self, job: _Job, worker: _Worker | None) -> _Worker | None:
        """Run a job in the worker, or in a new one. Returns the worker for the next job, or None if it must be new."""
        try:
            if worker is not None and not worker.is_usable:
                self._end(worker)
                worker = None
            if worker is None:
                worker = self._start()
        except WorkerError as error:
            job.settle(None, error)
            return None
        with self._changed:
            if job.is_abandoned:
                return worker
            job.worker = worker
        try:
            reply = worker.run(job)
        except TimeoutError as error:
            self._end(worker)
            job.settle(None, GraderError(f"{job.name!r} {error}"))
            return None
        except _NotAskedError:  # the worker had died before this job
            self._end(worker)
            return self._run(job, None)
        except _WorkerGoneError:
            job.settle(None, GraderError(f"{job.name!r} ended its worker process ({self._end(worker)})"))
            return None
        finally:
            with self._changed:
                job.worker = None
        job.read(reply)
        return worker

    def _start(self) -> _Worker:
        """Start a worker, and wait until it is ready."""
        causes: list[str] = []
        while len(causes) < MAX_STARTS:
            try:
                worker = _Worker()
            except OSError as error:
                causes.append(str(error))
                continue
            with self._changed:
                self._workers.add(worker)
                if self._is_closed:
                    worker.kill()
            try:
                worker.start()
                return worker
            except TimeoutError:
                self._end(worker)
                causes.append(f"not ready after {START_LIMIT_S:g} s")
            except _WorkerGoneError:
                causes.append(self._end(worker))
        raise WorkerError(f"no worker process could be started with {sys.executable!r}: {'; '.join(causes)}")

    def _end(self, worker: _Worker) -> str:
        status = worker.end()
        with self._changed:
            self._workers.discard(worker)
        return status


def _path() -> list[str]:
    return [str(entry) for entry in sys.path]


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, MAX_WORKERS)


_pool = _Pool()
