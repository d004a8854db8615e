"""What a run does with each job: run the rollout, score it, save it. Errors in a rollout or its score end no run."""

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
    """Runs and scores the rollouts of a run: the environment itself, or copies of it in other processes."""

    async def run_row(self, row: Row, answerer: Answerer, sampling_args: SamplingArgs) -> State: ...

    async def score_alone(self, state: State) -> Score: ...

    async def add_group_scores(self, states: Sequence[State], scores: Sequence[Score]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RunSteps:
    """The steps of one run, which `verifiers.runner.Run` calls."""

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
        """Run one rollout. A saved one that is scored again with its group is returned as it is."""
        ask_for(name_rollout(job.row["example_id"], job.repeat))  # also for its scoring, until this worker's next job
        if job.key in self.restored:
            return self.restored[job.key]
        if job.error is not None:
            return self.env.failed_state(job.row, self.answerer, self.sampling, job.error)
        try:
            return await self.player.run_row(job.row, self.answerer, self.sampling)
        except NotBegunError:
            raise
        except BaseException as error:  # foreign code
            return self.env.failed_state(job.row, self.answerer, self.sampling, contained(error))

    async def score_alone(self, state: State) -> Score:
        """Score one rollout. A saved rollout keeps its score, because its state is incomplete."""
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
        """The failed state of a rollout that will not run."""
        state = self.env.failed_state(job.row, self.answerer, self.sampling, cause)
        state["error"] = cause  # not wrapped, so that all have the same cause
        return state

    def save(self, job: Job, state: State) -> None:
        assert self.appender is not None
        try:
            end = self.appender.path.stat().st_size if is_large(state.get("completion")) else 0
            record = _record(state, job.repeat, self.columns)
            if job.key in self.restored and is_failed(record):
                record["usage"] = None  # already in the saved line, which still counts
            self.appender.append(record)
            lighten(state, Place(self.appender.path, end, key_of(record)))
        except ResultsGoneError:
            raise
        except OSError as error:
            error.add_note("the run ends, because results can no longer be saved; it can be resumed")
            raise


async def score_alone(player: Player, state: State) -> Score:
    """Score one rollout. An exception of a user's rubric becomes the error of this rollout."""
    try:
        return await player.score_alone(state)
    except BaseException as error:  # foreign code
        return Score(error=wrap(contained(error), GraderError, "scoring"))


async def score_group(player: Player, states: Sequence[State], scores: Sequence[Score]) -> None:
    """Add the group rewards to the scores, or the error if that fails."""
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
    except BaseException as error:  # encoding calls methods of foreign objects in the state
        state["error"] = state.get("error") or wrap(contained(error), HookError, "saving the state")
        state["reward"] = None
        plain = {key: state.get(key) for key in ("example_id", "task", "prompt", "answer", "error", "timing", "usage")}
        return to_record(plain, rollout=rollout)


def key_of(record: Record) -> tuple[Any, int]:
    """The key of a record: its example id and the index of its rollout."""
    return record["example_id"], record["rollout"]
