"""pass@k and pass^k: the chance that one, or each, of k rollouts solves an example."""

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, harmonic_mean, stdev

from verifiers.stats.intervals import describe_range
from verifiers.stats.scores import TOLERANCE, by_example, check_share
from verifiers.stats.shares import share_range, solved_range


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtK:
    """pass@k over examples, or pass^k if `is_all`; `left_out` are the ids of those with fewer than k scored rollouts.

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
    is_all: bool = False

    @property
    def name(self) -> str:
        return f"pass{'^' if self.is_all else '@'}{self.k}"

    @property
    def counts(self) -> str:
        """The number of examples, as text.

        >>> pass_at_k([1, 0, 1], ["a", "a", "b"], k=2).counts
        '1 of 2 examples, 1 left out with fewer than 2 scored rollouts'
        """
        all_examples = self.examples + len(self.left_out)
        if not self.left_out:
            return f"{self.examples} example{'s' * (self.examples != 1)}"
        left_out = f"{len(self.left_out)} left out with fewer than {self.k} scored rollouts"
        return f"{self.examples} of {all_examples} example{'s' * (all_examples != 1)}, {left_out}"

    def __str__(self) -> str:
        if self.mean is None:
            return f"{self.name}: {self.counts}"
        return f"{self.name} {self.mean:.3f} ({describe_range(self.low, self.high, self.level)}; {self.counts})"


def pass_at_k(
    scores: Iterable[float | None],
    example_ids: Iterable[Hashable],
    *,
    k: int,
    threshold: float = 1.0,
    level: float = 0.95,
) -> PassAtK:
    """The chance that at least one of k rollouts scores `threshold` or more, averaged over examples.

    With c right out of n, the unbiased estimate is 1 - C(n-c, k)/C(n, k). None is a failed rollout, which is left out.

    >>> result = pass_at_k([1, 0, 0, 0, 1, 1, None], ["a", "a", "a", "b", "b", "b", "c"], k=2)
    >>> round(result.mean, 3), result.left_out
    (0.833, ('c',))
    """
    return _pass_k(by_example(scores, example_ids), k, threshold, level, is_all=False)


def pass_hat_k(
    scores: Iterable[float | None],
    example_ids: Iterable[Hashable],
    *,
    k: int,
    threshold: float = 1.0,
    level: float = 0.95,
) -> PassAtK:
    """pass^k: the chance that every one of k rollouts scores `threshold` or more, averaged over examples.

    With c right out of n, the unbiased estimate is C(c, k)/C(n, k).

    >>> result = pass_hat_k([1, 0, 1, 1, 1, 1], ["a", "a", "a", "b", "b", "b"], k=2)
    >>> print(f"{result.name} {result.mean:.3f}")
    pass^2 0.667
    """
    return _pass_k(by_example(scores, example_ids), k, threshold, level, is_all=True)


def _pass_k(groups: Mapping[Hashable, list[float]], k: int, threshold: float, level: float, *, is_all: bool) -> PassAtK:
    check_share(level, "level")
    if not hasattr(k, "__index__") or k < 1:
        raise ValueError(f"k={k!r} must be a whole number of 1 or more")
    left_out = tuple(example for example, group in groups.items() if len(group) < k)
    enough = [group for group in groups.values() if len(group) >= k]
    chances = [_chance(group, k, threshold, is_all) for group in enough]
    mean = fmean(chances) if chances else None
    low = high = se = None
    if len(chances) > 1:
        find = solved_range if k == 1 else share_range  # a rollout is right or wrong; the estimate for k > 1 is a share
        low, high = find(chances, harmonic_mean([*map(len, enough)]) / k, level)
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
        is_all=is_all,
    )


def _chance(group: list[float], k: int, threshold: float, is_all: bool) -> float:
    wrong = sum(score < threshold - TOLERANCE for score in group)
    ways = math.comb(len(group), k)
    return math.comb(len(group) - wrong, k) / ways if is_all else 1 - math.comb(wrong, k) / ways
