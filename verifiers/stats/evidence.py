"""Scores of two runs → the test that applies to them, with its p-value and its interval at any level."""

import math
from collections.abc import Sequence
from itertools import chain
from statistics import fmean, variance
from typing import Protocol

from verifiers.stats.scores import TOLERANCE, have_few_values
from verifiers.stats.signflip import SignFlips
from verifiers.stats.student import t_quantile, t_tail, z_quantile

Range = tuple[float | None, float | None]
Groups = Sequence[Sequence[float]]  # the scores of each example

_FEW_REPEATED = 20  # below this many examples with repeats, a t test has more power than sign flips
_FEW_SINGLE = 10
_MANY_VALUES = 2000  # above this many, the sign-flip distribution equals Student's t to three digits


class Evidence(Protocol):
    """A test of the difference between two runs; if its p-value is below 1 - level, its interval excludes 0."""

    name: str
    p_value: float

    def interval(self, level: float) -> Range: ...


def paired_evidence(groups_a: Groups, groups_b: Groups, *, seed: int = 0, level: float = 0.95) -> Evidence:
    """The test for two runs of the same examples.

    This is the sign-flip test, which is exact and assumes no distribution. With too few examples for it to detect
    anything, it is the t test if examples have several rollouts or differences take many values.
    """
    changes = [fmean(b) - fmean(a) for a, b in zip(groups_a, groups_b, strict=True)]
    n, has_few_values = len(changes), have_few_values([*chain(*groups_a, *groups_b)])
    noise = rollout_noise(groups_a, groups_b)
    is_small = n < (_FEW_REPEATED if noise is not None else 0 if has_few_values else _FEW_SINGLE)
    if n > 1 and (is_small or len({round(change, 12) for change in changes}) > _MANY_VALUES):
        floor = 0.0 if noise is None else noise * (0.25 if 2 ** (1 - n) > 1 - level else 0.5)
        square = max(variance(changes), floor)
        if square > TOLERANCE**2:
            return Student("paired t test", fmean(changes), math.sqrt(square / n), n - 1)
    return Flipped(changes, groups_a, groups_b, seed)


def unpaired_evidence(groups_a: Groups, groups_b: Groups, *, seed: int = 0, level: float = 0.95) -> Evidence:
    """The test for two runs of different examples: Welch's t test of the examples' means.

    If scores take few values, two pseudo-examples are added to each run, one at either end (Agresti and Caffo).
    """
    scores = [*chain(*groups_a, *groups_b)]
    sides = []
    for groups in (groups_a, groups_b):
        means = [*map(fmean, groups)]
        weight = min(1.0, 1 / fmean(map(len, groups))) if have_few_values(scores) else 0.0
        least, most = min(0.0, *scores), max(1.0, *scores)
        n = len(means) + 2 * weight
        center = (math.fsum(means) + weight * (least + most)) / n
        squares = math.fsum((mean - center) ** 2 for mean in means)
        squares += weight * ((least - center) ** 2 + (most - center) ** 2)
        sides.append((center, squares / max(n - 1, 1e-9) / n, n))
    (center_a, square_a, n_a), (center_b, square_b, n_b) = sides
    total = square_a + square_b
    if min(len(groups_a), len(groups_b)) < 2 or total <= TOLERANCE**2:
        return Nothing()
    df = total**2 / (square_a**2 / (n_a - 1) + square_b**2 / (n_b - 1))
    difference = fmean(map(fmean, groups_b)) - fmean(map(fmean, groups_a))
    return Student("Welch's t test", center_b - center_a, math.sqrt(total), df, contains=difference)


class Nothing:
    """No test: there is only one example, or all scores are equal."""

    name = "no test"
    p_value = 1.0

    def interval(self, level: float) -> Range:
        return None, None


class Student:
    """The t test of a mean difference, and its interval, extended to contain the value `contains` of the same sign."""

    def __init__(self, name: str, center: float, se: float, df: float, contains: float | None = None) -> None:
        self.name, self.center, self.se, self.df = name, center, se, df
        self.contains = center if contains is None or contains * center <= 0 else contains
        self.p_value = t_tail(center / se, df)

    def interval(self, level: float) -> Range:
        half_width = t_quantile((1 + level) / 2, self.df) * self.se
        return min(self.contains, self.center - half_width), max(self.contains, self.center + half_width)


class Flipped:
    """The sign-flip test, and its interval.

    If differences take few values, the interval of the test alone may be too narrow: two runs with equal scores would
    differ by 0 ± 0. Then each end is the farther one of the test's interval and of that of Bonett and Price, which adds
    two pseudo-examples, one won and one lost; but it never contradicts the test.
    """

    def __init__(self, changes: Sequence[float], groups_a: Groups, groups_b: Groups, seed: int) -> None:
        self.changes = changes
        self.test = SignFlips(changes, seed)
        self.name = self.test.name
        self.p_value = min(1.0, 2 * min(self.test.p_at_most(0.0), self.test.p_at_least(0.0)))
        scores = [*chain(*groups_a, *groups_b)]
        self.span = 0.0
        if have_few_values(scores) and len(changes) > 1:
            self.span = 1.0 if min(scores) >= 0 and max(scores) <= 1 else max(scores) - min(scores)
        self.rollouts = fmean(map(len, (*groups_a, *groups_b)))

    def interval(self, level: float) -> Range:
        tail = (1 - level) / 2
        low, high = shown_low, shown_high = self.test.low(tail), self.test.high(tail)
        if self.span:
            other_low, other_high = self._bonett_price(level)
            low = other_low if low is None else min(low, other_low)
            high = other_high if high is None else max(high, other_high)
        if low is None or high is None:
            return None, None
        if self.p_value >= 1 - level:
            return min(low, 0.0), max(high, 0.0)
        if fmean(self.changes) > 0 >= low:
            low = max(shown_low or 0.0, TOLERANCE)
        elif fmean(self.changes) < 0 <= high:
            high = min(shown_high or 0.0, -TOLERANCE)
        return low, high

    def _bonett_price(self, level: float) -> tuple[float, float]:
        weight = max(min(1.0, 2 / self.rollouts), 0.08)  # of a pseudo-example, as for the interval of a mean
        n, mean = len(self.changes) + 2 * weight, fmean(self.changes)
        center = math.fsum(self.changes) / n
        mean_square = (math.fsum(change * change for change in self.changes) + 2 * weight * self.span**2) / n
        half_width = z_quantile((1 + level) / 2) * math.sqrt((mean_square - center**2) / n)
        return max(-self.span, min(mean, center - half_width)), min(self.span, max(mean, center + half_width))


def rollout_noise(groups_a: Groups, groups_b: Groups) -> float | None:
    """The variance of an example's difference due to its rollouts; None if any example has fewer than two in a run."""
    parts = []
    for group_a, group_b in zip(groups_a, groups_b, strict=True):
        if len(group_a) < 2 or len(group_b) < 2:
            return None
        parts.append(variance(group_a) / len(group_a) + variance(group_b) / len(group_b))
    return fmean(parts)
