"""The number of examples to run for a wanted resolution, given the spread of scores."""

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, variance

from verifiers.stats.evidence import rollout_noise
from verifiers.stats.paired import Scores, shared_scores
from verifiers.stats.scores import by_example, check_share
from verifiers.stats.shares import expected_half_width
from verifiers.stats.signflip import SEEN
from verifiers.stats.student import beta_share, sign_test, t_quantile, z_quantile

_EXACT_CHANGES = 2000  # changed examples up to which the power of the exact test is computed


@dataclass(frozen=True, slots=True)
class Spread:
    """The variance of a score, its part within an example (None if unknown), and the mean of right-or-wrong scores."""

    total: float
    within: float | None = None
    share: float | None = None

    def of_mean(self, rollouts: int) -> float:
        """The variance of an example's mean over its rollouts, which reduce only the variance within an example."""
        if rollouts == 1:
            return self.total
        if self.within is None:
            raise ValueError(
                f"rollouts_per_example={rollouts} needs within_sd, or values with clusters in which examples repeat: "
                "more rollouts reduce only the variance within an example"
            )
        if self.within > self.total * (1 + 1e-9):
            raise ValueError(
                f"the variance within an example ({self.within:.4g}) is larger than the total ({self.total:.4g})"
            )
        return self.total - self.within + self.within / rollouts


def examples_needed(
    resolution: float,
    *,
    mean: float | None = None,
    sd: float | None = None,
    values: Iterable[float | None] | None = None,
    clusters: Iterable[Hashable] | None = None,
    difference_sd: float | None = None,
    correlation: float | None = None,
    within_sd: float | None = None,
    rollouts_per_example: int = 1,
    level: float = 0.95,
    power: float | None = None,
) -> int:
    """The number of examples for an interval of ± `resolution`, or to detect a difference that large between two runs.

    Scores are right or wrong with this `mean`, or have the standard deviation `sd`, which can also be measured on
    `values` (`clusters` are their example ids). With `correlation`, that of two runs' scores on the same example, the
    result is for a paired difference; `difference_sd` is the standard deviation of that difference for one rollout
    each. With `power`, it is the number to detect the difference with this probability, not only for the width of its
    interval. `within_sd` is the standard deviation of repeats of the same example.

    >>> examples_needed(0.03, sd=0.5)
    1070
    >>> examples_needed(0.1, mean=0.98)
    20
    """
    _check(resolution, rollouts_per_example, level, power)
    if [mean, sd, values, difference_sd].count(None) != 3:
        raise ValueError(
            "pass exactly one of mean, sd, values and difference_sd: the number depends on how much scores vary"
        )
    is_difference = correlation is not None or difference_sd is not None or power is not None
    spread = _measured(values, clusters) if values is not None else _given(mean, sd, difference_sd)
    if within_sd is not None:
        spread = Spread(spread.total, within_sd**2, spread.share)
    if not is_difference:
        return _for_mean(resolution, spread, rollouts_per_example, level)
    spread = _of_difference(resolution, spread, correlation, difference_sd)
    return _for_difference(resolution, spread, rollouts_per_example, level, power)


