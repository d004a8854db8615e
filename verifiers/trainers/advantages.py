"""Rewards of rollouts become advantages: how much better each was than what could be expected of it.

An estimator is a function that asks by name for what it needs (`INPUTS`) and returns, for each rollout, one number; or
one for each of its turns, or for each token that was sampled; or None, and the rollout does not train. It is called
with each group, or with the whole batch if it asks for ``groups``. `GRPOTrainer(advantage=...)` takes one of your own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from verifiers.rubrics.signature import name_of
from verifiers.stats.scores import centered
from verifiers.trainers.functions import Named

INPUTS = {
    "rewards": "of the rollouts of a group",
    "states": "of the same rollouts",
    "groups": "which group each rollout is of; asking for it means the whole batch in one call",
    "weights": "of the rubric's reward functions, by name",
    "gather": "a function: a list of this process → that of all processes; it goes with groups",
}

Advantage = float | Sequence[float] | None
Gather = Callable[[list[Any]], list[Any]]


# --- the built-in ones --------------------------------------------------------------------------------------------


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """Rewards less their mean.

    >>> dr_grpo([1.0, 0.0])
    [0.5, -0.5]
    """
    return centered(rewards)


def grpo(rewards: Sequence[float]) -> list[float]:
    """Rewards less their mean, over their standard deviation.

    >>> grpo([3.0, 1.0])
    [1.0, -1.0]
    """
    found = centered(rewards)
    std = _std(rewards)
    return [one / std for one in found] if any(found) else found


def grpo_batch(rewards: Sequence[float], groups: Sequence[int], gather: Gather) -> list[float]:
    """Rewards less the mean of their group, over the standard deviation of all rewards of the batch.

    >>> grpo_batch([7.0, 1.0, -1.0, -7.0], [0, 0, 1, 1], list)
    [0.6, -0.6, 0.6, -0.6]
    """
    everyone = gather(list(rewards))
    found = _by_group(centered, groups, rewards)
    std = _std(everyone)
    return [one / std for one in found] if any(centered(everyone)) else found


def rloo(rewards: Sequence[float]) -> list[float]:
    """Each reward less the mean of the others (REINFORCE, leave one out).

    >>> rloo([1.0, 0.0, 0.0])
    [1.0, -0.5, -0.5]
    """
    n = len(rewards)
    return [one * n / (n - 1) for one in centered(rewards)] if n > 1 else [0.0] * n


def reinforce_plus_plus(rewards: Sequence[float], groups: Sequence[int], gather: Gather) -> list[float]:
    """Rewards normalised over the batch: no group is needed, and one that always scores the same teaches, too.

    >>> reinforce_plus_plus([3.0, 3.0, 1.0, 1.0], [0, 0, 1, 1], list)
    [1.0, 1.0, -1.0, -1.0]
    """
    return _normalised(list(rewards), gather)


def reinforce_plus_plus_baseline(rewards: Sequence[float], groups: Sequence[int], gather: Gather) -> list[float]:
    """Rewards less the mean of their group, then normalised over the batch.

    >>> reinforce_plus_plus_baseline([14.0, 0.0, 2.0, 0.0], [0, 0, 1, 1], list)
    [1.4, -1.4, 0.2, -0.2]
    """
    return _normalised(_by_group(centered, groups, rewards), gather)


def gdpo(
    states: Sequence[Mapping[str, Any]], groups: Sequence[int], weights: Mapping[str, float], gather: Gather
) -> list[float]:
    """Each reward function is normalised in its group, then they are weighted, added up and normalised over the batch.

    So a function whose values lie close together counts as much as one whose values lie far apart.

    >>> states = [{"metrics": {"right": 1.0, "short": 0.1}}, {"metrics": {"right": 0.0, "short": 0.2}}]
    >>> gdpo(states, [0, 0], {"right": 1.0, "short": 0.5}, list)
    [1.0, -1.0]
    """
    total = [0.0] * len(states)
    for name, weight in weights.items():
        there = [i for i, state in enumerate(states) if weight and name in (state.get("metrics") or {})]
        values = [float(states[i]["metrics"][name]) for i in there]
        for i, one in zip(there, _by_group(grpo, [groups[i] for i in there], values), strict=True):
            total[i] += weight * one
    return _normalised(total, gather)


def per_turn(rewards: Sequence[float], states: Sequence[Mapping[str, Any]]) -> list[list[float] | float]:
    """The reward of each turn less the mean of that turn's in the group, over the rollouts that got so far.

    An environment writes it as it goes (``state["trajectory"][-1]["reward"] = …``); a turn without one has that of the
    rollout. A rollout that was saved without its turns is compared as a whole.

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
        there = [i for i, turns in enumerate(rewards_GT) if len(turns) > turn]
        for i, advantage in zip(there, centered([rewards_GT[i][turn] for i in there]), strict=True):
            found[i].append(advantage)
    return [turns or whole for turns, whole in zip(found, centered(rewards), strict=True)]


