"""One endpoint's overload signals → how many requests may be under way to it at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from verifiers import deadlines
from verifiers.errors import DeadlineError, EndpointDownError

START = 2048
CAP = 65536
FIRST_SPACING_S, LONGEST_SPACING_S = 0.25, 30.0
DOWN_FOR_S = 5.0  # how long a declaration holds; whoever asks later finds out anew
GROWTH = 1 / 8  # of the limit in one round trip, after a complaint, but at least a half; before any it doubles


class Limit:
    """How many requests may be under way: more while the endpoint keeps up, half as many each time it complains.

    Who does not fit waits in line. `enter` and `leave` cost nothing worth mentioning while nobody waits.

    >>> limit = Limit(start=8)
    >>> [limit.try_enter() for _ in range(9)].count(True)
    8
    >>> limit.overloaded(epoch=0); limit.size
    4.0
    """

    def __init__(self, *, start: float = START, cap: float = CAP) -> None:
        if start < 1:
            raise ValueError(f"a limit of {start} lets nothing through; give 1 or more")
        self.cap = max(1.0, float(cap))
        self.size = min(float(start), self.cap)
        self.in_flight = 0
        self.epoch = 0
        self._has_complained = False
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
        """Take a slot if one is free and nobody is in line for it."""
        if self._line or self._pause is not None or self.in_flight + 1 > self.size:
            return False
        self.in_flight += 1
        return True

    async def enter(self, *, patience_s: float = 3600.0) -> None:
        """Take a slot, waiting in line for it; gives up once nothing has succeeded here for ``patience_s``."""
        if self.try_enter():
            return
        loop = asyncio.get_running_loop()
        place: asyncio.Future[None] = loop.create_future()
        self._line.append(place)
        self._admit()  # those in front may all have given up
        patience = _Patience(self, place, patience_s, loop)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                # Admitted and cancelled in the same turn of the loop.
                self.leave()
            raise
        finally:
            patience.end()

    def leave(self) -> None:
        """Give the slot back."""
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
        """A request came back well: the limit may grow, if it is in the way at all."""
        self._last_success = now
        self._spacing_s *= 0.8
        if self.size < self.cap and self.in_flight * 2 >= self.size:
            gain = max(GROWTH, 0.5 / self.size) if self._has_complained else 1.0
            self.size = min(self.cap, self.size + gain)
            if self._line:
                self._admit()

    def overloaded(self, epoch: int, retry_after_s: float | None = None) -> None:
        """The endpoint complained about a request that entered in this ``epoch``: halve, once for all of its peers.

        Where it said when to come back, nobody comes before, and the time left between requests stays of that order.
        """
        if retry_after_s:
            self.pause(retry_after_s)
        if epoch != self.epoch:
            return
        self.epoch += 1
        busy = min(self.size, float(max(self.in_flight, 1)))
        self._has_complained = True
        if busy == 1.0:  # one at a time is still too much (so many a minute, say): leave time between them
            longest_s = min(LONGEST_SPACING_S, max(1.0, 4 * retry_after_s)) if retry_after_s else LONGEST_SPACING_S
            self._spacing_s = min(max(2 * self._spacing_s, FIRST_SPACING_S), longest_s)
            self.pause(self._spacing_s)
        self.size = max(1.0, busy / 2)

    # --- is anyone there at all? ----------------------------------------------------------------------------------

    def note(self, is_refusal: bool, now: float) -> None:
        """Remember since when the endpoint has refused everything (``now``: a clock of time in which we could ask)."""
        if not is_refusal:
            self.refused_since = None
        elif self.refused_since is None:
            self.refused_since = now

    def check(self) -> None:
        """Raise what was found out about the endpoint, if that was only just."""
        if self._down is not None:
            until, said = self._down
            if asyncio.get_running_loop().time() < until:
                raise EndpointDownError(said)
            self._down = None

    def declare_down(self, said: str) -> None:
        """The endpoint is taken for down: whoever waits for it is told now, and so is whoever comes right after."""
        self._down = asyncio.get_running_loop().time() + DOWN_FOR_S, said
        self.refused_since = None
        waiting = [*self._line, *self._sleepers]
        self._line.clear()
        for place in waiting:
            if not place.done():
                place.set_exception(EndpointDownError(said))

    async def sleep(self, seconds: float) -> None:
        """Wait before asking again; ends at once where the endpoint is declared down meanwhile."""
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
        """Let nobody enter for that long (the endpoint said when to come back); pauses do not add up."""
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
        """Someone will want that many at once: before any complaint, the limit starts there."""
        if not self._has_complained:
            self.size = max(self.size, min(float(demand), self.cap))


def _wake(place: asyncio.Future[None]) -> None:
    if not place.done():
        place.set_result(None)


class _Patience:
    """Ends a wait in line when the line has not moved for too long."""

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
                DeadlineError(f"waited {waited_s:.0f} s in line for the endpoint, which answered nothing meanwhile")
            )

    def end(self) -> None:
        self._handle.cancel()


def open_files_cap() -> int:
    """How many connections this process may hold, leaving some open files for everything else.

    The soft limit that a shell sets is often 1,024; a process may raise it up to the hard one by itself.
    """
    try:
        import resource
    except ImportError:  # not on Windows
        return 512
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CAP if hard == resource.RLIM_INFINITY else min(CAP, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # a system may have a lower bound of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return CAP if soft == resource.RLIM_INFINITY else max(16, min(CAP, soft - max(64, soft // 10)))
