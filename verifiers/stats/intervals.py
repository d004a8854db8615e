"""Scores → their mean with a confidence interval that knows which rollouts share an example."""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from verifiers.stats.scores import by_example, check_share
from verifiers.stats.student import t_quantile, z_quantile


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and how far off it may be; low and high are None where the scores cannot tell.

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
        """Half the interval's width, the ± of a report."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    def __str__(self) -> str:
        if self.mean is None:
            return "no scored rollouts"
        counts = f"{self.n} rollouts of {self.clusters} example{'s' * (self.clusters != 1)}"
        return f"{self.mean:.3f} ({describe_range(self.low, self.high, self.level)}; {counts})"


def mean_interval(
    values: Iterable[float | None], clusters: Iterable[Hashable] | None = None, level: float = 0.95
) -> Interval:
    """The mean of rollouts with an interval clustered by example; None is a failed rollout and counts nowhere.

    Without `clusters` every value is an example of its own. Scores that are all 0 or 1 get a Wilson interval.

    >>> print(mean_interval([0.2, 0.4, 0.6, 0.5, None, 0.4], clusters=["a", "a", "b", "b", "c", "c"]))
    0.420 (95% interval 0.046 to 0.794; 5 rollouts of 3 examples)
    >>> print(mean_interval([1, 1, 1, 1, 1, 1, 1, 1, 1, 1]))
    1.000 (95% interval 0.722 to 1.000; 10 rollouts of 10 examples)
    """
    check_share(level, "level")
    scores = list(values)
    ids = range(len(scores)) if clusters is None else clusters
    groups = [group for group in by_example(scores, ids).values() if group]
    if not groups:
        return Interval(None, None, None, 0, 0, level, None)
    n = sum(map(len, groups))
    mean = math.fsum(chain.from_iterable(groups)) / n
    if len(groups) == 1:
        return Interval(mean, None, None, n, 1, level, None)
    se = _clustered_se(groups, mean, n)
    if {0.0, 1.0}.issuperset(chain.from_iterable(groups)):
        low, high = share_range([math.fsum(group) for group in groups], [len(group) for group in groups], level)
    elif se <= 1e-12 * abs(mean):
        return Interval(mean, None, None, n, len(groups), level, se)
    else:
        reach = t_quantile((1 + level) / 2, len(groups) - 1) * se
        low, high = mean - reach, mean + reach
    return Interval(mean, low, high, n, len(groups), level, se)


def share_range(totals: Sequence[float], sizes: Sequence[int], level: float) -> tuple[float, float]:
    """Wilson's interval for a share, where example i has total `totals[i]` out of `sizes[i]`.

    The effective sample size comes from how much the examples differ, counting two imagined examples more, one all
    right and one all wrong. Unanimous scores thus say nothing about fresh rollouts of other examples: ten examples
    right four times out of four count as ten, not as forty. With one rollout an example it is Wilson's own interval.

    >>> low, high = share_range([4] * 10, [4] * 10, 0.95)
    >>> round(low, 3), high
    (0.722, 1.0)
    """
    examples, n = len(totals), sum(sizes)
    share, typical = math.fsum(totals) / n, n / examples
    prior = (share * n + typical) / (n + 2 * typical)
    spread = math.fsum((total - size * prior) ** 2 for total, size in zip(totals, sizes, strict=True))
    spread += typical**2 * (prior**2 + (1 - prior) ** 2)
    effective_n = prior * (1 - prior) * (n + 2 * typical) ** 2 / spread * examples / (examples + 2)
    pull = z_quantile((1 + level) / 2) ** 2 / effective_n
    center = (share + pull / 2) / (1 + pull)
    reach = math.sqrt(pull * share * (1 - share) + pull**2 / 4) / (1 + pull)
    return max(0.0, min(share, center - reach)), min(1.0, max(share, center + reach))


def describe_range(low: float | None, high: float | None, level: float, sign: str = "") -> str:
    """An interval in words.

    >>> describe_range(0.4, 0.6, 0.95), describe_range(None, None, 0.95)
    ('95% interval 0.400 to 0.600', 'no 95% interval')
    """
    if low is None or high is None:
        return f"no {100 * level:.4g}% interval"
    return f"{100 * level:.4g}% interval {low:{sign}.3f} to {high:{sign}.3f}"


def _clustered_se(groups: Sequence[Sequence[float]], mean: float, n: int) -> float:
    """The cluster-robust standard error of a mean over rollouts; an example's errors add up before they are squared."""
    errors = (math.fsum(score - mean for score in group) for group in groups)
    return math.sqrt(len(groups) / (len(groups) - 1) * math.fsum(error * error for error in errors)) / n
