"""The weights of an environment's reward functions: by name, and by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

from verifiers.envs.env_group import EnvGroup
from verifiers.envs.environment import Environment
from verifiers.rubrics import RubricGroup
from verifiers.trainers.advantages import Estimator

Put = Callable[[list[float]], None]


def reward_weights(env: Any) -> dict[str, float]:
    """The weight of each reward function by name; if environments of a group differ, the largest by magnitude."""
    return {name: max(weights, key=abs) for name, weights in _weights(env).items()}


def check_weights(env: Any, estimator: Estimator) -> None:
    """Refuse a reward function name with several weights, if the estimator weights reward functions by name."""
    for name, weights in _weights(env).items():
        if estimator.needs_weights and len(weights) > 1:
            raise ValueError(
                f"advantage {estimator.name!r} weights reward functions by name, but {name!r} has the weights "
                f"{', '.join(f'{one:g}' for one in sorted(weights))} in environments of this group: rename one of them"
            )


def _weights(env: Any) -> dict[str, set[float]]:
    if env is None:
        return {}
    members = env.envs if isinstance(env, EnvGroup) else ()
    shares = [{name: {one} for name, one in env.rubric.reward_shares().items()}, *map(_weights, members)]
    return {name: set().union(*(one.get(name, ()) for one in shares)) for name in dict.fromkeys(chain(*shares))}


@contextmanager
def scheduled_weights(
    env: Environment | None, schedule: Callable[[float], Sequence[float]] | None, epochs: float
) -> Iterator[None]:
    """During the block, the environment's rubric has the weights of the schedule."""
    if env is None or schedule is None:
        yield
        return
    rubric, weights = env.rubric, [float(weight) for weight in schedule(epochs)]
    if isinstance(rubric, RubricGroup):
        before, put = rubric.get_group_weights(), cast("Put", rubric.set_group_weights)
    else:
        if len(weights) != len(rubric.weights):
            raise ValueError(f"weight_schedule must return {len(rubric.weights)} weights, got {len(weights)}")
        before, put = list(rubric.weights), lambda values: rubric.weights.__setitem__(slice(None), values)
    put(weights)
    try:
        yield
    finally:
        put(before)
