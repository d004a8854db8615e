"""A first-in-first-out lock: a loop that acquires it repeatedly does not starve other threads."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class FairLock:
    """First in, first out, and reentrant.

    Python's own locks are usually reacquired by the thread that has just released them.

    >>> lock = FairLock()
    >>> with lock, lock:
    ...     lock.is_held
    True
    >>> lock.is_held
    False
    """

    def __init__(self) -> None:
        self.steady = threading.RLock()  # acquired before the lock itself, see `steady`
        self._changed = threading.Condition()
        self._line: deque[object] = deque()  # tickets of waiting threads
        self._holder: int | None = None
        self._depth = 0
        self.undone = 0  # writes that do not change the weights: undone by a proof, or to buffers by a forward
        self.taken = 0  # how often it was acquired, without reentries

    @property
    def is_held(self) -> bool:
        """Whether any thread holds the lock."""
        return self._holder is not None

    def __enter__(self) -> None:
        me, ticket = threading.get_ident(), object()
        with self._changed:
            if self._holder == me:
                self._depth += 1
                return
            self._line.append(ticket)
            try:
                self._changed.wait_for(lambda: self._holder is None and self._line[0] is ticket)
                self._line.popleft()
                self._holder, self._depth = me, 1
                self.taken += 1
            except BaseException:  # Ctrl-C, while waiting
                self._give_up(ticket)
                raise

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._holder = None
                self._changed.notify_all()

    def _give_up(self, ticket: object) -> None:
        with self._changed:
            if ticket in self._line:
                self._line.remove(ticket)
            else:  # interrupted just after acquiring the lock
                self._holder = None
            self._changed.notify_all()


def steady(lock: Any) -> AbstractContextManager[Any]:
    """Within this block no proof scales the weights that ``lock`` guards; sampling is still allowed.

    A backward pass needs this, because it reads the weights without holding the lock. Acquire this before the lock.
    """
    return lock.steady if isinstance(lock, FairLock) else nullcontext()
