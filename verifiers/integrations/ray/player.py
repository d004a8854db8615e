"""The rollouts of one run → chunks for Ray workers; what they ask of the model → the client; a dead one's → others."""

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
MOST_DEATHS = 3  # of workers that had begun a rollout, before that rollout is failed
SOON_S = 10.0  # in which a new worker is expected: its share of the work is left for it
START_S = 600.0  # for the first worker to be there: a cluster that grows needs minutes
_numbers = itertools.count(1)


@dataclass(eq=False)
class _Waiting:
    """A rollout that somebody waits for, and the context in which its requests are answered."""

    order: Order
    future: asyncio.Future[State]
    context: Context
    is_begun: bool = False
    deaths: int = 0


@dataclass(eq=False)
class _Seat:
    """One worker as this run sees it."""

    at: int
    handle: Any
    is_ready: bool = False
    since: float = field(default_factory=time.monotonic)
    playing: dict[int, _Waiting] = field(default_factory=dict)
    answers: list[tuple[int, Any]] = field(default_factory=list)


class RayPlayer:
    """Plays the rollouts of one run. Workers get them in chunks, large ones while there are many."""

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
        self._seats: list[_Seat] = []
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

    # --- what a run asks ------------------------------------------------------------------------------------------

    async def run_row(self, row: Row, answerer: Answerer, sampling_args: SamplingArgs) -> State:
        """One rollout, scored if the run scores; raises `NotBegunError` where it was taken back."""
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
        """The score that came with the rollout."""
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
            seat = await self._some_seat()
            try:
                made = await seat.handle.score.remote(self._cargo, self._terms, self._share, blob, given)
                return [read_score(one) for one in made]
            except RayActorError:
                self._bury(seat)
        raise WorkerError(f"{MOST_DEATHS} Ray workers died one after the other while they scored this")

    def withdraw(self) -> None:
        """Take back what nobody has begun; of groups only those of which no rollout has begun."""
        begun = {one.order.row["example_id"] for seat in self._seats for one in seat.playing.values() if one.is_begun}

        def is_free(one: _Waiting) -> bool:
            return not one.is_begun and not (self._is_grouped and one.order.row["example_id"] in begun)

        for waiting in [one for one in self._pending if is_free(one)]:
            self._pending.remove(waiting)
            _end(waiting, NotBegunError())
        for seat in self._seats:
            if ids := [number for number, one in seat.playing.items() if is_free(one)]:
                seat.handle.drop.remote(ids)

    def close(self) -> None:
        """End what is still under way for this run."""
        for seat in self._seats:
            if seat.playing:
                seat.handle.drop.remote(list(seat.playing), even_if_begun=True)
        for task in self._tasks:
            task.cancel()
        if self._patience is not None:
            self._patience.cancel()

    # --- chunks ---------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Hand out what is pending, once all that is about to be asked for has been."""
        if not self._is_filling:
            self._is_filling = True
            asyncio.get_running_loop().call_soon(self._fill)

    def _fill(self) -> None:
        self._is_filling = False
        self._seat_all()
        if self._failure is not None:
            while self._pending:
                _end(self._pending.popleft(), self._failure)
        free = [seat for seat in self._seats if seat.is_ready and len(seat.playing) <= self._share.at_once]
        for seat in sorted(free, key=lambda seat: len(seat.playing)):
            if chunk := self._chunk(seat):
                seat.playing |= {one.order.id: one for one in chunk}
                self._begin(self._play(seat, chunk))

    def _chunk(self, seat: _Seat) -> list[_Waiting]:
        """What a worker gets next: enough to fill its slots and some of the rest, within its fair share."""
        if not self._pending:
            return []
        if self._pending[0].deaths >= MOST_DEATHS - 1:  # perhaps it kills its workers: nobody else is to die with it
            return [] if seat.playing else [self._pending.popleft()]
        soon = time.monotonic() - SOON_S
        expected = [one for one in self._seats if one.is_ready or one.since > soon]
        left, playing = len(self._pending), sum(len(one.playing) for one in self._seats)
        fair = math.ceil((left + playing) / len(expected)) - len(seat.playing)
        wanted = max(self._share.at_once - len(seat.playing), math.ceil(left / (4 * len(expected))))
        size = min(wanted, fair, MOST_IN_A_CHUNK)
        chunk: list[_Waiting] = []
        while self._pending and len(chunk) < size and self._pending[0].deaths < MOST_DEATHS - 1:
            chunk.append(self._pending.popleft())
        return chunk

    async def _play(self, seat: _Seat, chunk: Sequence[_Waiting]) -> None:
        self.launches += 1
        play = seat.handle.play.options(num_returns="streaming")
        try:
            stream = play.remote(self._cargo, self._terms, self._share, [one.order for one in chunk])
            async for reference in stream:
                for kind, number, value in cloudpickle.loads(await reference):
                    self._take(seat, kind, number, value)
                self._wake()
        except RayActorError:
            self._bury(seat)
        except RayError as error:  # the environment cannot be made there, say
            self._fail(chunk, seat, InfraError(f"a Ray worker cannot play: {_cause(error)}"))

    def _take(self, seat: _Seat, kind: str, number: int, value: Any) -> None:
        waiting = seat.playing.get(number)
        if waiting is None:
            return
        if kind == "begun":
            waiting.is_begun = True
        elif kind == "ask":
            self._begin(self._answer(seat, *value), waiting.context)
        else:
            del seat.playing[number]
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

    async def _answer(self, seat: _Seat, number: int, request: Request) -> None:
        """Ask the model for a worker, and send it what came, together with other replies that came just now."""
        try:
            completion = await self._answerer.client.complete(request)
            if completion.usage is not None:
                note_reply(completion.usage.completion_tokens)
            said: Any = sendable(completion)
        except BaseException as error:  # a client of someone else's
            said = error_fields(wrap(contained(error), InfraError, "the client"))
        seat.answers.append((number, said))
        if len(seat.answers) == 1:
            asyncio.get_running_loop().call_soon(self._send_answers, seat)

    def _send_answers(self, seat: _Seat) -> None:
        answers, seat.answers = seat.answers, []
        seat.handle.answer.remote(answers)

    # --- workers that come and go ---------------------------------------------------------------------------------

    def _seat_all(self) -> None:
        """See who is there now: at the beginning, and after one was replaced."""
        if self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(START_S, self._give_up)
        for at, handle in enumerate(self._workers.handles):
            if at == len(self._seats):
                self._seats.append(_Seat(at, None))
            if self._seats[at].handle is not handle:
                self._seats[at] = _Seat(at, handle)
                self._begin(self._welcome(self._seats[at]))

    def _give_up(self) -> None:
        if not self.launches:
            self._failure = WorkerError(
                f"no Ray worker was there within {START_S:g} s; others may use the whole cluster"
            )
            self._wake()

    async def _welcome(self, seat: _Seat) -> None:
        try:
            here, there = own_version(), await seat.handle.version.remote()
        except RayActorError as error:
            if "ModuleNotFoundError" in str(error) or "ImportError" in str(error):
                self._failure = InfraError(
                    f"the Ray workers cannot import verifiers: {_cause(error)}; install it there"
                )
            self._bury(seat)
            return
        if here != there:
            self._failure = InfraError(
                f"the Ray workers have verifiers {there}, and this process has {here}; install the same"
            )
        seat.is_ready = True
        self._wake()

    async def _some_seat(self) -> _Seat:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            self._seat_all()
            ready = [seat for seat in self._seats if seat.is_ready]
            if ready:
                return min(ready, key=lambda seat: len(seat.playing))
            await asyncio.sleep(0.05)
        raise WorkerError(f"no Ray worker was there within {START_S:g} s")

    def _bury(self, seat: _Seat) -> None:
        """A worker died: another takes its place, and what it played is played again."""
        if self._seats[seat.at] is not seat:
            return
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row > MOST_DEATHS * len(self._seats) and self._failure is None:
            self._failure = WorkerError(
                f"{self._deaths_in_a_row} Ray workers died one after the other; ray logs says why"
            )
        self._workers.replace(seat.at, seat.handle)
        for waiting in reversed(seat.playing.values()):
            waiting.deaths += waiting.is_begun
            if waiting.deaths >= MOST_DEATHS:
                _end(waiting, WorkerError(f"{waiting.deaths} Ray workers died while they played this rollout"))
            elif not waiting.future.done():
                waiting.is_begun = False
                self._pending.appendleft(waiting)
        seat.playing = {}
        seat.is_ready = False
        self._wake()

    def _fail(self, chunk: Sequence[_Waiting], seat: _Seat, error: Exception) -> None:
        for one in chunk:
            seat.playing.pop(one.order.id, None)
            _end(one, error)

    def _forget(self, waiting: _Waiting) -> None:
        """Nobody waits for it any more."""
        if waiting in self._pending:
            self._pending.remove(waiting)
        for seat in self._seats:
            if seat.playing.pop(waiting.order.id, None) is not None:
                seat.handle.drop.remote([waiting.order.id], even_if_begun=True)

    def _begin(self, work: Any, context: Context | None = None) -> None:
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = wrap(contained(error), InfraError, "playing on Ray workers")
            for seat in self._seats:
                self._fail(list(seat.playing.values()), seat, self._failure)
            self._wake()


def _end(waiting: _Waiting, error: Exception) -> None:
    if not waiting.future.done():
        waiting.future.set_exception(error)


def _part(limit: int | None, count: int) -> int | None:
    return None if limit is None or limit < 1 else math.ceil(limit / count)


def _cause(error: BaseException) -> str:
    """The last line of what a worker said, without Ray's frames."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:500] if lines else type(error).__name__