ESTIMATORS: dict[str, Callable[..., Any]] = {
    one.__name__: one
    for one in (grpo, dr_grpo, grpo_batch, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, gdpo, per_turn)
}
SCALES = {"none": "dr_grpo", "std": "grpo", "group": "grpo", "batch": "grpo_batch"}  # names of `scale_rewards`


# --- any of them --------------------------------------------------------------------------------------------------


class Estimator:
    """A function or the name of a built-in one, ready to be called with a batch, and checked in what it gives.

    >>> Estimator("rloo")([1.0, 0.0, None, 5.0, 7.0], [0, 0, 0, 1, 1])
    [1.0, -1.0, None, -2.0, 2.0]
    """

    def __init__(self, given: str | Callable[..., Any]) -> None:
        if isinstance(given, str) and given not in ESTIMATORS:
            raise ValueError(f"there is no advantage {given!r}; take one of {', '.join(ESTIMATORS)}, or a function")
        function = ESTIMATORS[given] if isinstance(given, str) else given
        self.name = name_of(function)
        self._call = Named(function, INPUTS, what="advantage", first="rewards")
        if "gather" in self._call.wanted and "groups" not in self._call.wanted:
            raise TypeError(
                f"advantage {self.name!r} asks for gather and not for groups: it would be called once for each group, "
                "and processes that have fewer of them would be waited for without end; ask for groups, too"
            )

    def __call__(
        self,
        rewards: Sequence[float | None],
        groups: Sequence[int],
        states: Sequence[Mapping[str, Any] | None] | None = None,
        *,
        weights: Mapping[str, float] | None = None,
        gather: Gather = list,
    ) -> list[Advantage]:
        """The advantages of a batch; a failed rollout (a reward of None) neither counts nor gets one."""
        states = [None] * len(rewards) if states is None else states
        scored = [i for i, reward in enumerate(rewards) if reward is not None]
        if "states" in self._call.wanted and any(states[i] is None for i in scored):
            raise ValueError(
                f"advantage {self.name!r} asks for the states of rollouts, and this batch has texts without them"
            )
        is_whole = "groups" in self._call.wanted
        found: list[Advantage] = [None] * len(rewards)
        members = [scored] if is_whole else _members(scored, groups)
        if not scored and "gather" not in self._call.wanted:  # what gathers must be called in every process
            return found
        for places in members:
            mine = [rewards[i] for i in places]
            what = f"{len(mine)} rollouts of a {'batch' if is_whole else 'group'}"
            values = self._call(
                rewards=list(mine),
                states=[states[i] for i in places],
                groups=[groups[i] for i in places],
                weights=weights or {},
                gather=gather,
            )
            given = checked(values, mine, whose=f"advantage {self.name!r}", what=what)
            for i, value in zip(places, given, strict=True):
                found[i] = value
        return found


