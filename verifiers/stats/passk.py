"""Scores of several rollouts an example → the chance that one of k solves it."""

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from statistics import fmean, stdev

from verifiers.stats.intervals import describe_range, share_range
from verifiers.stats.scores import TOLERANCE, by_example, check_share


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtK:
    """pass@k over examples; `left_out` names the examples with fewer than k scored rollouts.

    >>> print(PassAtK(k=4, threshold=1.0, mean=0.5, low=0.4, high=0.6, se=0.05, examples=100, left_out=(), level=0.95))
    pass@4 0.500 (95% interval 0.400 to 0.600; 100 examples)
    """

    k: int
    threshold: float
    mean: float | None
    low: float | None
    high: float | None
    se: float | None
    examples: int
    left_out: tuple[Hashable, ...]
    level: float

    def __str__(self) -> str:
        left_out = f"{len(self.left_out)} left out with fewer than {self.k} scored rollouts" if self.left_out else ""
        if self.mean is None:
            return f"pass@{self.k}: no examples{f'; {left_out}' * bool(left_out)}"
        counts = f"{self.examples} example{'s' * (self.examples != 1)}{f', {left_out}' * bool(left_out)}"
        return f"pass@{self.k} {self.mean:.3f} ({describe_range(self.low, self.high, self.level)}; {counts})"


def pass_at_k(
    scores: Iterable[float | None],
    example_ids: Iterable[Hashable],
    *,
    k: int,
    threshold: float = 1.0,
    level: float = 0.95,
) -> PassAtK:
    """The chance that at least one of k rollouts scores `threshold` or more, averaged over examples.

    With c right out of n, 1 - C(n-c, k)/C(n, k) estimates it without bias. None is a failed rollout and not a sample.

    >>> result = pass_at_k([1, 0, 0, 0, 1, 1, None], ["a", "a", "a", "b", "b", "b", "c"], k=2)
    >>> round(result.mean, 3), result.left_out
    (0.833, ('c',))
    """
    check_share(level, "level")
    if not hasattr(k, "__index__") or k < 1:
        raise ValueError(f"k={k!r} must be a whole number of 1 or more")
    groups = by_example(scores, example_ids)
    left_out = tuple(example for example, group in groups.items() if len(group) < k)
    chances = [_chance(group, k, threshold) for group in groups.values() if len(group) >= k]
    mean = fmean(chances) if chances else None
    low = high = se = None
    if len(chances) > 1:
        low, high = share_range(chances, [1] * len(chances), level)
        se = stdev(chances) / math.sqrt(len(chances))
    return PassAtK(
        k=k,
        threshold=threshold,
        mean=mean,
        low=low,
        high=high,
        se=se,
        examples=len(chances),
        left_out=left_out,
        level=level,
    )


def _chance(group: list[float], k: int, threshold: float) -> float:
    wrong = sum(score < threshold - TOLERANCE for score in group)
    return 1 - math.comb(wrong, k) / math.comb(len(group), k)
