"""The process of a Ray worker: chunks of rollouts to play → a stream of events."""

from __future__ import annotations

import asyncio
import importlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ray import cloudpickle

from verifiers.clients.protocol import Completion, Request
from verifiers.envs.remote.host import Host, Terms
from verifiers.envs.remote.parcels import attached, detached, read_error, read_score, score_fields
from verifiers.envs.remote.workers import Share
from verifiers.errors import Error
from verifiers.foreign import guarded_tasks
from verifiers.integrations.ray.packages import Package, unpack
from verifiers.rubrics.shipping import prune
from verifiers.types import Row

KEPT = 4  # environments that a worker keeps loaded: for training, for evaluation


@dataclass(frozen=True, slots=True)
class Order:
    """One rollout to play; ``name`` identifies it in its requests."""

    id: int
    row: Row
    name: str | None


@dataclass(frozen=True, slots=True)
class Cargo:
    """An environment in Ray's object store; `unpack` restores it."""

    key: str
    env: bytes
    packages: dict[str, Package]
    rows: tuple[Any, ...]  # references to data sets


Event = tuple[Literal["begun", "ask", "done", "dropped"], int, Any]


class RolloutWorker:
    """Plays rollouts in this process. Model requests go through the caller, or through a client in the terms."""

    def __init__(self) -> None:
        self._hosts: OrderedDict[tuple[str, Share], Host] = OrderedDict()
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._begun: set[int] = set()
        self._asked: dict[int, asyncio.Future[Completion]] = {}
        self._guard: ExitStack | None = None
        self._loading = asyncio.Lock()

    async def version(self) -> str:
        """The version of verifiers here; it must be the caller's."""
        return own_version()

    async def play(
        self, cargo: Sequence[Any], terms: Terms, share: Share, orders: Sequence[Order]
    ) -> AsyncIterator[bytes]:
        """Play a chunk; yields batches of events."""
        host = await self._host(cargo, share)
        events: asyncio.Queue[Event] = asyncio.Queue()
        for order in orders:
            self._playing[order.id] = asyncio.create_task(self._play_one(host, terms, order, events))
        left = len(orders)
        while left:
            batch = [await events.get()]
            while not events.empty():
                batch.append(events.get_nowait())
            left -= sum(kind in ("done", "dropped") for kind, _, _ in batch)
            yield _packed(batch)

    async def _play_one(self, host: Host, terms: Terms, order: Order, events: asyncio.Queue[Event]) -> None:
        ask = partial(self._ask, order.id, events)
        try:
            state, score = await host.play(order.row, order.name, terms, ask, partial(self._begin, order.id, events))
            events.put_nowait(("done", order.id, detached(state, score)))
        except asyncio.CancelledError:
            events.put_nowait(("dropped", order.id, None))
        finally:
            self._begun.discard(order.id)
            self._playing.pop(order.id, None)

    def _begin(self, order_id: int, events: asyncio.Queue[Event]) -> None:
        self._begun.add(order_id)
        events.put_nowait(("begun", order_id, None))

    async def _ask(self, order_id: int, events: asyncio.Queue[Event], request: Request) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        number = id(future)
        self._asked[number] = future
        events.put_nowait(("ask", order_id, (number, request)))
        try:
            return await future
        finally:
            self._asked.pop(number, None)

    async def answer(self, answers: Sequence[tuple[int, Completion | dict[str, Any]]]) -> None:
        """Deliver the model's completions to waiting requests, or the errors of requests that failed."""
        for number, said in answers:
            future = self._asked.get(number)
            if future is None or future.done():
                continue
            if isinstance(said, Completion):
                future.set_result(said)
            else:
                future.set_exception(read_error(said) or Error("the caller sent neither a completion nor an error"))

    async def drop(self, order_ids: Sequence[int], *, even_if_begun: bool = False) -> None:
        """Cancel rollouts that have not begun, or with ``even_if_begun`` any."""
        for order_id in order_ids:
            task = self._playing.get(order_id)
            if task is not None and (even_if_begun or order_id not in self._begun):
                task.cancel()

    async def score(
        self, cargo: Sequence[Any], terms: Terms, share: Share, states: Sequence[Any], scores: Sequence[Any] | None
    ) -> list[dict[str, Any]]:
        """Score finished rollouts: each alone, or as a group if the ``scores`` so far are given."""
        host = await self._host(cargo, share)
        here = [attached(fields, None, None) for fields in cloudpickle.loads(states)]
        if scores is None:
            made = list(await asyncio.gather(*(host.score(state, terms) for state in here)))
        else:
            made = [read_score(one) for one in scores]
            await host.score_together(here, made, terms)
        return [score_fields(one) for one in made]

    async def close(self) -> None:
        """Run the teardown hooks of the environments here."""
        for task in self._playing.values():
            task.cancel()
        for host in self._hosts.values():
            await host.env._close()
        self._hosts.clear()

    async def _host(self, cargo: Sequence[Any], share: Share) -> Host:
        if self._guard is None:
            self._guard = ExitStack()
            self._guard.enter_context(guarded_tasks())
        async with self._loading:
            packed: Cargo = await cargo[0]
            key = (packed.key, share)
            if key not in self._hosts:
                rows = [await reference for reference in packed.rows]
                env = await asyncio.to_thread(unpack, packed.env, packed.packages, rows)
                self._hosts[key] = Host(env, at_once=share.at_once, generation=share.generation, scoring=share.scoring)
                while len(self._hosts) > KEPT:
                    self._hosts.popitem(last=False)
            self._hosts.move_to_end(key)
            return self._hosts[key]


def own_version() -> str:
    """The version of this package; imported dynamically because no module may import the top-level package."""
    version: str = importlib.import_module("verifiers").__version__
    return version


def _packed(batch: list[Event]) -> bytes:
    """Events as bytes, without the values of a state that cannot be pickled."""
    try:
        packed: bytes = cloudpickle.dumps(batch)
    except Exception:  # foreign objects decide how they are pickled
        packed = cloudpickle.dumps([(kind, number, prune(value)) for kind, number, value in batch])
    return packed