def checked(values: Any, rewards: Sequence[Any], *, whose: str, what: str) -> list[Advantage]:
    """Advantages as plain numbers or lists of them, one for each reward; ``whose`` and ``what`` are for the errors."""
    try:
        found = [_plain(one) for one in in_order(values)]
    except (TypeError, ValueError):
        raise ValueError(
            f"{whose} gave {values!r:.80}; it gives a list: a number for each of {what}, "
            "or one for each of its turns or sampled tokens"
        ) from None
    if len(found) != len(rewards):
        raise ValueError(f"{whose} gave {len(found)} values for {what}; it gives one for each")
    for one, reward in zip(found, rewards, strict=True):
        numbers = [] if one is None else [one] if isinstance(one, float) else one
        if not all(map(math.isfinite, numbers)):
            raise ValueError(
                f"{whose} gave {one} for a rollout with reward {reward!r}; an advantage is a finite number "
                "(None: this rollout does not train)"
            )
    return found


def in_order(values: Any) -> Any:
    """The values themselves; TypeError for what would be taken apart into something else: a dict, a text, a set.

    >>> in_order({0: 1.0})
    Traceback (most recent call last):
    ...
    TypeError: a dict is no list
    """
    if isinstance(values, (str, bytes, Mapping, Set)):
        raise TypeError(f"a {type(values).__name__} is no list")
    return values


def mean_advantage(advantage: Advantage) -> float | None:
    """One number for a rollout that may have one for each turn or token.

    >>> mean_advantage([1.0, 0.0]), mean_advantage(0.5), mean_advantage(None)
    (0.5, 0.5, None)
    """
    if advantage is None or isinstance(advantage, (int, float)):
        return advantage
    return math.fsum(advantage) / max(len(advantage), 1)


def flat_groups(rewards: Sequence[float | None], groups: Sequence[int]) -> set[int]:
    """Groups whose valid rewards are all the same, or fewer than two: nothing can be learned from them.

    >>> flat_groups([1.0, 1.0, 0.0, 1.0, None, 1.0], [0, 0, 1, 1, 2, 2])
    {0, 2}
    """
    values: dict[int, list[float]] = {group: [] for group in groups}
    for reward, group in zip(rewards, groups, strict=True):
        if reward is not None:
            values[group].append(reward)
    return {group for group, found in values.items() if not any(centered(found))}


# --- arithmetic ---------------------------------------------------------------------------------------------------


def _std(values: Sequence[float]) -> float:
    """The standard deviation of a population."""
    n = max(len(values), 1)
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((one - mean) ** 2 for one in values) / n)


def _normalised(values: list[float], gather: Gather) -> list[float]:
    """Values less the mean of those of all processes, over their standard deviation; 0 where these are all alike."""
    everyone = gather(values)
    if not any(centered(everyone)):
        return [0.0] * len(values)
    mean, std = math.fsum(everyone) / len(everyone), _std(everyone)
    return [(one - mean) / std for one in values]


def _by_group(
    function: Callable[[list[float]], list[float]], groups: Sequence[int], values: Sequence[float]
) -> list[float]:
    found = [0.0] * len(values)
    for places in _members(range(len(values)), groups):
        for i, one in zip(places, function([values[i] for i in places]), strict=True):
            found[i] = one
    return found


def _members(places: Sequence[int], groups: Sequence[int]) -> list[list[int]]:
    """The places of each group's rollouts, groups in the order in which they first appear."""
    members: dict[int, list[int]] = {}
    for i in places:
        members.setdefault(groups[i], []).append(i)
    return list(members.values())


def _plain(value: Any) -> Advantage:
    """A number, a list of numbers, or None, from whatever holds one: an array, a tensor."""
    if value is None:
        return None
    value = value.tolist() if hasattr(value, "tolist") else value
    return [float(one) for one in value] if isinstance(value, (list, tuple)) else float(value)
