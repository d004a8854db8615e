"""Many finished rollouts → scores, one function at a time, which is fast for functions that await nothing."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verifiers import calls
from verifiers.errors import Error, GraderError, message_of
from verifiers.rubrics.score import Score, grader_error, hand_back, one_each, state_from
from verifiers.rubrics.signature import Plan, as_score, column, default_of
from verifiers.signatures import signature_of
from verifiers.types import LARGEST_REWARD, LARGEST_SCORE, State

if TYPE_CHECKING:
    from verifiers.rubrics.rubric import Rubric

logger = logging.getLogger("verifiers.rubrics")


class Batch:
    """Rollouts to score: states, or columns of fields, from which states are built only if a function needs them."""

    def __init__(self, states: Sequence[State] | None = None, **columns: Sequence[Any] | None) -> None:
        self._states = states
        self._columns = columns
        self._n = len(columns["prompt"] or ()) if states is None else len(states)
        for name, values in columns.items():
            if values is not None and len(values) != self._n:
                raise ValueError(f"{self._n} prompts but {len(values)} {name}s")
        given = columns.get("state")
        if given is not None and any(isinstance(state, State) for state in given):
            _ = self.states  # states of rollouts, which contain more than the columns

    def __len__(self) -> int:
        return self._n

    @property
    def states(self) -> Sequence[State]:
        if self._states is None:
            blank = [None] * self._n
            names = ("prompt", "completion", "answer", "state", "task", "info")
            columns = [values if (values := self._columns[name]) is not None else blank for name in names]
            self._states = [_state_of(*row) for row in zip(*columns, strict=True)]
        return self._states

    def column(self, name: str) -> Sequence[Any]:
        """One field of every rollout."""
        if self._states is not None or name == "state":
            return column(self.states, name)
        values = self._columns[name]
        if values is None:
            return [default_of(name) for _ in range(self._n)]
        return [default_of(name) if value is None else value for value in values]

    def hand_back(self) -> None:
        """Copy what functions wrote into copies of the caller's states back into those states."""
        given = self._columns.get("state")
        if given is not None and self._states is not None:
            for state, mapping in zip(self._states, given, strict=True):
                hand_back(state, mapping)


@dataclass(slots=True)
class Scores:
    """The scores of a batch as columns, and errors by index for rollouts that could not be scored."""

    rewards: list[float]
    metrics: dict[str, list[float | None]] = field(default_factory=dict)
    errors: dict[int, Error] = field(default_factory=dict)

    @classmethod
    def of(cls, scores: Sequence[Score]) -> Scores:
        names = dict.fromkeys(name for score in scores for name in score.metrics)
        metrics: dict[str, list[float | None]] = {name: [score.metrics.get(name) for score in scores] for name in names}
        errors = {i: score.error for i, score in enumerate(scores) if score.error is not None}
        return cls([score.reward for score in scores], metrics, errors)

    def add(self, name: str, weight: float, values: Sequence[float | Error]) -> None:
        self.metrics[name] = [None if isinstance(value, Error) else value for value in values]
        for i, value in enumerate(values):
            if isinstance(value, Error):
                self.errors.setdefault(i, value)
            else:
                self.rewards[i] += weight * value

    def check(self) -> None:
        """Replace rewards that are too large or not finite by errors."""
        for i, reward in enumerate(self.rewards):
            if not -LARGEST_REWARD <= reward <= LARGEST_REWARD and i not in self.errors:
                score = Score(reward)
                score.check()
                self.errors[i] = score.error or GraderError(f"the reward is {reward}")

    def one(self, i: int) -> Score:
        metrics = {name: value for name, values in self.metrics.items() if (value := values[i]) is not None}
        return Score(self.rewards[i], metrics, self.errors.get(i))

    def columns(self) -> dict[str, list[float | None]]:
        """A column per function, and the rewards, which are None if scoring failed."""
        rewards: list[float | None] = [*self.rewards]
        for i in self.errors:
            rewards[i] = None
        return {**self.metrics, "reward": rewards}


def _state_of(prompt: Any, completion: Any, answer: Any, given: Any, task: Any, info: Any) -> State:
    if isinstance(given, State) and "input" in given:
        return state_from(prompt, completion, answer, given)
    row = {"prompt": prompt, "answer": "" if answer is None else answer, "task": "default" if task is None else task}
    row |= {"info": {} if info is None else info, "example_id": 0}
    return State({"trajectory": [], **(given or {}), "input": row, "completion": completion})


async def score_batch(rubric: Rubric, batch: Batch) -> Scores:
    """Score rollouts that need not be of one group. Group rewards get the whole batch."""
    if rubric.scores_its_own_way:
        one_by_one = list(await asyncio.gather(*(rubric.score_alone(state) for state in batch.states)))
        await rubric.add_group_scores(batch.states, one_by_one)
        scores = Scores.of(one_by_one)
    else:
        scores = Scores([0.0] * len(batch))
        for name, plan, weight in rubric._named():
            if not plan.is_group:
                scores.add(name, weight, await _score_column(rubric, plan, batch))
        if rubric.has_group_rewards:
            alone = [scores.one(i) for i in range(len(batch))]
            await rubric.add_group_scores(batch.states, alone)
            scores = Scores.of(alone)
    scores.check()
    batch.hand_back()
    for i, error in sorted(scores.errors.items()):
        logger.error("rollout %d of the batch could not be scored: %s", i, error)
    return scores


