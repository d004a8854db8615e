"""Several rubrics → one score per rollout: the weighted sum of their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.score import Score
from verifiers.rubrics.signature import as_weight
from verifiers.types import RewardFunc, State


class RubricGroup(Rubric):
    """A weighted sum of rubrics.

    >>> def short(completion): return len(completion) < 10
    >>> def polite(completion): return "please" in completion
    >>> group = RubricGroup([Rubric([short]), Rubric([polite])])
    >>> group.set_group_weights([1.0, 0.5])
    >>> group.score_rollout_sync("", "please", "", {})
    {'short': 1.0, 'polite': 1.0, 'reward': 1.5}
    """

    def __init__(self, rubrics: Sequence[Rubric], weights: Sequence[float] | None = None, **kwargs: Any) -> None:
        if not rubrics:
            raise ValueError("RubricGroup needs at least one rubric")
        kwargs.setdefault("parser", rubrics[0].parser)
        if kwargs.get("funcs"):
            raise TypeError("RubricGroup takes rubrics, not funcs; put the functions into a Rubric")
        super().__init__(**kwargs)
        self.rubrics: list[Rubric] = list(rubrics)
        self._group_weights: list[float] = [1.0] * len(self.rubrics)
        if weights is not None:
            self.set_group_weights(weights)

    def get_group_weights(self) -> list[float]:
        """One weight per rubric."""
        return [*self._group_weights, *[1.0] * (len(self.rubrics) - len(self._group_weights))]

    def set_group_weights(self, weights: Sequence[float]) -> None:
        """Set one weight per rubric (rubrics that environments add for their own metrics may be left out)."""
        if not 0 < len(weights) <= len(self.rubrics):
            raise ValueError(f"{len(self.rubrics)} rubrics but {len(weights)} weights")
        self._group_weights = [as_weight(weight) for weight in weights]

    @property
    def has_group_rewards(self) -> bool:
        return self._own_group_scoring() is not None or any(rubric.has_group_rewards for rubric in self.rubrics)

    @property
    def is_empty(self) -> bool:
        is_own = self._own_scoring() is not None or self._own_group_scoring() is not None
        return not is_own and all(rubric.is_empty for rubric in self.rubrics)

    def _get_reward_func_names(self) -> list[str]:
        return [name for rubric in self.rubrics for name in rubric._get_reward_func_names()]

    def _get_reward_funcs(self) -> list[RewardFunc]:
        return [function for rubric in self.rubrics for function in rubric._get_reward_funcs()]

    def _get_reward_weights(self) -> list[float]:
        return [weight for rubric in self.rubrics for weight in rubric._get_reward_weights()]

    def reward_shares(self) -> dict[str, float]:
        shares: dict[str, float] = {}
        for rubric, weight in zip(self.rubrics, self.get_group_weights(), strict=True):
            for name, share in rubric.reward_shares().items():
                shares[name] = shares.get(name, 0.0) + weight * share
        return shares

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        """Functions added to a group go to its first rubric."""
        self.rubrics[0].add_reward_func(func, weight)

    def add_class_object(self, name: str, obj: Any) -> None:
        for rubric in self.rubrics:
            rubric.add_class_object(name, obj)

    def check_arguments(self) -> None:
        for rubric in self.rubrics:
            rubric.check_arguments()

    async def _score_by_functions(self, state: State) -> Score:
        total = Score()
        for rubric, weight in zip(self.rubrics, self.get_group_weights(), strict=True):
            total.add(await rubric.score_alone(state), weight)
            if total.error is not None:
                break
        return total

    async def _score_group_by_functions(self, states: Sequence[State]) -> list[Score]:
        totals = [Score() for _ in states]
        weights = self.get_group_weights()
        for rubric, weight in zip(self.rubrics, weights, strict=True):  # one at a time: some write into the states
            for total, score in zip(totals, await rubric.score_together(states), strict=True):
                total.add(score, weight)
        return totals
