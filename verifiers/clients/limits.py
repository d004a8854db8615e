"""One endpoint's overload signals → how many requests may be in flight to it at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from verifiers import deadlines
from verifiers.errors import DeadlineError, EndpointDownError

START = 2048
CAP = 65536
FIRST_SPACING_S, LONGEST_SPACING_S = 0.25, 30.0
DOWN_FOR_S = 5.0  # how long requests fail at once after an endpoint was declared down; later ones are sent again
GROWTH = 1 / 8  # growth per success after the first overload (at least 0.5 / limit); before it, 1 per success


class Limit:
    """How many requests may be in flight. Grows while the endpoint keeps up; halves each time it reports overload.

    Requests above the limit queue. `enter` and `leave` cost next to nothing while the queue is empty.

    >>> limit = Limit(start=8)
    >>> [limit.try_enter() for _ in range(9)].count(True)
    8
    >>> limit.overloaded(epoch=0); limit.size
    4.0
    """

    def __init__(self, *, start: float = START, cap: float = CAP) -> None:
        if start < 1:
            raise ValueError(f"a limit must be 1 or more, not {start}")
        self.cap = max(1.0, float(cap))
        self.size = min(float(start), self.cap)
        self.in_flight = 0
        self.epoch = 0
        self._was_overloaded = False
        self._line: deque[asyncio.Future[None]] = deque()
        self._pause: asyncio.TimerHandle | None = None
        self._pause_end = 0.0
        self._spacing_s = 0.0
        self._last_success = 0.0
        self.refused_since: float | None = None
        self._down: tuple[float, str] | None = None
        self._sleepers: set[asyncio.Future[None]] = set()

    # --- slots ----------------------------------------------------------------------------------------------------

    def try_enter(self) -> bool:
        """Take a slot if one is free and no request is queued."""
        if self._line or self._pause is not None or self.in_flight + 1 > self.size:
            return False
        self.in_flight += 1
        return True

    async def enter(self, *, patience_s: float = 3600.0) -> None:
        """Take a slot, queueing for it. Raises `DeadlineError` if no request has succeeded here for ``patience_s``."""
        if self.try_enter():
            return
        loop = asyncio.get_running_loop()
        place: asyncio.Future[None] = loop.create_future()
        self._line.append(place)
        self._admit()  # all waiters ahead may have given up
        patience = _Patience(self, place, patience_s, loop)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                # Admitted and cancelled in the same iteration of the event loop.
                self.leave()
            raise
        finally:
            patience.end()

    def leave(self) -> None:
        """Release the slot."""
        self.in_flight -= 1
        if self._line:
            self._admit()

    def _admit(self) -> None:
        while self._line and self._pause is None and self.in_flight + 1 <= self.size:
            place = self._line.popleft()
            if not place.done():
                self.in_flight += 1
                place.set_result(None)

    # --- signals --------------------------------------------------------------------------------------------------

    def succeeded(self, now: float) -> None:
        """A request succeeded: grow the limit if at least half of it is in use."""
        self._last_success = now
        self._spacing_s *= 0.8
        if self.size < self.cap and self.in_flight * 2 >= self.size:
            gain = max(GROWTH, 0.5 / self.size) if self._was_overloaded else 1.0
            self.size = min(self.cap, self.size + gain)
            if self._line:
                self._admit()

    def overloaded(self, epoch: int, retry_after_s: float | None = None) -> None:
        """The endpoint reported overload for a request that entered in this ``epoch``: halve the limit, once per epoch.

        With ``retry_after_s``, no request enters before that, and it bounds the spacing between requests.
        """
        if retry_after_s:
            self.pause(retry_after_s)
        if epoch != self.epoch:
            return
        self.epoch += 1
        busy = min(self.size, float(max(self.in_flight, 1)))
        self._was_overloaded = True
        if busy == 1.0:  # even one at a time is too much (a limit per minute, say): leave time between requests
            longest_s = min(LONGEST_SPACING_S, max(1.0, 4 * retry_after_s)) if retry_after_s else LONGEST_SPACING_S
            self._spacing_s = min(max(2 * self._spacing_s, FIRST_SPACING_S), longest_s)
            self.pause(self._spacing_s)
        self.size = max(1.0, busy / 2)

    # --- is the endpoint down? ------------------------------------------------------------------------------------

    def note(self, is_refusal: bool, now: float) -> None:
        """Record since when the endpoint has refused everything (``now``: of a clock that omits blocked time)."""
        if not is_refusal:
            self.refused_since = None
        elif self.refused_since is None:
            self.refused_since = now

    def check(self) -> None:
        """Raise `EndpointDownError` if the endpoint was declared down within the last `DOWN_FOR_S` seconds."""
        if self._down is not None:
            until, said = self._down
            if asyncio.get_running_loop().time() < until:
                raise EndpointDownError(said)
            self._down = None

    def declare_down(self, said: str) -> None:
        """Declare the endpoint down: fail all waiting requests now, and new ones for `DOWN_FOR_S` seconds."""
        self._down = asyncio.get_running_loop().time() + DOWN_FOR_S, said
        self.refused_since = None
        waiting = [*self._line, *self._sleepers]
        self._line.clear()
        for place in waiting:
            if not place.done():
                place.set_exception(EndpointDownError(said))

    async def sleep(self, seconds: float) -> None:
        """Wait before a retry; raises `EndpointDownError` as soon as the endpoint is declared down."""
        loop = asyncio.get_running_loop()
        place: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(seconds, _wake, place)
        self._sleepers.add(place)
        try:
            await place
        finally:
            timer.cancel()
            self._sleepers.discard(place)

    def pause(self, seconds: float) -> None:
        """Admit no request for that long (the endpoint's Retry-After). Pauses do not add up."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        if self._pause is not None:
            if end <= self._pause_end:
                return
            self._pause.cancel()
        self._pause_end = end
        self._pause = loop.call_at(end, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._admit()

    def expect(self, demand: int) -> None:
        """Raise the limit to an expected ``demand``, unless the endpoint has already reported overload."""
        if not self._was_overloaded:
            self.size = max(self.size, min(float(demand), self.cap))


def _wake(place: asyncio.Future[None]) -> None:
    if not place.done():
        place.set_result(None)


class _Patience:
    """Fails a queued request when the endpoint has not answered for too long."""

    __slots__ = ("_handle", "_limit", "_loop", "_place", "_seconds", "_since")

    def __init__(
        self, limit: Limit, place: asyncio.Future[None], seconds: float, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._limit, self._place, self._seconds, self._loop = limit, place, seconds, loop
        self._since = deadlines.current().clock.now()
        self._handle = loop.call_later(seconds, self._check)

    def _check(self) -> None:
        end = max(self._since, self._limit._last_success) + self._seconds
        if self._place.done():
            return
        now = deadlines.current().clock.now()
        if now < end:
            self._handle = self._loop.call_later(end - now, self._check)
        else:
            waited_s = now - self._since
            self._place.set_exception(
                DeadlineError(f"waited {waited_s:.0f} s in the queue; the endpoint answered no request in that time")
            )

    def end(self) -> None:
        self._handle.cancel()


def open_files_cap() -> int:
    """How many connections this process may open, leaving file descriptors for everything else.

    Raises the soft limit, which is often 1,024, up to `CAP` or the hard limit.
    """
    try:
        import resource
    except ImportError:  # not on Windows
        return 512
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CAP if hard == resource.RLIM_INFINITY else min(CAP, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # the system may have a lower bound
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return CAP if soft == resource.RLIM_INFINITY else max(16, min(CAP, soft - max(64, soft // 10)))
