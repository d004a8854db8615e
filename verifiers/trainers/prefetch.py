"""Batches made while the ones before them are learned from, by a thread that is so many steps ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """``make(step)`` is called in order, up to ``distance`` batches before its own is taken; 0: when it is taken.

    There is a batch every ``stride`` steps. ``in_thread``: none is made by the thread that takes it, so that Ctrl-C
    does not interrupt one; of several processes all finish theirs, and stop after the same step.
    """

    def __init__(self, make: Callable[[int], T], distance: int, stride: int = 1, *, in_thread: bool = False) -> None:
        self._make, self._distance, self._stride = make, distance, stride
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="verifiers-batches") if distance or in_thread else None
        self._coming: deque[Future[T]] = deque()

    def take(self, step: int, end: int) -> T:
        """The batch of this step; there is none from step ``end`` on."""
        if self._pool is None:
            return self._make(step)
        while len(self._coming) <= self._distance:
            later = step + len(self._coming) * self._stride
            if later >= end:
                break
            self._coming.append(self._pool.submit(self._make, later))
        return self._coming.popleft().result()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
