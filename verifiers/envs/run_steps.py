"""What a run does with each of its jobs: a rollout, its score, a line on disk. Nothing of it ends the run by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from verifiers.clients.asking_for import ask_for, asking_for, name_rollout
from verifiers.envs.calling import Answerer
from verifiers.envs.large_replies import Place, is_large, lighten
from verifiers.errors import Error, GraderError, HookError, wrap
from verifiers.escapes import contained
from verifiers.rubrics.score import Score
from verifiers.runner import Job, NotBegunError
from verifiers.store import Appender, Record, ResultsGoneError, is_failed, to_record
from verifiers.types import Row, SamplingArgs, State

if TYPE_CHECKING:
    from verifiers.envs.environment import Environment


class Player(Protocol):
    """Who plays and scores the rollouts of a run: the environment itself, or copies of it in other processes."""

    async def run_row(self, row: Row, answerer: Answerer, sampling_args: SamplingArgs) -> State: ...

    async def score_alone(self, state: State) -> Score: ...

    async def add_group_scores(self, states: Sequence[State], scores: Sequence[Score]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RunSteps:
    """The steps of one run; `verifiers.runner.Run` says when each is taken."""

    env: Environment
    player: Player
    answerer: Answerer
    sampling: SamplingArgs
    is_scored: bool
    scores_groups: bool
    scores_each_as_a_group: bool
    columns: Sequence[str]
    appender: Appender | None
    restored: Mapping[tuple[Any, int], State]

    async def generate(self, job: Job) -> State:
        """One rollout; one that is on disk already is only scored again with its group."""
        ask_for(name_rollout(job.row["example_id"], job.repeat))  # until this worker's next job: its scoring too
        if job.key in self.restored:
            return self.restored[job.key]
        if job.error is not None:
            return self.env.failed_state(job.row, self.answerer, self.sampling, job.error)
        try:
            return await self.player.run_row(job.row, self.answerer, self.sampling)
        except NotBegunError:
            raise
        except BaseException as error:  # foreign code that no one on the way looked at
            return self.env.failed_state(job.row, self.answerer, self.sampling, contained(error))

    async def score_alone(self, state: State) -> Score:
        """What can be said of one rollout; what was said of one on disk stays, as not all of its state is there."""
        if hasattr(state, "saved_score"):
            saved: Score = state.saved_score
            return saved
        score = await score_alone(self.player, state)
        if self.scores_each_as_a_group and score.error is None:
            await self.score_group([state], [score])
        return score

    async def score_group(self, states: Sequence[State], scores: Sequence[Score]) -> None:
        await score_group(self.player, states, scores)

    def fail(self, job: Job, cause: Error) -> State:
        """A rollout that is not begun any more."""
        state = self.env.failed_state(job.row, self.answerer, self.sampling, cause)
        state["error"] = cause  # as it is: one cause for all
        return state

    def save(self, job: Job, state: State) -> None:
        assert self.appender is not None
        try:
            end = self.appender.path.stat().st_size if is_large(state.get("completion")) else 0
            record = _record(state, job.repeat, self.columns)
            if job.key in self.restored and is_failed(record):
                record["usage"] = None  # what it took is told by the line that still counts
            self.appender.append(record)
            lighten(state, Place(self.appender.path, end, key_of(record)))
        except ResultsGoneError:
            raise
        except OSError as error:
            error.add_note("the run ends here: nothing more can be saved; what was saved before can be resumed")
            raise


async def score_alone(player: Player, state: State) -> Score:
    """What can be said of one rollout; whatever a rubric of one's own raises is the error of this one."""
    try:
        return await player.score_alone(state)
    except BaseException as error:  # foreign code
        return Score(error=wrap(contained(error), GraderError, "scoring"))


async def score_group(player: Player, states: Sequence[State], scores: Sequence[Score]) -> None:
    """Add what only the whole group can say, or the error that kept it from being said."""
    try:
        with asking_for(name_rollout(states[0].get("example_id") if states else None, None)):
            await player.add_group_scores(states, scores)
    except BaseException as error:  # foreign code
        failure = wrap(contained(error), GraderError, "scoring the group")
        for score in scores:
            score.error = score.error or failure


def _record(state: State, rollout: int, columns: Sequence[str]) -> Record:
    try:
        return to_record(state, rollout=rollout, state_columns=columns)
    except BaseException as error:  # foreign objects in the state say how they are written
        state["error"] = state.get("error") or wrap(contained(error), HookError, "writing the state down")
        state["reward"] = None
        plain = {key: state.get(key) for key in ("example_id", "task", "prompt", "answer", "error", "timing", "usage")}
        return to_record(plain, rollout=rollout)


def key_of(record: Record) -> tuple[Any, int]:
    """Which rollout of which example a record is."""
    return record["example_id"], record["rollout"]
