"""The mean of scores over examples, with a confidence interval."""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, harmonic_mean, stdev

from verifiers.stats.scores import (
    TOLERANCE,
    are_equal,
    by_example,
    check_share,
    example_means,
    have_few_values,
    snapped,
)
from verifiers.stats.shares import share_range, solved_range
from verifiers.stats.skewed import skewed_range

_WEIGHTS_ADD_UP_TO = 2.0  # rewards between 0 and this are assumed to be weighted sums with 0 as their minimum


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its confidence interval; low and high are None if the scores do not determine them.

    >>> print(Interval(mean=0.5, low=0.4, high=0.6, n=400, clusters=100, level=0.95, se=0.05))
    0.500 (95% interval 0.400 to 0.600; 400 rollouts of 100 examples)
    """

    mean: float | None
    low: float | None
    high: float | None
    n: int
    clusters: int
    level: float
    se: float | None

    @property
    def half_width(self) -> float | None:
        """Half of the interval's width, for ± in reports."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    def __str__(self) -> str:
        if self.mean is None:
            return "no scored rollouts"
        counts = f"{self.n} rollouts of {self.clusters} example{'s' * (self.clusters != 1)}"
        return f"{self.mean:.3f} ({describe_range(self.low, self.high, self.level)}; {counts})"


def mean_interval(
    values: Iterable[float | None],
    clusters: Iterable[Hashable] | None = None,
    level: float = 0.95,
    *,
    bounds: tuple[float, float] | None = None,
) -> Interval:
    """The mean over examples with its interval; None is a failed rollout, which is left out.

    `clusters` are the example ids of the values; each example has the same weight, however many of its rollouts were
    scored. Without `clusters`, each value is a separate example. `bounds` are the smallest and largest possible score;
    by default, scores between 0 and 1 are assumed to have these bounds.

    >>> print(mean_interval([0.2, 0.4, 0.6, 0.5, None, 0.4], clusters=["a", "a", "b", "b", "c", "c"]))
    0.417 (95% interval 0.036 to 0.904; 5 rollouts of 3 examples)
    >>> print(mean_interval([1, 1, 1, 1, 1, 1, 1, 1, 1, 1]))
    1.000 (95% interval 0.712 to 1.000; 10 rollouts of 10 examples)
    """
    check_share(level, "level")
    given = list(values)
    ids = range(len(given)) if clusters is None else clusters
    groups = [[*map(snapped, group)] for group in by_example(given, ids).values() if group]
    if not groups:
        return Interval(None, None, None, 0, 0, level, None)
    means, scores = example_means(groups), list(chain.from_iterable(groups))
    mean, n, examples = fmean(means), len(scores), len(groups)
    _check_bounds(bounds, scores)
    if examples == 1:
        return Interval(mean, None, None, n, 1, level, None)
    se = stdev(means, mean) / math.sqrt(examples)
    low, high = _range(means, scores, harmonic_mean([*map(len, groups)]), level, bounds)
    return Interval(mean, low, high, n, examples, level, se)


def _range(
    means: Sequence[float], scores: Sequence[float], rollouts: float, level: float, bounds: tuple[float, float] | None
) -> tuple[float, float] | tuple[None, None]:
    """The interval for this kind of scores; none for equal scores that are not at a known bound."""
    least, most = bounds or _assumed_bounds(scores)
    is_bounded = bounds is not None or (min(scores) >= 0 and max(scores) <= 1)
    if are_equal(scores):
        is_at_end = is_bounded and any(abs(scores[0] - end) <= TOLERANCE for end in (least, most))
        if not is_at_end:
            return None, None
    elif not have_few_values(scores):
        low, high = skewed_range(means, level)
        return (max(low, least), min(high, most)) if is_bounded else (low, high)
    size, find = most - least, solved_range if {least, most}.issuperset(scores) else share_range
    low, high = find([min(1.0, max(0.0, (mean - least) / size)) for mean in means], rollouts, level)
    return least + low * size, least + high * size


def _assumed_bounds(scores: Sequence[float]) -> tuple[float, float]:
    """0 and 1 for scores between them, 0 and the largest for sums of weights slightly above 1, else the range seen."""
    least, most = min(scores), max(scores)
    return (0.0, max(1.0, most)) if least >= 0 and most <= _WEIGHTS_ADD_UP_TO else (least, most)


def _check_bounds(bounds: tuple[float, float] | None, scores: Sequence[float]) -> None:
    if bounds is None:
        return
    least, most = bounds
    if not -math.inf < least < most < math.inf:
        raise ValueError(f"bounds={bounds!r} must be two finite numbers, the smaller first")
    if outside := [score for score in scores if not least - TOLERANCE <= score <= most + TOLERANCE]:
        raise ValueError(f"a score of {outside[0]!r} is outside bounds={bounds!r}")


def describe_range(low: float | None, high: float | None, level: float, sign: str = "") -> str:
    """An interval as text.

    >>> describe_range(0.4, 0.6, 0.95), describe_range(None, None, 0.95)
    ('95% interval 0.400 to 0.600', 'no 95% interval')
    """
    if low is None or high is None:
        return f"no {100 * level:.4g}% interval"
    return f"{100 * level:.4g}% interval {low:{sign}.3f} to {high:{sign}.3f}"
