"""A piece of work and its seconds → TimeoutError inside it when they are over.

As `asyncio.timeout`, for less: thousands of requests wait with the same number of seconds, so one timer serves them
all, set for whoever of them started first.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

GRAIN_S = 0.01  # when many are due one after the other, look no more often than this


class Deadlines:
    """The deadlines of one event loop.

    >>> async def wait(seconds):
    ...     with Deadlines(asyncio.get_running_loop()).within(0.01):
    ...         await asyncio.sleep(seconds)
    >>> asyncio.run(wait(0))
    >>> asyncio.run(wait(1))
    Traceback (most recent call last):
    TimeoutError
    """

    __slots__ = ("_loop", "_queues")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queues: dict[float, _Queue] = {}

    def within(self, seconds: float) -> Deadline:
        """A context that must be left within that many seconds."""
        queue = self._queues.get(seconds)
        if queue is None:
            queue = self._queues[seconds] = _Queue(self._queues, seconds, self._loop)
        return Deadline(queue)


class Deadline:
    """One piece of work, and whether its time is over."""

    __slots__ = ("_cancelling", "_queue", "_task", "end", "is_over")

    end: float

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue

    def __enter__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline needs a task to end")
        self._task = task
        self._cancelling = task.cancelling()
        self.is_over = False
        self._queue.add(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._queue.remove(self)
        # Someone else may have cancelled the task as well; then it stays cancelled.
        if self.is_over and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        self.is_over = True
        self._task.cancel()


class _Queue:
    """Those that have the same seconds, and so are due in the order in which they came."""

    __slots__ = ("_loop", "_peers", "_seconds", "_timer", "_waiting")

    def __init__(self, peers: dict[float, _Queue], seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        self._peers, self._seconds, self._loop = peers, seconds, loop
        self._waiting: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, deadline: Deadline) -> None:
        deadline.end = self._loop.time() + self._seconds
        self._waiting[deadline] = None
        if self._timer is None:
            self._peers[self._seconds] = self
            self._timer = self._loop.call_at(deadline.end, self._expire)

    def remove(self, deadline: Deadline) -> None:
        self._waiting.pop(deadline, None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._peers.pop(self._seconds, None)

    def _expire(self) -> None:
        now = self._loop.time()
        next_end = None
        due = []
        for deadline in self._waiting:
            if deadline.end > now:
                next_end = deadline.end
                break
            due.append(deadline)
        self._timer = None
        if next_end is None:
            self._peers.pop(self._seconds, None)
        else:
            self._timer = self._loop.call_at(max(next_end, now + GRAIN_S), self._expire)
        for deadline in due:
            del self._waiting[deadline]
            deadline.expire()
