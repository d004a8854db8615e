"""Schedules jobs on one model: training jobs run one at a time, sampling jobs of one snapshot run concurrently.

The model has one active adapter at a time. A job that trains, saves or loads runs alone. Jobs that sample from the
same snapshot run together: all that are queued when the first one starts, and those that arrive while they run, unless
another job is queued before them. So snapshots never mix, and a job only waits for earlier jobs.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from verifiers.errors import InfraError

logger = logging.getLogger("verifiers.integrations.tinker")


# Makes the results of jobs that ended together, from (request, outcome) of each, while their snapshot is active.
Finish = Callable[[list[tuple[Any, Any]]], list[Any]]


@dataclass(eq=False, slots=True)
class Job:
    """One request's work. With a ``key``, ``run`` only starts it, and jobs with the same key may run concurrently."""

    run: Callable[[], Any]
    key: Any = None  # (snapshot,); None: runs alone
    finish: Finish | None = None  # the same for all jobs with the same key
    asked: Any = None  # the request, for ``finish``
    future: Future[Any] = field(default_factory=Future)


class Turns:
    """A thread that runs jobs. A job with a key returns a `Future` and runs until that is done."""

    def __init__(self, prepare: Callable[[Any], None]) -> None:
        self._prepare = prepare  # activates the snapshot of a key
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._running: set[Job] = set()
        self._ended: deque[tuple[Job, Future[Any]]] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="verifiers-tinker", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], Any], key: Any = None, **more: Any) -> Future[Any]:
        job = Job(run, key, **more)
        with self._changed:
            if self._is_closed:
                raise InfraError("the server is closing")
            self._waiting.append(job)
            self._changed.notify_all()
        return job.future

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        for job in (*self._waiting, *self._running):
            job.future.set_exception(InfraError("the server is closing"))
        self._waiting.clear()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                job = self._waiting.popleft()
            if job.key is None:
                settle(job.future, job.run)
            else:
                self._sample(job)

    def _sample(self, first: Job) -> None:
        """Run all queued jobs of one key, and those that arrive while no other job is queued before them."""
        try:
            self._prepare(first.key)
        except Exception as error:  # the snapshot does not match the model
            logger.exception("a sampler could not be prepared")
            first.future.set_exception(error)
            return
        with self._changed:
            starting = [first, *(job for job in self._waiting if job.key == first.key)]
            self._waiting = deque(job for job in self._waiting if job.key != first.key)
        while starting or self._running:
            for job in starting:
                self._start(job)
            with self._changed:
                while not (self._ended or self._is_closed) and self._running and not self._may_join(first.key):
                    self._changed.wait()
                if self._is_closed:
                    return
                starting = self._joining(first.key)
                ended, self._ended = self._ended, deque()
            _finish(list(ended))
            self._running.difference_update(job for job, _ in ended)

    def _may_join(self, key: Any) -> bool:
        return bool(self._waiting) and self._waiting[0].key == key

    def _joining(self, key: Any) -> list[Job]:
        """Take the jobs of this key from the front of the queue."""
        found = []
        while self._may_join(key):
            found.append(self._waiting.popleft())
        return found

    def _start(self, job: Job) -> None:
        try:
            started: Future[Any] = job.run()
        except Exception as error:  # the request cannot be run
            job.future.set_exception(error)
            return
        self._running.add(job)
        started.add_done_callback(lambda done: self._end(job, done))

    def _end(self, job: Job, done: Future[Any]) -> None:
        with self._changed:
            self._ended.append((job, done))
            self._changed.notify_all()


def _finish(ended: list[tuple[Job, Future[Any]]]) -> None:
    """Settle jobs that ended together; if that fails, settle each alone, so that one cannot fail the others."""
    for job, done in ended:
        if (error := done.exception()) is not None:
            job.future.set_exception(error)
    done_well = [(job, done.result()) for job, done in ended if done.exception() is None]
    if not done_well:
        return
    try:
        results = _results(done_well)
    except Exception:
        for one in done_well:
            settle(one[0].future, lambda one=one: _results([one])[0])  # type: ignore[misc]
        return
    for (job, _), result in zip(done_well, results, strict=True):
        job.future.set_result(result)


def _results(found: list[tuple[Job, Any]]) -> list[Any]:
    finish = found[0][0].finish
    return [one for _, one in found] if finish is None else finish([(job.asked, one) for job, one in found])


def settle(future: Future[Any], run: Callable[[], Any]) -> None:
    """Set a future's result or exception by calling a function."""
    try:
        future.set_result(run())
    except BaseException as error:  # passed on to the waiting caller
        future.set_exception(error)
