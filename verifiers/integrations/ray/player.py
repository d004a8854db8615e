"""Distributes the rollouts of one run to Ray workers, answers their model requests, and replaces dead workers."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from typing import Any

from ray import cloudpickle
from ray.exceptions import RayActorError, RayError

from verifiers.clients.activity import note_reply
from verifiers.clients.asking_for import asked_for
from verifiers.clients.protocol import Request
from verifiers.envs.calling import Answerer
from verifiers.envs.environment import Environment
from verifiers.envs.remote.host import Terms
from verifiers.envs.remote.parcels import attached, detached, error_fields, read_score, score_fields, sendable
from verifiers.envs.remote.workers import Share
from verifiers.errors import InfraError, WorkerError, wrap
from verifiers.escapes import contained
from verifiers.integrations.ray.actor import Cargo, Order, own_version
from verifiers.integrations.ray.packages import pack
from verifiers.integrations.ray.workers import RayWorkers, direct_client
from verifiers.rubrics.score import Score
from verifiers.runner import DEFAULT_CONCURRENCY, NotBegunError
from verifiers.types import Row, SamplingArgs, State

MOST_IN_A_CHUNK = 256
MOST_DEATHS = 3  # worker deaths during a rollout before that rollout fails
SOON_S = 10.0  # a new worker is expected within this time, so its share of the work is kept for it
START_S = 600.0  # timeout for the first worker: an autoscaling cluster needs minutes
_numbers = itertools.count(1)


@dataclass(eq=False)
class _Waiting:
    """An unfinished rollout, and the context in which its requests are answered."""

    order: Order
    future: asyncio.Future[State]
    context: Context
    is_begun: bool = False
    deaths: int = 0


@dataclass(eq=False)
class _Slot:
    """The state of one worker in this run."""

    at: int
    handle: Any
    is_ready: bool = False
    since: float = field(default_factory=time.monotonic)
    playing: dict[int, _Waiting] = field(default_factory=dict)
    answers: list[tuple[int, Any]] = field(default_factory=list)


class RayPlayer:
    """Plays the rollouts of one run. Workers get them in chunks, which are large while many rollouts are left."""

    def __init__(self, workers: RayWorkers, env: Environment, answerer: Answerer, terms: Terms, share: Share) -> None:
        self._workers, self._answerer = workers, answerer
        self._terms = replace(terms, client=direct_client(answerer.client))
        self._is_grouped = env.has_group_rewards and terms.is_scored
        count = len(workers.handles)
        at_once = share.at_once if share.at_once > 0 else DEFAULT_CONCURRENCY
        self._share = Share(
            at_once=math.ceil(at_once / count),
            generation=_part(share.generation, count),
            scoring=_part(share.scoring, count),
        )
        self._cargo = [self._packed(env)]
        self._pending: deque[_Waiting] = deque()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._slots: list[_Slot] = []
        self._is_filling = False
        self._deaths_in_a_row = 0
        self._failure: Exception | None = None
        self._patience: asyncio.TimerHandle | None = None
        self.launches = 0

    def _packed(self, env: Environment) -> Any:
        packed = pack(env)
        rows = tuple(self._workers.store(id(one), one, one) for one in packed.rows)
        cargo = Cargo(packed.digest, packed.env, packed.packages, rows)
        return self._workers.store(packed.digest, None, cargo)

    # --- the interface for a run ----------------------------------------------------------------------------------

    async def run_row(self, row: Row, answerer: Answerer, sampling_args: SamplingArgs) -> State:
        """One rollout, scored if the run scores; raises `NotBegunError` if it was withdrawn."""
        order = Order(next(_numbers), row, asked_for())
        waiting = _Waiting(order, asyncio.get_running_loop().create_future(), copy_context())
        self._pending.append(waiting)
        self._wake()
        try:
            return await waiting.future
        except asyncio.CancelledError:
            self._forget(waiting)
            raise

    async def score_alone(self, state: State) -> Score:
        """The score that the worker sent with the rollout, or a new one."""
        if hasattr(state, "remote_score"):
            score: Score = state.remote_score
            del state.remote_score
            return score
        (score,) = await self._scored([state], None)
        return score

    async def add_group_scores(self, states: Sequence[State], scores: Sequence[Score]) -> None:
        for score, new in zip(scores, await self._scored(states, scores), strict=True):
            score.reward, score.metrics, score.error = new.reward, new.metrics, new.error

    async def _scored(self, states: Sequence[State], scores: Sequence[Score] | None) -> list[Score]:
        blob = cloudpickle.dumps([detached(state)[0] for state in states])
        given = None if scores is None else [score_fields(score) for score in scores]
        for _ in range(MOST_DEATHS):
            slot = await self._ready_slot()
            try:
                made = await slot.handle.score.remote(self._cargo, self._terms, self._share, blob, given)
                return [read_score(one) for one in made]
            except RayActorError:
                self._replace_dead(slot)
        raise WorkerError(f"{MOST_DEATHS} Ray workers in a row died while they scored this")

    def withdraw(self) -> None:
        """Withdraw rollouts that have not begun; a group only if none of its rollouts has begun."""
        begun = {one.order.row["example_id"] for slot in self._slots for one in slot.playing.values() if one.is_begun}

        def is_free(one: _Waiting) -> bool:
            return not one.is_begun and not (self._is_grouped and one.order.row["example_id"] in begun)

        for waiting in [one for one in self._pending if is_free(one)]:
            self._pending.remove(waiting)
            _end(waiting, NotBegunError())
        for slot in self._slots:
            if ids := [number for number, one in slot.playing.items() if is_free(one)]:
                slot.handle.drop.remote(ids)

    def close(self) -> None:
        """Cancel all unfinished work of this run."""
        for slot in self._slots:
            if slot.playing:
                slot.handle.drop.remote(list(slot.playing), even_if_begun=True)
        for task in self._tasks:
            task.cancel()
        if self._patience is not None:
            self._patience.cancel()

    # --- chunks ---------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Schedule `_fill` after the callers that are about to add rollouts."""
        if not self._is_filling:
            self._is_filling = True
            asyncio.get_running_loop().call_soon(self._fill)

    def _fill(self) -> None:
        self._is_filling = False
        self._update_slots()
        if self._failure is not None:
            while self._pending:
                _end(self._pending.popleft(), self._failure)
        free = [slot for slot in self._slots if slot.is_ready and len(slot.playing) <= self._share.at_once]
        for slot in sorted(free, key=lambda slot: len(slot.playing)):
            if chunk := self._chunk(slot):
                slot.playing |= {one.order.id: one for one in chunk}
                self._begin(self._play(slot, chunk))

    def _chunk(self, slot: _Slot) -> list[_Waiting]:
        """The next chunk for a worker: enough to keep it busy and some of the rest, within its fair share."""
        if not self._pending:
            return []
        if self._pending[0].deaths >= MOST_DEATHS - 1:  # it may crash its worker, so it runs alone
            return [] if slot.playing else [self._pending.popleft()]
        soon = time.monotonic() - SOON_S
        expected = [one for one in self._slots if one.is_ready or one.since > soon]
        left, playing = len(self._pending), sum(len(one.playing) for one in self._slots)
        fair = math.ceil((left + playing) / len(expected)) - len(slot.playing)
        wanted = max(self._share.at_once - len(slot.playing), math.ceil(left / (4 * len(expected))))
        size = min(wanted, fair, MOST_IN_A_CHUNK)
        chunk: list[_Waiting] = []
        while self._pending and len(chunk) < size and self._pending[0].deaths < MOST_DEATHS - 1:
            chunk.append(self._pending.popleft())
        return chunk

    async def _play(self, slot: _Slot, chunk: Sequence[_Waiting]) -> None:
        self.launches += 1
        play = slot.handle.play.options(num_returns="streaming")
        try:
            stream = play.remote(self._cargo, self._terms, self._share, [one.order for one in chunk])
            async for reference in stream:
                for kind, number, value in cloudpickle.loads(await reference):
                    self._take(slot, kind, number, value)
                self._wake()
        except RayActorError:
            self._replace_dead(slot)
        except RayError as error:  # for example, the environment cannot be loaded there
            self._fail(chunk, slot, InfraError(f"a Ray worker cannot play rollouts: {_cause(error)}"))

    def _take(self, slot: _Slot, kind: str, number: int, value: Any) -> None:
        waiting = slot.playing.get(number)
        if waiting is None:
            return
        if kind == "begun":
            waiting.is_begun = True
        elif kind == "ask":
            self._begin(self._answer(slot, *value), waiting.context)
        else:
            del slot.playing[number]
            if kind == "dropped":
                _end(waiting, NotBegunError())
                return
            self._deaths_in_a_row = 0
            fields, score = value
            state = attached(fields, score, self._answerer)
            if self._terms.client is not None and (used := state.peek_usage()) is not None:
                waiting.context.run(note_reply, used.completion_tokens)
            if not waiting.future.done():
                waiting.future.set_result(state)

    async def _answer(self, slot: _Slot, number: int, request: Request) -> None:
        """Answer a worker's model request; replies that arrive at the same time are sent together."""
        try:
            completion = await self._answerer.client.complete(request)
            if completion.usage is not None:
                note_reply(completion.usage.completion_tokens)
            said: Any = sendable(completion)
        except BaseException as error:  # the client may be foreign code
            said = error_fields(wrap(contained(error), InfraError, "the client"))
        slot.answers.append((number, said))
        if len(slot.answers) == 1:
            asyncio.get_running_loop().call_soon(self._send_answers, slot)

    def _send_answers(self, slot: _Slot) -> None:
        answers, slot.answers = slot.answers, []
        slot.handle.answer.remote(answers)

    # --- workers --------------------------------------------------------------------------------------------------

    def _update_slots(self) -> None:
        """Update the slots from the current worker handles: at the start, and after a worker was replaced."""
        if self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(START_S, self._give_up)
        for at, handle in enumerate(self._workers.handles):
            if at == len(self._slots):
                self._slots.append(_Slot(at, None))
            if self._slots[at].handle is not handle:
                self._slots[at] = _Slot(at, handle)
                self._begin(self._check_version(self._slots[at]))

    def _give_up(self) -> None:
        if not self.launches:
            self._failure = WorkerError(f"no Ray worker started within {START_S:g} s; others may use the whole cluster")
            self._wake()

    async def _check_version(self, slot: _Slot) -> None:
        try:
            here, there = own_version(), await slot.handle.version.remote()
        except RayActorError as error:
            if "ModuleNotFoundError" in str(error) or "ImportError" in str(error):
                self._failure = InfraError(
                    f"the Ray workers cannot import verifiers: {_cause(error)}; install it on all nodes"
                )
            self._replace_dead(slot)
            return
        if here != there:
            self._failure = InfraError(
                f"the Ray workers have verifiers {there}, but this process has {here}; install the same version"
            )
        slot.is_ready = True
        self._wake()

    async def _ready_slot(self) -> _Slot:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            self._update_slots()
            ready = [slot for slot in self._slots if slot.is_ready]
            if ready:
                return min(ready, key=lambda slot: len(slot.playing))
            await asyncio.sleep(0.05)
        raise WorkerError(f"no Ray worker started within {START_S:g} s")

    def _replace_dead(self, slot: _Slot) -> None:
        """Replace a dead worker, and queue its rollouts again."""
        if self._slots[slot.at] is not slot:
            return
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row > MOST_DEATHS * len(self._slots) and self._failure is None:
            self._failure = WorkerError(
                f"{self._deaths_in_a_row} Ray workers in a row died; see ray logs for the cause"
            )
        self._workers.replace(slot.at, slot.handle)
        for waiting in reversed(slot.playing.values()):
            waiting.deaths += waiting.is_begun
            if waiting.deaths >= MOST_DEATHS:
                _end(waiting, WorkerError(f"{waiting.deaths} Ray workers died while they played this rollout"))
            elif not waiting.future.done():
                waiting.is_begun = False
                self._pending.appendleft(waiting)
        slot.playing = {}
        slot.is_ready = False
        self._wake()

    def _fail(self, chunk: Sequence[_Waiting], slot: _Slot, error: Exception) -> None:
        for one in chunk:
            slot.playing.pop(one.order.id, None)
            _end(one, error)

    def _forget(self, waiting: _Waiting) -> None:
        """Cancel a rollout whose caller was cancelled."""
        if waiting in self._pending:
            self._pending.remove(waiting)
        for slot in self._slots:
            if slot.playing.pop(waiting.order.id, None) is not None:
                slot.handle.drop.remote([waiting.order.id], even_if_begun=True)

    def _begin(self, work: Any, context: Context | None = None) -> None:
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = wrap(contained(error), InfraError, "playing on Ray workers")
            for slot in self._slots:
                self._fail(list(slot.playing.values()), slot, self._failure)
            self._wake()


def _end(waiting: _Waiting, error: Exception) -> None:
    if not waiting.future.done():
        waiting.future.set_exception(error)


def _part(limit: int | None, count: int) -> int | None:
    return None if limit is None or limit < 1 else math.ceil(limit / count)


def _cause(error: BaseException) -> str:
    """The last line of a worker's error, without Ray's stack frames."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:500] if lines else type(error).__name__
