"""Admit the requests of many clients round robin, so that a client with many requests does not delay the others."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from verifiers.engine.engine import EngineFullError


class Shares:
    """Admits work of a total cost of ``room`` at once. Clients take turns; each client's requests stay in order."""

    def __init__(self, room: int, *, most_waiting: int) -> None:
        self.room = room
        self.most_waiting = most_waiting
        self._free = room
        self._waiting: OrderedDict[Hashable, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self, client: Hashable, cost: int) -> AsyncIterator[None]:
        """Wait for the client's turn, and occupy ``cost`` of the room until the block ends."""
        cost = max(1, min(cost, self.room))
        if self._waiting or cost > self._free:
            await self._wait(client, cost)
        else:
            self._free -= cost
        try:
            yield
        finally:
            self._free += cost
            self._let_in()

    async def _wait(self, client: Hashable, cost: int) -> None:
        queue = self._waiting.setdefault(client, deque())
        if len(queue) >= self.most_waiting // len(self._waiting):
            if not queue:
                del self._waiting[client]
            raise EngineFullError(f"{len(queue)} of your requests are already waiting; try again in a moment")
        let_in: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append((cost, let_in))
        try:
            await let_in
        except asyncio.CancelledError:
            if let_in.done() and not let_in.cancelled():  # admitted and cancelled at the same moment
                self._free += cost
            let_in.cancel()
            self._let_in()
            raise

    def _let_in(self) -> None:
        """Admit the next requests, one per client in turn. If one does not fit, all wait until it does."""
        while self._waiting:
            client, queue = next(iter(self._waiting.items()))
            while queue and queue[0][1].done():  # its client hung up
                queue.popleft()
            if queue:
                cost, let_in = queue[0]
                if cost > self._free:
                    return
                queue.popleft()
                self._free -= cost
                let_in.set_result(None)
            if queue:
                self._waiting.move_to_end(client)
            else:
                del self._waiting[client]
