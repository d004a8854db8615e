"""An interval for the mean of examples' mean scores between 0 and 1, from the binomial distribution."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import fmean

from verifiers.stats.clustering import expected_solved, variance_inflation
from verifiers.stats.student import beta_share, t_quantile, z_quantile

_SEEN = 0.75  # weight of the observed outcome in "at least as extreme": 0.5 is mid-p, 1 is Clopper-Pearson
_PSEUDO_ROLLOUTS = 2.5  # the rollouts that a pseudo-example counts for
_LEAST_WEIGHT = 0.08
_STEPS = 100
_PRECISION = 1e-13  # of an end of an interval
_QUANTILES = 12  # of the distribution of a run's mean, to average over


def solved_range(means: Sequence[float], rollouts: float, level: float) -> tuple[float, float]:
    """The interval for the mean of examples whose `rollouts` are right or wrong, from the share right in each.

    This is the binomial interval at an effective sample size: the number of single-rollout examples with the same
    variance of the mean. The variance is estimated from the means, and inflated for the clustering that few examples or
    few wrong answers may hide. If all rollouts of each example agree, the effective size is the number of examples.

    >>> low, high = solved_range([1.0] * 10, 4, 0.95)
    >>> round(low, 3), high
    (0.712, 1.0)
    """
    n, share, solved = len(means), fmean(means), Counter(means)
    if solved.keys() <= {0.0, 1.0}:
        return binomial_range(share, n, level)
    seen = math.fsum((mean - share) ** 2 for mean in means) / (n - 1) / (share * (1 - share))
    ratio = max(seen, 1 / rollouts) * variance_inflation(solved, rollouts, level)
    return binomial_range(share, n / min(1.0, ratio), level)


def share_range(means: Sequence[float], rollouts: float, level: float) -> tuple[float, float]:
    """The interval for the mean of examples whose own means are between 0 and 1, from `rollouts` of each.

    This is the binomial interval at an effective sample size: the number of right-or-wrong examples with the same
    variance of the mean. The variance is estimated with two pseudo-examples, one all right and one all wrong, so that
    equal scores do not give an interval of width 0. Their weight falls with the number of rollouts, because then the
    rollouts themselves show how examples differ. With one right-or-wrong rollout per example, the effective size is
    the number of examples.

    >>> low, high = share_range([1.0] * 10, 4, 0.95)
    >>> round(low, 3), high
    (0.712, 1.0)
    """
    n, share = len(means), fmean(means)
    squares = math.fsum((mean - share) ** 2 for mean in means)
    return binomial_range(share, _effective_n(share, squares, n, rollouts, level), level)


def expected_half_width(share: float, square: float, n: int, rollouts: int, level: float) -> float:
    """The mean half width of `solved_range` for n examples whose means have the variance `square`.

    >>> round(expected_half_width(0.5, 0.25, 100, 1, 0.95), 3)
    0.099
    """
    se, ratio = math.sqrt(square / n), square / (share * (1 - share))
    if rollouts > 1:
        icc = (ratio * rollouts - 1) / (rollouts - 1)
        ratio *= variance_inflation(expected_solved(share, icc, n, rollouts), rollouts, level)
    widths = []
    for i in range(_QUANTILES):
        seen = min(1.0, max(0.0, share + z_quantile((i + 0.5) / _QUANTILES) * se))
        low, high = binomial_range(seen, n / min(1.0, ratio), level)
        widths.append(high - low)
    return fmean(widths) / 2


def _effective_n(share: float, squares: float, n: int, rollouts: float, level: float) -> float:
    """The effective sample size of n examples; `squares` is the sum of squared deviations of their means."""
    weight = max(_PSEUDO_ROLLOUTS / rollouts, _LEAST_WEIGHT)
    prior = (share * n + weight) / (n + 2 * weight)
    spread = squares + n * (share - prior) ** 2 + weight * (prior**2 + (1 - prior) ** 2)
    ratio = min(1.0, spread / (n + 2 * weight) / (prior * (1 - prior)))  # 1 if each example is all right or all wrong
    narrowed = (z_quantile((1 + level) / 2) / t_quantile((1 + level) / 2, n - 1)) ** 2
    return n / ratio * (1 - (1 - ratio) * (1 - narrowed))  # the variance is an estimate only if some means are between


@lru_cache(maxsize=4096)
def binomial_range(share: float, n: float, level: float) -> tuple[float, float]:
    """The interval for a share observed in n trials, where n may be any positive number.

    Its ends are the shares at which the observed or a more extreme outcome has a probability of (1 - level) / 2, where
    the observed outcome itself counts for three quarters. Clopper-Pearson counts it fully and is conservative; mid-p
    counts half of it, and its coverage falls below 0.93 for some shares.

    >>> low, high = binomial_range(0.5, 100, 0.95)
    >>> round(low, 3), round(high, 3)
    (0.4, 0.6)
    """
    tail, right = (1 - level) / 2, share * n
    low = 0.0 if right <= 0 else _root(lambda p: _at_least(right, n, p) - tail, 0.0, share)
    wrong = n - right
    high = 1.0 if wrong <= 0 else 1 - _root(lambda p: _at_least(wrong, n, p) - tail, 0.0, 1 - share)
    return min(low, share), max(high, share)


def _at_least(right: float, n: float, p: float) -> float:
    """The probability of `right` or more out of n at share p, where `right` itself counts for `_SEEN`."""
    more = beta_share(p, 1 - p, right + 1, n - right) if n > right else 0.0
    return _SEEN * beta_share(p, 1 - p, right, n - right + 1) + (1 - _SEEN) * more


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    """The root of an increasing function, by false position with the Illinois rule, so that both ends move.

    A root within the precision of the lower end is returned as that end.
    """
    least, below, above = low, rising(low), rising(high)
    if above <= 0:
        return high
    is_up = None
    for _ in range(_STEPS):
        middle = (low * above - high * below) / (above - below)
        value = rising(middle)
        if value > 0:
            high, above, below = middle, value, below / 2 if is_up is True else below
        else:
            low, below, above = middle, value, above / 2 if is_up is False else above
        is_up = value > 0
        if abs(value) < 1e-12 or high - low < _PRECISION:
            break
    else:
        middle = (low + high) / 2
    return middle if middle - least > 10 * _PRECISION else least