def examples_to_compare(
    resolution: float,
    a: Scores,
    b: Scores,
    *,
    rollouts_per_example: int = 1,
    level: float = 0.95,
    power: float | None = None,
) -> int:
    """The number of examples to know a difference to ± `resolution`, or to detect it, given two earlier runs.

    If the runs have repeats, the variance within examples is separated from that between examples, so the answer holds
    for any `rollouts_per_example`, not only for the number that these runs had.

    >>> a = {i: [i % 2, 1, 0, 1] for i in range(40)}
    >>> b = {i: [i % 2, 1, 1, i % 3 > 0] for i in range(40)}
    >>> [examples_to_compare(0.1, a, b, rollouts_per_example=n, power=0.8) for n in (1, 4)]
    [388, 96]
    """
    _check(resolution, rollouts_per_example, level, power)
    groups_a, groups_b = shared_scores(a, b)
    changes = [fmean(after) - fmean(before) for before, after in zip(groups_a, groups_b, strict=True)]
    if len(changes) < 2:
        raise ValueError(
            f"the two runs share {len(changes)} scored examples; at least two are needed to see how they vary"
        )
    is_binary = {0.0, 1.0}.issuperset(chain(*groups_a, *groups_b))
    seen, noise = variance(changes), rollout_noise(groups_a, groups_b)
    within = None if noise is None else noise * _harmonic_size(groups_a, groups_b)
    if within is None and any(len(group) > 1 for group in (*groups_a, *groups_b)):
        raise ValueError("some examples have one rollout and some several; pass runs in which each has two or more")
    total = seen if noise is None or within is None else max(0.0, seen - noise) + within
    if total <= 0:
        raise ValueError(
            "the two runs differ by the same amount on every example, which does not show how much scores vary; "
            "pass the standard deviation instead (--sd S)"
        )
    spread = Spread(total, within, 0.5 if is_binary else None)
    return _for_difference(resolution, spread, rollouts_per_example, level, power)


# --- the spread of scores -----------------------------------------------------------------------------------------


def _given(mean: float | None, sd: float | None, difference_sd: float | None) -> Spread:
    if mean is not None:
        if not 0 < mean < 1:
            raise ValueError(f"mean={mean!r} must be between 0 and 1, exclusive: equal scores do not vary")
        return Spread(mean * (1 - mean), None, mean)
    spread = sd if sd is not None else difference_sd
    if spread is None or not 0 < spread < math.inf:
        name = "sd" if sd is not None else "difference_sd"
        raise ValueError(f"{name}={spread!r} must be a positive number; for 0/1 scores pass their mean")
    return Spread(spread**2)


def _measured(values: Iterable[float | None], clusters: Iterable[Hashable] | None) -> Spread:
    """The spread of the scores of a run, by an analysis of variance if examples repeat."""
    scores = list(values)
    ids = range(len(scores)) if clusters is None else clusters
    groups = [group for group in by_example(scores, ids).values() if group]
    n, examples = sum(map(len, groups)), len(groups)
    if examples < 2 or len(set(chain.from_iterable(groups))) == 1:
        raise ValueError(f"the {n} scores of {examples} examples do not vary; pass sd instead of values")
    mean = fmean(map(fmean, groups))
    share = mean if {0.0, 1.0}.issuperset(chain.from_iterable(groups)) else None
    if n == examples:
        return Spread(variance([group[0] for group in groups]), None, share)
    within = math.fsum((score - fmean(group)) ** 2 for group in groups for score in group) / (n - examples)
    overall = fmean(chain.from_iterable(groups))
    between = math.fsum(len(group) * (fmean(group) - overall) ** 2 for group in groups) / (examples - 1)
    size = (n - sum(len(group) ** 2 for group in groups) / n) / (examples - 1)
    return Spread(within + max(0.0, (between - within) / size), within, share)


def _of_difference(resolution: float, spread: Spread, correlation: float | None, difference_sd: float | None) -> Spread:
    """The spread of the difference between two runs; the variance within examples is that of both."""
    if (correlation is None) == (difference_sd is None):
        raise ValueError(
            "a difference between two runs needs either difference_sd, such as compare(a, b).sd, or correlation with "
            "mean, sd or values (0 if it is unknown)"
        )
    within = None if spread.within is None else 2 * spread.within
    if correlation is None:
        return Spread(spread.total, within)
    most = 1.0 if spread.within is None else 1 - spread.within / spread.total
    if not -1 <= correlation < 1 or correlation > most + 1e-9:
        raise ValueError(f"correlation={correlation!r} must be between -1 and {most:.4g}, at which only repeats differ")
    other = spread.total
    if spread.share is not None:  # the other run has a different mean; the closer to 0.5, the larger its variance
        moved = spread.share + resolution if spread.share < 0.5 else spread.share - resolution
        other = max(other, moved * (1 - moved)) if 0 < moved < 1 else other
    total = spread.total + other - 2 * correlation * math.sqrt(spread.total * other)
    return Spread(total, within, spread.share)


