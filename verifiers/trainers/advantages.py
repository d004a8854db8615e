"""Rewards of a group become advantages: how much better each rollout was than its mates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Scale = Literal["none", "std"]

LEAST_STD = 1e-6  # below this a group's rewards count as equal: rounding is no signal


def group_advantages(rewards_G: Sequence[float | None], scale: Scale = "none") -> list[float | None]:
    """Rewards less their mean, over their standard deviation if asked; failed ones (None) neither count nor train.

    >>> group_advantages([1.0, 0.0, None])
    [0.5, -0.5, None]
    >>> group_advantages([3.0, 1.0], "std")
    [1.0, -1.0]
    >>> group_advantages([1.0, None])
    [0.0, None]
    """
    scored = [reward for reward in rewards_G if reward is not None]
    if not scored:
        return [None] * len(rewards_G)
    mean = math.fsum(scored) / len(scored)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored) / len(scored))
    if std < LEAST_STD:
        return [None if reward is None else 0.0 for reward in rewards_G]
    unit = std if scale == "std" else 1.0
    return [None if reward is None else (reward - mean) / unit for reward in rewards_G]


def batch_advantages(
    rewards: Sequence[float | None], groups: Sequence[int], scale: Scale = "none"
) -> list[float | None]:
    """The advantages of a batch, whose rollouts belong to the groups with these numbers.

    >>> batch_advantages([1.0, 0.0, 5.0, 7.0], [0, 0, 1, 1])
    [0.5, -0.5, -1.0, 1.0]
    """
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    advantages: list[float | None] = [None] * len(rewards)
    for places in members.values():
        found = group_advantages([rewards[i] for i in places], scale)
        for i, advantage in zip(places, found, strict=True):
            advantages[i] = advantage
    return advantages


def flat_groups(rewards: Sequence[float | None], groups: Sequence[int]) -> set[int]:
    """Groups whose valid rewards are all the same, or fewer than two: nothing can be learned from them.

    >>> flat_groups([1.0, 1.0, 0.0, 1.0, None, 1.0], [0, 0, 1, 1, 2, 2])
    {0, 2}
    """
    values: dict[int, list[float]] = {group: [] for group in groups}
    for reward, group in zip(rewards, groups, strict=True):
        if reward is not None:
            values[group].append(reward)
    return {group for group, found in values.items() if not any(group_advantages(found))}
