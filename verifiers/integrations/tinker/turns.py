"""Work on one model → whose turn it is: trainings one after the other, samples of one adapter side by side.

The model has one adapter in force at a time. A job that trains, saves or loads has the model to itself. Jobs that
sample from the same snapshot run together: those that wait when its turn comes, and those that come while it lasts,
unless somebody else waits. So snapshots never mix, and nobody waits longer than for those who were there before.
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


@dataclass(eq=False, slots=True)
class Job:
    """One request's work. With a ``key`` it only starts something: jobs of the same key may run at once."""

    run: Callable[[], Any]
    key: Any = None  # (snapshot,); None: it needs the model alone
    future: Future[Any] = field(default_factory=Future)


class Turns:
    """A thread that runs jobs. A job with a key returns a `Future`, and its turn lasts until that is done."""

    def __init__(self, prepare: Callable[[Any], None]) -> None:
        self._prepare = prepare  # puts the snapshot of a key in force
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._running = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="verifiers-tinker", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], Any], key: Any = None) -> Future[Any]:
        job = Job(run, key)
        with self._changed:
            if self._is_closed:
                raise InfraError("the server is closing")
            self._waiting.append(job)
            self._changed.notify_all()
        return job.future

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            for job in self._waiting:
                job.future.set_exception(InfraError("the server is closing"))
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join()

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
        """Run all jobs of one key that there are, and those that join while nobody else waits."""
        try:
            self._prepare(first.key)
        except Exception as error:  # a snapshot that does not fit
            logger.exception("a sampler could not be prepared")
            first.future.set_exception(error)
            return
        with self._changed:
            same = [job for job in self._waiting if job.key == first.key]
            self._waiting = deque(job for job in self._waiting if job.key != first.key)
            for job in (first, *same):
                self._start(job)
            while True:
                joining = self._joining(first.key)
                for job in joining:
                    self._start(job)
                if not self._running or self._is_closed:
                    return
                if not joining:
                    self._changed.wait()

    def _joining(self, key: Any) -> list[Job]:
        """Those that may start now: all of this key that nobody else waits before."""
        found = []
        while self._waiting and self._waiting[0].key == key:
            found.append(self._waiting.popleft())
        return found

    def _start(self, job: Job) -> None:
        try:
            started: Future[Any] = job.run()
        except Exception as error:  # the request cannot be run
            job.future.set_exception(error)
            return
        with self._changed:
            self._running += 1
        started.add_done_callback(lambda done: self._end(job, done))

    def _end(self, job: Job, done: Future[Any]) -> None:
        settle(job.future, done.result)
        with self._changed:
            self._running -= 1
            self._changed.notify_all()


def settle(future: Future[Any], run: Callable[[], Any]) -> None:
    """Give a future what a function returns, or the error that it raises."""
    try:
        future.set_result(run())
    except BaseException as error:  # handed to whoever waits for it
        future.set_exception(error)