def _harmonic_size(groups_a: Iterable[list[float]], groups_b: Iterable[list[float]]) -> float:
    return 1 / fmean(1 / len(group) for group in (*groups_a, *groups_b))


# --- the number of examples ----------------------------------------------------------------------------------------


def _for_mean(resolution: float, spread: Spread, rollouts: int, level: float) -> int:
    square = spread.of_mean(rollouts)
    if spread.share is None:
        ratio = math.sqrt(square) / resolution
        return _smallest(lambda n: ratio * t_quantile((1 + level) / 2, max(1.0, n - 2)) <= math.sqrt(n), ratio, level)
    share, ratio = spread.share, math.sqrt(square) / resolution
    return _smallest(lambda n: expected_half_width(share, square, n, rollouts, level) <= resolution, ratio, level)


def _for_difference(resolution: float, spread: Spread, rollouts: int, level: float, power: float | None) -> int:
    square = spread.of_mean(rollouts)
    ratio = math.sqrt(square) / resolution
    if power is not None and spread.share is not None and rollouts == 1:
        changed = min(1.0, max(resolution, square + resolution**2))
        if changed * (3 * ratio) ** 2 < _EXACT_CHANGES:
            return _smallest(lambda n: _sign_power(n, changed, resolution, level) >= power, ratio, level)
    shares = [(1 + level) / 2] if power is None else [(1 + level) / 2, power]

    def is_enough(n: int) -> bool:
        return ratio * math.fsum(t_quantile(share, n - 1) for share in shares) <= math.sqrt(n)

    return _smallest(is_enough, ratio, level)


def _sign_power(n: int, changed: float, difference: float, level: float) -> float:
    """The power of the sign test if a share `changed` of the examples is won or lost."""
    won = (1 + difference / changed) / 2
    middle, reach = n * changed, 6 * math.sqrt(n * changed * (1 - changed)) + 1
    found, needed = [], 0
    for m in range(max(0, math.floor(middle - reach)), min(n, math.ceil(middle + reach)) + 1):
        needed = max(needed, (m + 1) // 2)
        while needed <= m and sign_test(needed, m - needed, SEEN) >= 1 - level:
            needed += 1
        if needed <= m:
            seen = beta_share(won, 1 - won, needed, m - needed + 1)
            found.append(_binomial(n, m, changed) * seen)
    return math.fsum(found)


def _binomial(n: int, m: int, share: float) -> float:
    if share >= 1:
        return float(m == n)
    ways = math.lgamma(n + 1) - math.lgamma(m + 1) - math.lgamma(n - m + 1)
    return math.exp(ways + m * math.log(share) + (n - m) * math.log1p(-share))


def _smallest(is_enough: Callable[[int], bool], ratio: float, level: float) -> int:
    """The smallest n that is enough, searched from the normal approximation; all larger n are enough too."""
    low, high = 1, max(2, math.ceil((ratio * z_quantile((1 + level) / 2)) ** 2))
    while not is_enough(high):
        low, high = high, high + max(1, high // 4)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    while high > 2 and is_enough(high - 1):
        high -= 1
    return high


def _check(resolution: float, rollouts: int, level: float, power: float | None) -> None:
    check_share(level, "level")
    if power is not None:
        check_share(power, "power")
    if not 0 < resolution < math.inf:
        raise ValueError(f"resolution={resolution!r} must be a positive number, such as 0.03 for ±0.03")
    if rollouts < 1:
        raise ValueError(f"rollouts_per_example={rollouts!r} must be 1 or more")
