"""Many finished rollouts become scores, function by function: the quick way when nothing has to be awaited."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verifiers import calls
from verifiers.errors import Error
from verifiers.rubrics.score import Score, grader_error, one_each, state_from
from verifiers.rubrics.signature import Plan, as_score, column
from verifiers.types import State

if TYPE_CHECKING:
    from verifiers.rubrics.rubric import Rubric

logger = logging.getLogger("verifiers.rubrics")


def states_from_columns(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answers: Sequence[Any] | None,
    states: Sequence[Mapping[str, Any]] | None,
    tasks: Sequence[Any] | None,
    infos: Sequence[Any] | None,
) -> list[State]:
    """Columns of equal length as states."""
    n = len(prompts)
    given = {"completions": completions, "answers": answers, "states": states, "tasks": tasks, "infos": infos}
    for name, values in given.items():
        if values is not None and len(values) != n:
            raise ValueError(f"{n} prompts but {len(values)} {name}")
    return [
        state_from(
            prompts[i],
            completions[i],
            answers[i] if answers is not None else "",
            states[i] if states is not None else None,
            tasks[i] if tasks is not None else "default",
            infos[i] if infos is not None else None,
        )
        for i in range(n)
    ]


async def score_batch(rubric: Rubric, states: Sequence[State]) -> list[Score]:
    """Score states that need not belong together; rewards over a whole group see the whole batch."""
    if rubric.scores_its_own_way:
        scores = list(await asyncio.gather(*(rubric.score_alone(state) for state in states)))
    else:
        scores = [Score() for _ in states]
        for name, plan, weight in rubric._named():
            if not plan.is_group:
                _add_column(scores, name, weight, await _score_column(rubric, plan, states))
    await rubric.add_group_scores(states, scores)
    for i, score in enumerate(scores):
        if score.error is not None:
            logger.error("rollout %d of the batch could not be scored: %s", i, score.error)
    return scores


async def _score_column(rubric: Rubric, plan: Plan, states: Sequence[State]) -> list[float | Error]:
    if plan.vectorized is not None:
        columns = [column(states, name) for name in ("prompt", "completion", "answer", "state")]
        try:
            values = await calls.Hook(plan.vectorized, timeout_s=plan.hook.timeout_s)(*columns)
            return list(one_each(values, len(states), plan))
        except Exception as error:  # foreign code
            return [grader_error(error, plan)] * len(states)
    if plan.hook.is_async or plan.is_cpu_bound:
        return list(await asyncio.gather(*(_score_awaited(rubric, plan, state) for state in states)))
    try:
        scores = await _score_while_quick(rubric, plan, states)
    except _MainThreadOnlyError:
        plan.hook.is_inline = plan.hook.is_pinned = True
        return [await _score_awaited(rubric, plan, state) for state in states]
    slow = states[len(scores) :]
    return [*scores, *await asyncio.gather(*(_score_awaited(rubric, plan, state) for state in slow))]


async def _score_while_quick(rubric: Rubric, plan: Plan, states: Sequence[State]) -> list[float | Error]:
    """The scores of the first states, in one thread; all of them unless the function turns out to be slow."""
    scores: list[float | Error] = []
    n = 1
    while part := states[len(scores) : len(scores) + n]:
        began = time.perf_counter()
        scores += await calls.in_thread(functools.partial(_score_plain, rubric, plan, part))
        if time.perf_counter() - began > len(part) * calls.QUICK_S:
            break
        n *= 2
    return scores


async def _score_awaited(rubric: Rubric, plan: Plan, state: State) -> float | Error:
    try:
        return as_score(await rubric._invoke(plan, plan.arguments(state, rubric.class_objects)), plan.name)
    except Exception as error:  # foreign code
        return grader_error(error, plan)


def _score_plain(rubric: Rubric, plan: Plan, states: Sequence[State]) -> list[float | Error]:
    function: Callable[..., Any] = plan.function
    n = len(states)
    objects = rubric.class_objects
    columns = [[objects[name]] * n if name in objects else column(states, name) for name in plan.args]
    scores: list[float | Error] = []
    for values in zip(*columns, strict=True) if columns else [()] * n:
        try:
            value = function(**dict(zip(plan.args, values, strict=True)))
            if type(value) is float and value - value == 0.0:
                scores.append(value)
                continue
            if inspect.isawaitable(value):
                value = calls.run(functools.partial(_awaited, value))
            scores.append(as_score(value, plan.name))
        except Exception as error:  # foreign code
            if "signal only works in main thread" in f"{error}{error.__cause__}":
                raise _MainThreadOnlyError from error
            scores.append(grader_error(error, plan))
    return scores


class _MainThreadOnlyError(Exception):
    """A reward function sets signals (SIGALRM, for a limit of its own), which only the main thread can."""


async def _awaited(value: Any) -> Any:
    return await value


def _add_column(scores: Sequence[Score], name: str, weight: float, values: Sequence[float | Error]) -> None:
    for score, value in zip(scores, values, strict=True):
        if isinstance(value, Error):
            score.error = score.error or value
        else:
            score.metrics[name] = value
            score.reward += weight * value
