"""A model → how many threads run it on a CPU; and a team of threads that call one C function at the same time."""

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

# Every layer has nine barriers, and at each one the threads wait for the slowest: a thread needs that many parameters
# of its own for a barrier to cost little beside what it computes (benchmarks/cpu_threads.py).
PARAMETERS_PER_THREAD = 2_000_000


def parameters_of(model: Any) -> int:
    return int(sum(one.numel() for one in model.parameters()))


def threads_for(model: Any) -> int:
    """How many of PyTorch's threads are worth having for a model: one for every two million parameters."""
    return max(1, min(int(torch.get_num_threads()), parameters_of(model) // PARAMETERS_PER_THREAD))


def is_small(model: Any) -> bool:
    """Is a model run by one thread on any machine? A copy of it costs neither time nor memory worth sparing."""
    return parameters_of(model) < 2 * PARAMETERS_PER_THREAD


class ThreadTeam:
    """Threads that call a function of C at the same time, each for its part of the work.

    They meet at barriers within C, where they spin: so all of them exist before the first call, and handing them work
    cannot fail. Where not all can be started, those that were end again and the caller works alone.
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
        """How many threads there are, the caller's among them; the others do not outlive a fork."""
        return 1 + len(self._work) if os.getpid() == self._process else 1

    def call(self, function: Any, *args: Any) -> Any:
        """One function, by all at once; its last arguments are its part and the team."""
        parts = self.parts
        shared = ctypes.byref(Team(parts))
        tasks = [partial(function, *args, part, shared) for part in range(parts)]
        return self._run(tasks)

    def share(self, tasks: Sequence[Callable[[], object]]) -> None:
        """Do these, each thread some of them."""
        parts = self.parts
        self._run([partial(_do, tasks[part::parts]) for part in range(parts)])

    def _run(self, tasks: Sequence[Callable[[], object]]) -> object:
        """One task for each thread, the first being the caller's own, whose result is returned."""
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
        except BaseException as error:  # it is the caller's to raise
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
