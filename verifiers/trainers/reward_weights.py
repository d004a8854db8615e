"""The weights of an environment's reward functions: by name, and by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from verifiers.envs.env_group import EnvGroup
from verifiers.envs.environment import Environment
from verifiers.rubrics import RubricGroup

Put = Callable[[list[float]], None]


def reward_weights(env: Any) -> dict[str, float]:
    """The weight of each reward function, by name."""
    if env is None:
        return {}
    if isinstance(env, EnvGroup):
        return {name: weight for one in env.envs for name, weight in reward_weights(one).items()}
    rubric = env.rubric
    return dict(zip(rubric._get_reward_func_names(), rubric._get_reward_weights(), strict=True))


@contextmanager
def scheduled_weights(
    env: Environment | None, schedule: Callable[[float], Sequence[float]] | None, epochs: float
) -> Iterator[None]:
    """Within the block the environment's rubric has the weights of the schedule."""
    if env is None or schedule is None:
        yield
        return
    rubric, weights = env.rubric, [float(weight) for weight in schedule(epochs)]
    if isinstance(rubric, RubricGroup):
        before, put = rubric.get_group_weights(), cast("Put", rubric.set_group_weights)
    else:
        if len(weights) != len(rubric.weights):
            raise ValueError(f"{len(rubric.weights)} reward functions but {len(weights)} weights from weight_schedule")
        before, put = list(rubric.weights), lambda values: rubric.weights.__setitem__(slice(None), values)
    put(weights)
    try:
        yield
    finally:
        put(before)
