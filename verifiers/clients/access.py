"""Whether an endpoint lets a key use a model: a few requests find out before all the others are sent."""

from __future__ import annotations

import asyncio
from collections import deque

from verifiers.errors import AccessRefusedError

CANARIES = 4  # requests that may be under way before anything is known
HANDFUL = 5  # refusals in a row that are taken for the answer
PROBATION_S = 1.0  # refusals come at once: an endpoint that takes longer is at work on a reply
NEAR_PROBATION_S = 0.25  # the same for one on this machine or a private network
ADMITTED_AT_ONCE = 16
REFUSED_FOR_S = 5.0  # how long the answer holds; whoever asks later may have mended it


class Access:
    """One key and one model at one endpoint, in one event loop.

    The first few requests go ahead. The others wait until one of them was answered in any way but a refusal of the key
    or the model, or has been under way for a while. After a handful of refusals in a row everyone who waits, or comes
    in the next seconds, is refused without being sent.
    """

    def __init__(self, probation_s: float = PROBATION_S) -> None:
        self.probation_s = probation_s
        self.is_open = False
        self._asking = 0
        self._refusals = 0
        self._refused_until = 0.0
        self._said = ""
        self._line: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self) -> None:
        """Wait until this request may be sent; raises `AccessRefusedError` once it is known to be in vain."""
        loop = asyncio.get_running_loop()
        if self._refused_until and loop.time() < self._refused_until:
            raise AccessRefusedError(self._said)
        if self.is_open:
            return
        if self._asking < CANARIES:
            self._asking += 1
            if self._timer is None:
                self._timer = loop.call_later(self.probation_s, self.open)
            return
        place: asyncio.Future[None] = loop.create_future()
        self._line.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._admit_one()  # admitted and cancelled in the same turn of the loop
            raise

    def left(self) -> None:
        """A request ended without an answer (it was cancelled): another one may find out in its place."""
        if not self.is_open:
            self._asking -= 1
            self._admit_one()

    def open(self) -> None:
        """The endpoint answers, or takes its time over it: nothing is known against it."""
        self._refusals = 0
        self._stop_timer()
        if not self.is_open:
            self.is_open = True
            self._admit_all()

    def _admit_all(self) -> None:
        """A few in each turn of the loop, so that thousands that begin at once do not hold it up."""
        for _ in range(min(ADMITTED_AT_ONCE, len(self._line))):
            place = self._line.popleft()
            if not place.done():
                place.set_result(None)
        if self._line and self.is_open:
            asyncio.get_running_loop().call_soon(self._admit_all)

    def refuse(self, said: str) -> bool:
        """The endpoint refused the key or the model. Is that its answer to everyone now?"""
        self._refusals += 1
        if self._refusals < HANDFUL:
            if not self.is_open:
                self._asking -= 1
                self._admit_one()
            return False
        self._said = f"{said} (so it was {self._refusals} times in a row; nothing more is asked)"
        self._refused_until = asyncio.get_running_loop().time() + REFUSED_FOR_S
        self.is_open, self._asking, self._refusals = False, 0, 0
        self._stop_timer()
        line, self._line = self._line, deque()
        for place in line:
            if not place.done():
                place.set_exception(AccessRefusedError(self._said))
        return True

    @property
    def said(self) -> str:
        """What everyone is told, once it is known."""
        return self._said

    def _admit_one(self) -> None:
        while self._line:
            place = self._line.popleft()
            if not place.done():
                self._asking += 1
                place.set_result(None)
                return

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
