"""Examples' mean scores between 0 and 1 → an interval of their mean, by the binomial distribution."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import fmean

from verifiers.stats.clustering import expected_solved, unseen_variance
from verifiers.stats.student import beta_share, t_quantile, z_quantile

_SEEN = 0.75  # how much of the outcome seen counts as "at least as extreme": 0.5 is mid-p, 1 is Clopper and Pearson
_IMAGINED = 2.5  # rollouts that an imagined example counts for
_LEAST_WEIGHT = 0.08
_STEPS = 100
_PRECISION = 1e-13  # to which an end of an interval is found
_QUANTILES = 12  # means that a run may have, to average over


def solved_range(means: Sequence[float], rollouts: float, level: float) -> tuple[float, float]:
    """The interval of the mean of examples whose `rollouts` are right or wrong, from the shares that were right.

    It is the binomial one at an effective sample size: as many examples of a single rollout as would vary like these.
    How much they vary is seen in them, and made larger by what few examples or few wrong answers may not show. Rollouts
    that all agree are copies: then the effective size is the number of examples.

    >>> low, high = solved_range([1.0] * 10, 4, 0.95)
    >>> round(low, 3), high
    (0.712, 1.0)
    """
    n, share, solved = len(means), fmean(means), Counter(means)
    if solved.keys() <= {0.0, 1.0}:
        return binomial_range(share, n, level)
    seen = math.fsum((mean - share) ** 2 for mean in means) / (n - 1) / (share * (1 - share))
    vary = max(seen, 1 / rollouts) * unseen_variance(solved, rollouts, level)
    return binomial_range(share, n / min(1.0, vary), level)


def share_range(means: Sequence[float], rollouts: float, level: float) -> tuple[float, float]:
    """The interval of the mean of examples whose own means lie between 0 and 1, from `rollouts` of each.

    It is the binomial one at an effective sample size: as many right-or-wrong examples as would vary like these. How
    much examples vary is estimated with two imagined ones counted in, one all right and one all wrong, so that scores
    that all agree are not taken for certainty. The imagined ones count for less the more rollouts an example has: then
    the rollouts themselves tell how far examples differ. With one right-or-wrong rollout of each, the effective size is
    the number of examples.

    >>> low, high = share_range([1.0] * 10, 4, 0.95)
    >>> round(low, 3), high
    (0.712, 1.0)
    """
    n, share = len(means), fmean(means)
    squares = math.fsum((mean - share) ** 2 for mean in means)
    return binomial_range(share, _effective_n(share, squares, n, rollouts, level), level)


def expected_reach(share: float, square: float, n: int, rollouts: int, level: float) -> float:
    """Half the width that `solved_range` has on average over n examples, whose means vary by `square`.

    >>> round(expected_reach(0.5, 0.25, 100, 1, 0.95), 3)
    0.099
    """
    se, vary = math.sqrt(square / n), square / (share * (1 - share))
    if rollouts > 1:
        alike = (vary * rollouts - 1) / (rollouts - 1)
        vary *= unseen_variance(expected_solved(share, alike, n, rollouts), rollouts, level)
    widths = []
    for i in range(_QUANTILES):
        seen = min(1.0, max(0.0, share + z_quantile((i + 0.5) / _QUANTILES) * se))
        low, high = binomial_range(seen, n / min(1.0, vary), level)
        widths.append(high - low)
    return fmean(widths) / 2


def _effective_n(share: float, squares: float, n: int, rollouts: float, level: float) -> float:
    """How many right-or-wrong examples vary like these, whose means differ from their share by these squares in all."""
    weight = max(_IMAGINED / rollouts, _LEAST_WEIGHT)
    prior = (share * n + weight) / (n + 2 * weight)
    spread = squares + n * (share - prior) ** 2 + weight * (prior**2 + (1 - prior) ** 2)
    vary = min(1.0, spread / (n + 2 * weight) / (prior * (1 - prior)))  # 1 where each is all right or all wrong
    narrowed = (z_quantile((1 + level) / 2) / t_quantile((1 + level) / 2, n - 1)) ** 2
    return n / vary * (1 - (1 - vary) * (1 - narrowed))  # only where examples lie between is their spread an estimate


@lru_cache(maxsize=4096)
def binomial_range(share: float, n: float, level: float) -> tuple[float, float]:
    """The interval of a share seen in n trials, n being any positive number.

    Its ends are the shares at which what was seen, or something more extreme, has a chance of (1 - level) / 2; the
    outcome seen counts for three quarters. Clopper and Pearson count it whole and hold too often; mid-p counts half of
    it and falls below 0.93 for some shares.

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
    """The chance of `right` or more out of n at share p, with `right` itself counted in part."""
    more = beta_share(p, 1 - p, right + 1, n - right) if n > right else 0.0
    return _SEEN * beta_share(p, 1 - p, right, n - right + 1) + (1 - _SEEN) * more


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function is 0, by false position; the Illinois rule keeps an end from standing still.

    A root that cannot be told apart from the lower end is that end.
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
