"""Whether an endpoint lets a key use a model: a few requests test this before the others are sent."""

from __future__ import annotations

import asyncio
from collections import deque

from verifiers.errors import AccessRefusedError

CANARIES = 4  # requests in flight before the first answer
HANDFUL = 5  # consecutive refusals after which access counts as refused
PROBATION_S = 1.0  # an endpoint refuses quickly; one that takes longer is working on a reply
NEAR_PROBATION_S = 0.25  # the same for an endpoint on this machine or a private network
ADMITTED_AT_ONCE = 16
REFUSED_FOR_S = 5.0  # how long requests fail without being sent; later the key or the model may have been fixed


class Access:
    """Whether one key may use one model at one endpoint, in one event loop.

    The first few requests are sent. The others wait until one of these gets any answer other than a refusal of the key
    or the model, or has been in flight for a while. After several consecutive refusals, all waiting requests, and new
    ones in the next seconds, fail without being sent.
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
        """Wait until this request may be sent; raises `AccessRefusedError` once access is known to be refused."""
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
                self._admit_one()  # admitted and cancelled in the same iteration of the event loop
            raise

    def left(self) -> None:
        """A request ended without an answer (it was cancelled): send another one in its place."""
        if not self.is_open:
            self._asking -= 1
            self._admit_one()

    def open(self) -> None:
        """The endpoint accepted a request, or has worked on one for a while: send all requests."""
        self._refusals = 0
        self._stop_timer()
        if not self.is_open:
            self.is_open = True
            self._admit_all()

    def _admit_all(self) -> None:
        """Admit a few in each iteration of the event loop, so that thousands at once do not block it."""
        for _ in range(min(ADMITTED_AT_ONCE, len(self._line))):
            place = self._line.popleft()
            if not place.done():
                place.set_result(None)
        if self._line and self.is_open:
            asyncio.get_running_loop().call_soon(self._admit_all)

    def refuse(self, said: str) -> bool:
        """The endpoint refused the key or the model. Returns whether access now counts as refused for all requests."""
        self._refusals += 1
        if self._refusals < HANDFUL:
            if not self.is_open:
                self._asking -= 1
                self._admit_one()
            return False
        self._said = f"{said} ({self._refusals} consecutive refusals; no more requests are sent)"
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
        """The message of the `AccessRefusedError` that waiting requests get."""
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
