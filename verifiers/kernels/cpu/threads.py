"""The number of threads for a model on a CPU, and a team of threads that call one C function at the same time."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any
from weakref import finalize

import torch

from verifiers.kernels.cpu.binding import Team

# Every layer has nine barriers, at which threads wait for the slowest one. A thread needs at least this many parameters
# for its work to outweigh the waiting (benchmarks/cpu_threads.py).
PARAMETERS_PER_THREAD = 2_000_000


def parameters_of(model: Any) -> int:
    return int(sum(one.numel() for one in model.parameters()))


def threads_for(model: Any) -> int:
    """Threads for a model: one per two million parameters, at most as many as PyTorch uses."""
    return max(1, min(int(torch.get_num_threads()), parameters_of(model) // PARAMETERS_PER_THREAD))


def is_small(model: Any) -> bool:
    """Whether a model is too small for a second thread. Copying its weights then costs almost nothing."""
    return parameters_of(model) < 2 * PARAMETERS_PER_THREAD


class ThreadTeam:
    """Threads that call a C function at the same time, each for its part of the work.

    They spin at barriers within C, so all of them must exist before the first call, and giving them work must not fail.
    If not all threads can be started, the others are stopped and the caller works alone.
    """

    def __init__(self, parts: int) -> None:
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._work: list[SimpleQueue[Callable[[], object] | None]] = [SimpleQueue() for _ in range(parts - 1)]
        self._end = finalize(self, _end, self._work)
        self._process = os.getpid()
        try:
            for queue in self._work:
                threading.Thread(target=_serve, args=(queue, self._done), name="verifiers-team", daemon=True).start()
        except RuntimeError:  # can't start new thread
            self._end()
            self._work = []

    @property
    def parts(self) -> int:
        """Number of threads, including the caller's. After a fork, only the caller's is left."""
        return 1 + len(self._work) if os.getpid() == self._process else 1

    def call(self, function: Any, *args: Any) -> Any:
        """Call one function in all threads. Its last arguments are the thread's index and the team."""
        parts = self.parts
        shared = ctypes.byref(Team(parts))
        tasks = [partial(function, *args, part, shared) for part in range(parts)]
        return self._run(tasks)

    def share(self, tasks: Sequence[Callable[[], object]]) -> None:
        """Run tasks, distributed over the threads."""
        parts = self.parts
        self._run([partial(_do, tasks[part::parts]) for part in range(parts)])

    def _run(self, tasks: Sequence[Callable[[], object]]) -> object:
        """Run one task in each thread. The first runs in the caller's thread, and its result is returned."""
        others = tasks[1:]
        for queue, task in zip(self._work, others, strict=False):
            queue.put(task)
        try:
            return tasks[0]()
        finally:
            failed = [error for error in [self._done.get() for _ in others] if error is not None]
            if failed:
                raise failed[0]


def _serve(work: SimpleQueue[Callable[[], object] | None], done: SimpleQueue[BaseException | None]) -> None:
    while (task := work.get()) is not None:
        try:
            task()
        except BaseException as error:  # raised by the caller
            done.put(error)
        else:
            done.put(None)
        del task


def _end(queues: Sequence[SimpleQueue[Callable[[], object] | None]]) -> None:
    for queue in queues:
        queue.put(None)


def _do(tasks: Sequence[Callable[[], object]]) -> None:
    for task in tasks:
        task()
