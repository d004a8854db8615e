"""Parts of batches made while earlier ones are learned from: taken as they finish, and never when they are too old."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from verifiers.threads import leave_threads_behind

T = TypeVar("T")

ENDING_S = 10.0  # for rollouts that were told to stop, before they are left behind


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """A part that was begun; ``due`` is the last batch that it may be in."""

    due: int
    future: Future[T]


class Pipeline(Generic[T]):
    """``begin(number)`` starts a part; a batch is made of ``size`` of them, whichever finish first.

    Parts are begun when a batch is taken: so many that ``ahead`` more batches are under way. What was begun for batch n
    is in batch n + ``patience`` at the latest: one that would come too late is waited for.
    """

    def __init__(self, begin: Callable[[int], Future[T]], *, size: int, ahead: int, patience: int) -> None:
        if patience < ahead:
            raise ValueError(f"parts of {ahead} batches ahead cannot all be in one of the next {patience}")
        self._begin, self._size, self._ahead, self._patience = begin, size, ahead, patience
        self._parts: list[Part[T]] = []
        self._begun = 0

    def take(self, batch: int, end: int) -> list[T]:
        """The parts of this batch, in the order they were begun in; there is no batch from ``end`` on."""
        wanted = min(self._ahead + 1, end - batch) * self._size
        while len(self._parts) < wanted:
            self._parts.append(Part(batch + self._patience, self._begin(self._begun)))
            self._begun += 1
        while (chosen := self._choose(batch)) is None:
            wait([part.future for part in self._parts if not part.future.done()], return_when=FIRST_COMPLETED)
        made = [self._parts[i].future.result() for i in chosen]
        self._parts = [part for i, part in enumerate(self._parts) if i not in chosen]
        return made

    def _choose(self, batch: int) -> list[int] | None:
        is_done_N = [part.future.done() for part in self._parts]
        for part, is_done in zip(self._parts, is_done_N, strict=True):
            if is_done and (error := part.future.exception()) is not None:
                raise error
        return choose([part.due for part in self._parts], is_done_N, batch, self._size)


def choose(due_N: Sequence[int], is_done_N: Sequence[bool], batch: int, size: int) -> list[int] | None:
    """Which of the finished parts make this batch, so that those left can all be in time; None if more have to finish.

    Of the parts that are due until batch d, no more than ``size`` for each batch after this one can be left.

    >>> choose([1, 1, 2], [False, True, True], batch=0, size=1)
    [1]
    >>> choose([1, 2], [False, True], batch=1, size=1) is None  # the first is due now
    True
    """
    finished = [i for i, is_done in enumerate(is_done_N) if is_done]
    chosen: list[int] = []
    for due in sorted(set(due_N)):
        must = sum(one <= due for one in due_N) - size * max(due - batch, 0)
        have = sum(due_N[i] <= due for i in chosen)
        more = [i for i in finished if due_N[i] <= due and i not in chosen][: max(must - have, 0)]
        if have + len(more) < must:
            return None
        chosen += more
    chosen += [i for i in finished if i not in chosen][: size - len(chosen)]
    return sorted(chosen) if len(chosen) == size else None


@contextmanager
def loop_thread(name: str) -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own, while the block lasts; what still runs then is cancelled."""
    loop = asyncio.new_event_loop()
    leave_threads_behind(loop)
    thread = threading.Thread(target=loop.run_forever, name=name, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        wait([asyncio.run_coroutine_threadsafe(_end_tasks(loop), loop)], timeout=ENDING_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(ENDING_S)
        if not thread.is_alive():
            loop.close()


async def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    left = [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await loop.shutdown_asyncgens()