async def _score_column(rubric: Rubric, plan: Plan, batch: Batch) -> list[float | Error]:
    if plan.vectorized is not None:
        columns = [batch.column(name) for name in ("prompt", "completion", "answer", "state")]
        try:
            values = await calls.Hook(plan.vectorized, timeout_s=plan.hook.limit_s)(*columns)
            return one_each(values, len(batch), plan)
        except BaseException as error:  # foreign code
            return [grader_error(calls.contained(error), plan)] * len(batch)
    scores: list[float | Error] = []
    if not (plan.hook.is_async or plan.is_cpu_bound):
        try:
            scores = await _score_while_quick(rubric, plan, batch)
        except _MainThreadOnlyError:
            plan.hook.is_main_only = True
            return [await _score_awaited(rubric, plan, state) for state in batch.states]
    if len(scores) == len(batch):
        return scores
    left = batch.states[len(scores) :]
    return [*scores, *await asyncio.gather(*(_score_awaited(rubric, plan, state) for state in left))]


async def _score_awaited(rubric: Rubric, plan: Plan, state: State) -> float | Error:
    try:
        return as_score(await rubric._invoke(plan, plan.arguments(state, rubric.class_objects)), plan.name)
    except BaseException as error:  # foreign code
        return grader_error(calls.contained(error), plan)


async def _score_while_quick(rubric: Rubric, plan: Plan, batch: Batch) -> list[float | Error]:
    """The scores of the first rollouts, computed in one thread: of all rollouts unless the function is slow."""
    objects = rubric.class_objects
    n = len(batch)
    columns = [[objects[name]] * n if name in objects else batch.column(name) for name in plan.args]
    scores: list[float | Error] = []
    size = 1
    while (start := len(scores)) < n:
        stop = min(start + size, n)
        part = [values[start:stop] for values in columns]
        began = time.perf_counter()
        scored = await _Part(plan, part, stop - start).finish()
        scores += scored
        if len(scored) < stop - start or time.perf_counter() - began > (stop - start) * calls.QUICK_S:
            break
        size *= 2
    return scores


class _Part:
    """Some rollouts of a batch, scored one after the other in a thread. A call that exceeds its limit ends it."""

    def __init__(self, plan: Plan, columns: Sequence[Sequence[Any]], n: int) -> None:
        self.plan = plan
        self.columns = columns
        self.n = n
        self.scores: list[float | Error] = []

    async def finish(self) -> list[float | Error]:
        """The scores: all of them, or those up to the call that exceeded its limit, and its error."""
        scoring = calls.in_thread(self._score)
        limit_s = self.plan.hook.limit_s
        before = -1
        while not scoring.done():
            done, _ = await asyncio.wait((scoring,), timeout=limit_s)
            if not done and len(self.scores) == before:
                self.scores, scored = [], self.scores  # the thread may continue, but its results are ignored
                late = calls.TimeLimitError(f"it did not return within {limit_s:g} s")
                return [*scored[:before], grader_error(late, self.plan)]
            before = len(self.scores)
        scoring.result()
        return self.scores

    def _score(self) -> None:
        plan, scores = self.plan, self.scores
        call = _by_position(plan)
        for values in zip(*self.columns, strict=True) if self.columns else [()] * self.n:
            try:
                value = call(*values)
                if type(value) is float and -LARGEST_SCORE <= value <= LARGEST_SCORE:
                    scores.append(value)
                    continue
                if inspect.isawaitable(value):
                    value = calls.run(functools.partial(_awaited, value))
                scores.append(as_score(value, plan.name))
            except BaseException as raised:  # foreign code
                error = calls.contained(raised)
                if "signal only works in main thread" in f"{message_of(error)}{error.__cause__!r}":
                    raise _MainThreadOnlyError from error
                scores.append(grader_error(error, plan))


def _by_position(plan: Plan) -> Callable[..., Any]:
    """The function as one that takes the values of its arguments by position."""
    function: Callable[..., Any] = plan.function
    parameters = list(signature_of(function).parameters.values())[: len(plan.args)]
    plain = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if not plan.takes_all and plain == list(plan.args):
        return function
    return lambda *values: function(**dict(zip(plan.args, values, strict=True)))


class _MainThreadOnlyError(Exception):
    """A reward function sets signal handlers (SIGALRM, for its own timeout), which works only in the main thread."""


async def _awaited(value: Any) -> Any:
    return await value


def from_columns(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answers: Sequence[Any] | None,
    states: Sequence[Mapping[str, Any]] | None,
    tasks: Sequence[Any] | None,
    infos: Sequence[Any] | None,
) -> Batch:
    """A batch from the columns passed to ``score_rollouts``."""
    return Batch(prompt=prompts, completion=completions, answer=answers, state=states, task=tasks, info=infos)
