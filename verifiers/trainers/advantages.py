"""Rewards of rollouts become advantages: how much better each rollout was than its baseline.

An estimator is a function whose parameters name what it needs (`INPUTS`). For each rollout it returns a number, a list
of numbers (one for each turn or each sampled token), or None if the rollout should not be trained on. It is called once
for each group, or once for the whole batch if it has a parameter ``groups``. `GRPOTrainer(advantage=...)` takes a
function of your own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from verifiers.rubrics.signature import name_of
from verifiers.stats.scores import centered
from verifiers.trainers.functions import CallByName

INPUTS = {
    "rewards": "of the rollouts of a group",
    "states": "of the same rollouts",
    "groups": "the group number of each rollout; with it, the function is called once with the whole batch",
    "weights": "of the rubric's reward functions, by name",
    "gather": "a function: list of this process → joined lists of all processes; needs groups",
}

Advantage = float | Sequence[float] | None
Gather = Callable[[list[Any]], list[Any]]


# --- the built-in ones --------------------------------------------------------------------------------------------


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """Rewards minus their mean.

    >>> dr_grpo([1.0, 0.0])
    [0.5, -0.5]
    """
    return centered(rewards)


def grpo(rewards: Sequence[float]) -> list[float]:
    """Rewards minus their mean, divided by their standard deviation.

    >>> grpo([3.0, 1.0])
    [1.0, -1.0]
    """
    found = centered(rewards)
    std = population_std(rewards)
    return [one / std for one in found] if any(found) else found


def grpo_batch(rewards: Sequence[float], groups: Sequence[int], gather: Gather) -> list[float]:
    """Rewards minus the mean of their group, divided by the standard deviation of all rewards of the batch.

    >>> grpo_batch([7.0, 1.0, -1.0, -7.0], [0, 0, 1, 1], list)
    [0.6, -0.6, 0.6, -0.6]
    """
    everyone = gather(list(rewards))
    found = _by_group(centered, groups, rewards)
    std = population_std(everyone)
    return [one / std for one in found] if any(centered(everyone)) else found


def rloo(rewards: Sequence[float]) -> list[float]:
    """Each reward minus the mean of the others (REINFORCE leave-one-out).

    >>> rloo([1.0, 0.0, 0.0])
    [1.0, -0.5, -0.5]
    """
    n = len(rewards)
    return [one * n / (n - 1) for one in centered(rewards)] if n > 1 else [0.0] * n


def reinforce_plus_plus(rewards: Sequence[float], groups: Sequence[int], gather: Gather) -> list[float]:
    """Rewards normalised over the batch. Groups are not used, so that a group without variance is trained on too.

    >>> reinforce_plus_plus([3.0, 3.0, 1.0, 1.0], [0, 0, 1, 1], list)
    [1.0, 1.0, -1.0, -1.0]
    """
    return _normalised(list(rewards), gather)


def reinforce_plus_plus_baseline(rewards: Sequence[float], groups: Sequence[int], gather: Gather) -> list[float]:
    """Rewards minus the mean of their group, then normalised over the batch.

    >>> reinforce_plus_plus_baseline([14.0, 0.0, 2.0, 0.0], [0, 0, 1, 1], list)
    [1.4, -1.4, 0.2, -0.2]
    """
    return _normalised(_by_group(centered, groups, rewards), gather)


def gdpo(
    states: Sequence[Mapping[str, Any]], groups: Sequence[int], weights: Mapping[str, float], gather: Gather
) -> list[float]:
    """The values of each reward function normalised within the group, then their weighted sum over the batch.

    A reward function with small differences thus counts as much as one with large differences.

    >>> states = [{"metrics": {"right": 1.0, "short": 0.1}}, {"metrics": {"right": 0.0, "short": 0.2}}]
    >>> gdpo(states, [0, 0], {"right": 1.0, "short": 0.5}, list)
    [1.0, -1.0]
    """
    total = [0.0] * len(states)
    known = {name for state in states for name in state.get("metrics") or {}}
    if states and not any(weight and name in known for name, weight in weights.items()):
        raise ValueError(
            f"gdpo weights each reward function, but none of the weights {dict(weights)} is for one of the metrics of "
            f"these rollouts, {sorted(known)}; pass env= with the rubric that scored them, or use another advantage"
        )
    for name, weight in weights.items():
        scored = [i for i, state in enumerate(states) if weight and name in (state.get("metrics") or {})]
        values = [float(states[i]["metrics"][name]) for i in scored]
        for i, one in zip(scored, _by_group(grpo, [groups[i] for i in scored], values), strict=True):
            total[i] += weight * one
    return _normalised(total, gather)


def per_turn(rewards: Sequence[float], states: Sequence[Mapping[str, Any]]) -> list[list[float] | float]:
    """The reward of each turn minus the mean reward of that turn over the rollouts of the group that reached it.

    An environment sets the reward of a turn during the rollout (``state["trajectory"][-1]["reward"] = …``). A turn
    without one has the reward of its rollout. A rollout that was saved without its turns is compared as a whole.

    >>> turns = [{"trajectory": [{"reward": 1.0}, {"reward": 0.0}]}, {"trajectory": [{"reward": 0.0}]}]
    >>> per_turn([0.5, 0.0], turns)
    [[0.5, 0.0], [-0.5]]
    """
    rewards_GT = [
        [reward if step.get("reward") is None else float(step["reward"]) for step in state.get("trajectory") or ()]
        for reward, state in zip(rewards, states, strict=True)
    ]
    found: list[list[float]] = [[] for _ in rewards_GT]
    for turn in range(max(map(len, rewards_GT), default=0)):
        reached = [i for i, turns in enumerate(rewards_GT) if len(turns) > turn]
        for i, advantage in zip(reached, centered([rewards_GT[i][turn] for i in reached]), strict=True):
            found[i].append(advantage)
    return [turns or whole for turns, whole in zip(found, centered(rewards), strict=True)]


ESTIMATORS: dict[str, Callable[..., Any]] = {
    one.__name__: one
    for one in (grpo, dr_grpo, grpo_batch, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, gdpo, per_turn)
}
SCALES = {"none": "dr_grpo", "std": "grpo", "group": "grpo", "batch": "grpo_batch"}  # names of `scale_rewards`


# --- any of them --------------------------------------------------------------------------------------------------


class Estimator:
    """Calls an estimator, which is the name of a built-in one or a function, on a batch and checks the result.

    >>> Estimator("rloo")([1.0, 0.0, None, 5.0, 7.0], [0, 0, 0, 1, 1])
    [1.0, -1.0, None, -2.0, 2.0]
    """

    def __init__(self, given: str | Callable[..., Any]) -> None:
        if isinstance(given, str) and given not in ESTIMATORS:
            raise ValueError(f"unknown advantage {given!r}; use one of {', '.join(ESTIMATORS)}, or a function")
        function = ESTIMATORS[given] if isinstance(given, str) else given
        self.name = name_of(function)
        self._call = CallByName(function, INPUTS, what="advantage", first="rewards")
        if "gather" in self._call.wanted and "groups" not in self._call.wanted:
            raise TypeError(
                f"advantage {self.name!r} has a parameter gather but none named groups: it would be called once for "
                "each group, and processes with fewer groups would leave the others waiting forever; add groups"
            )

    @property
    def needs_weights(self) -> bool:
        return "weights" in self._call.wanted

    def __call__(
        self,
        rewards: Sequence[float | None],
        groups: Sequence[int],
        states: Sequence[Mapping[str, Any] | None] | None = None,
        *,
        weights: Mapping[str, float] | None = None,
        gather: Gather = list,
    ) -> list[Advantage]:
        """The advantages of a batch; failed rollouts (reward None) are left out and get None."""
        states = [None] * len(rewards) if states is None else states
        scored = [i for i, reward in enumerate(rewards) if reward is not None]
        if "states" in self._call.wanted and any(states[i] is None for i in scored):
            raise ValueError(
                f"advantage {self.name!r} needs the states of rollouts, but this batch has completions without a state"
            )
        is_whole = "groups" in self._call.wanted
        found: list[Advantage] = [None] * len(rewards)
        if not scored and "gather" not in self._call.wanted:  # a collective must be called in every process
            return found
        for indices in [scored] if is_whole else members(scored, groups):
            mine = [rewards[i] for i in indices]
            what = f"{len(mine)} rollouts of a {'batch' if is_whole else 'group'}"
            values = self._call(
                rewards=list(mine),
                states=[states[i] for i in indices],
                groups=[groups[i] for i in indices],
                weights=weights or {},
                gather=gather,
            )
            given = checked(values, mine, whose=f"advantage {self.name!r}", what=what)
            for i, value in zip(indices, given, strict=True):
                found[i] = value
        return found


def checked(values: Any, rewards: Sequence[Any], *, whose: str, what: str) -> list[Advantage]:
    """Advantages as floats or lists of floats, one for each reward; ``whose`` and ``what`` are for error messages."""
    try:
        found = [_plain(one) for one in as_ordered(values)]
    except (TypeError, ValueError):
        raise ValueError(
            f"{whose}: {values!r:.80} is not a list with one entry for each of {what}; an entry is a number, or a list "
            "with one number for each turn or each sampled token"
        ) from None
    if len(found) != len(rewards):
        raise ValueError(f"{whose}: got {len(found)} values for {what}; expected one for each")
    for one, reward in zip(found, rewards, strict=True):
        numbers = [] if one is None else [one] if isinstance(one, float) else one
        if not all(map(math.isfinite, numbers)):
            raise ValueError(
                f"{whose}: got {one} for a rollout with reward {reward!r}; an advantage must be a finite number "
                "(None excludes the rollout from training)"
            )
    return found


def as_ordered(values: Any) -> Any:
    """The values themselves; TypeError for iterables that cannot be a list of numbers: a dict, a string, a set.

    >>> as_ordered({0: 1.0})
    Traceback (most recent call last):
    ...
    TypeError: a dict is no list
    """
    if isinstance(values, (str, bytes, Mapping, Set)):
        raise TypeError(f"a {type(values).__name__} is no list")
    return values


def mean_advantage(advantage: Advantage) -> float | None:
    """The advantage of a rollout as one number: the mean over its turns or tokens.

    >>> mean_advantage([1.0, 0.0]), mean_advantage(0.5), mean_advantage(None)
    (0.5, 0.5, None)
    """
    if advantage is None or isinstance(advantage, (int, float)):
        return advantage
    return math.fsum(advantage) / max(len(advantage), 1)


def flat_groups(rewards: Sequence[float | None], groups: Sequence[int]) -> set[int]:
    """Groups without a gradient, as their rewards have no variance: all equal, or fewer than two that are not None.

    >>> flat_groups([1.0, 1.0, 0.0, 1.0, None, 1.0], [0, 0, 1, 1, 2, 2])
    {0, 2}
    """
    scored = {i: reward for i, reward in enumerate(rewards) if reward is not None}
    varied = {groups[one[0]] for one in members(scored, groups) if any(centered([scored[i] for i in one]))}
    return set(groups) - varied


# --- arithmetic ---------------------------------------------------------------------------------------------------


def population_std(values: Sequence[float]) -> float:
    n = max(len(values), 1)
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((one - mean) ** 2 for one in values) / n)


def _normalised(values: list[float], gather: Gather) -> list[float]:
    """Values minus the mean, divided by the standard deviation, both over all processes; 0 without variance."""
    everyone = gather(values)
    if not any(centered(everyone)):
        return [0.0] * len(values)
    mean, std = math.fsum(everyone) / len(everyone), population_std(everyone)
    return [(one - mean) / std for one in values]


def _by_group(
    function: Callable[[list[float]], list[float]], groups: Sequence[int], values: Sequence[float]
) -> list[float]:
    found = [0.0] * len(values)
    for indices in members(range(len(values)), groups):
        for i, one in zip(indices, function([values[i] for i in indices]), strict=True):
            found[i] = one
    return found


def members(indices: Iterable[int], groups: Sequence[int]) -> list[list[int]]:
    """The indices of each group's rollouts; groups are in order of first appearance."""
    found: dict[int, list[int]] = {}
    for i in indices:
        found.setdefault(groups[i], []).append(i)
    return list(found.values())


def _plain(value: Any) -> Advantage:
    """A float, a list of floats, or None, from a number, a list, an array or a tensor."""
    if value is None:
        return None
    value = value.tolist() if hasattr(value, "tolist") else value
    return [float(one) for one in value] if isinstance(value, (list, tuple)) else float(value)
