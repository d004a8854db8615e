"""Asynchronous batches: parts are made while earlier batches are trained on, and used before they are too old."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import Generic, TypeVar

from verifiers.threads import leave_threads_behind

T = TypeVar("T")

ENDING_S = 10.0  # how long cancelled rollouts may take to end, before their thread is abandoned


class Pipeline(Generic[T]):
    """``begin(number)`` starts a part. A batch consists of the ``size`` parts that finish first.

    Taking a batch starts the parts that ``ahead`` further batches need. A part that is started when batch n is taken
    is in batch n + ``max_delay`` at the latest: that batch waits for it.
    """

    def __init__(self, begin: Callable[[int], Future[T]], *, size: int, ahead: int, max_delay: int) -> None:
        if max_delay < ahead:
            raise ValueError(f"parts of {ahead} batches ahead cannot all be used within the next {max_delay} batches")
        self._begin, self._size, self._ahead, self._max_delay = begin, size, ahead, max_delay
        self._parts: list[tuple[int, Future[T]]] = []  # (deadline: the last batch that the part may be in, part)
        self._num_begun = 0

    def take(self, batch: int, end: int) -> list[T]:
        """The parts of this batch, in the order in which they were started; ``end`` is the total number of batches."""
        wanted = min(self._ahead + 1, end - batch) * self._size
        while len(self._parts) < wanted:
            self._parts.append((batch + self._max_delay, self._begin(self._num_begun)))
            self._num_begun += 1
        while (chosen := self._choose(batch)) is None:
            wait([future for _, future in self._parts if not future.done()], return_when=FIRST_COMPLETED)
        made = [self._parts[i][1].result() for i in chosen]
        self._parts = [part for i, part in enumerate(self._parts) if i not in chosen]
        return made

    def _choose(self, batch: int) -> list[int] | None:
        is_done_N = [future.done() for _, future in self._parts]
        for (_, future), is_done in zip(self._parts, is_done_N, strict=True):
            if is_done and (error := future.exception()) is not None:
                raise error
        return choose([deadline for deadline, _ in self._parts], is_done_N, batch, self._size)


def choose(deadline_N: Sequence[int], is_done_N: Sequence[bool], batch: int, size: int) -> list[int] | None:
    """The finished parts to put in this batch so that all others can meet their deadlines; None: more must finish.

    For each deadline d, the parts due by batch d that do not fit into the later batches up to d must be in this batch.

    >>> choose([1, 1, 2], [False, True, True], batch=0, size=1)
    [1]
    >>> choose([1, 2], [False, True], batch=1, size=1) is None  # the deadline of the first is now
    True
    """
    finished = [i for i, is_done in enumerate(is_done_N) if is_done]
    chosen: list[int] = []
    for deadline in sorted(set(deadline_N)):
        must = sum(one <= deadline for one in deadline_N) - size * max(deadline - batch, 0)
        have = sum(deadline_N[i] <= deadline for i in chosen)
        more = [i for i in finished if deadline_N[i] <= deadline and i not in chosen][: max(must - have, 0)]
        if have + len(more) < must:
            return None
        chosen += more
    chosen += [i for i in finished if i not in chosen][: size - len(chosen)]
    return sorted(chosen) if len(chosen) == size else None


@contextmanager
def loop_thread(name: str) -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in its own thread during the block; at its end, tasks that still run are cancelled."""
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
