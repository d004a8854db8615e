"""How often each example was solved → how much more examples may differ than they show."""

import math
from collections.abc import Mapping

from verifiers.stats.student import z_quantile

_ALIKE = (*((i / 16) ** 2 for i in range(16)), 1 - 1e-6)  # shares of the variance that may lie between examples
_FEW = 5  # examples' worth of rights and wrongs up to which the clustering is taken to be badly known
_TO_THE_MIDDLE = (1.0, 0.9, 0.8, 0.7, 0.6, 0.4, 0.2)  # means tried: the one seen, with its log-odds scaled down


def variance_of_mean(alike: float, rollouts: float) -> float:
    """The variance of an example's mean next to that of one rollout, where the share `alike` lies between examples.

    >>> variance_of_mean(0.0, 4), variance_of_mean(1.0, 4)
    (0.25, 1.0)
    """
    return alike + (1 - alike) / rollouts


def unseen_variance(solved: Mapping[float, float], rollouts: float, level: float) -> float:
    """How many times more examples' means may vary than the likeliest clustering has it.

    `solved` counts examples by the share of their `rollouts` that were right. Examples' chances are taken for
    beta-distributed, and the clustering for any under which what was seen is not much less likely than at best, each at
    the mean that suits it best. Wrong answers that are spread evenly rule strong clustering out; a single one does not.

    >>> spread, single = {1.0: 2, 0.9375: 2, 0.875: 1}, {1.0: 4, 0.9375: 1}
    >>> round(unseen_variance(spread, 16, 0.95), 1), round(unseen_variance(single, 16, 0.95), 1)
    (2.4, 5.9)
    """
    n = math.fsum(solved.values())
    share = math.fsum(mean * times for mean, times in solved.items()) / n
    worth = 4 * n * share * (1 - share)  # n where half is right; few where nearly all or hardly any are
    drop = min(1.0, _FEW / worth) * z_quantile((1 + level) / 2) ** 2 / 4
    fits: list[float] = []
    for alike in _ALIKE:
        fits.append(_best_fit(solved, share, rollouts, alike))
        if fits[-1] < max(fits) - drop:
            break
    best = max(fits)
    last = max(i for i, fit in enumerate(fits) if fit >= best - drop)
    most = _ALIKE[last]
    if last + 1 < len(fits):
        inside, outside = fits[last] - (best - drop), best - drop - fits[last + 1]
        most += (_ALIKE[last + 1] - most) * inside / (inside + outside)
    likeliest = _ALIKE[fits.index(best)]
    return variance_of_mean(most, rollouts) / variance_of_mean(likeliest, rollouts)


def _best_fit(solved: Mapping[float, float], share: float, rollouts: float, alike: float) -> float:
    """The log-likelihood of a clustering at the mean that suits it best: the one seen, or one nearer to the middle."""
    log_odds, best = math.log(share / (1 - share)), -math.inf
    for scale in _TO_THE_MIDDLE:
        fit = _log_likelihood(solved, rollouts, 1 / (1 + math.exp(-scale * log_odds)), alike)
        if fit < best:
            break
        best = fit
    return best


def _log_likelihood(solved: Mapping[float, float], rollouts: float, mean: float, alike: float) -> float:
    """Of the beta-binomial distribution, less what depends on neither the mean nor the clustering."""
    if not alike:
        log_right, log_wrong = rollouts * math.log(mean), rollouts * math.log1p(-mean)
        return math.fsum([times * (seen * log_right + (1 - seen) * log_wrong) for seen, times in solved.items()])
    strength, lgamma = 1 / alike - 1, math.lgamma
    a, b = mean * strength, (1 - mean) * strength
    whole = lgamma(strength) - lgamma(strength + rollouts) - lgamma(a) - lgamma(b)
    return math.fsum(
        [
            times * (whole + lgamma(a + seen * rollouts) + lgamma(b + (1 - seen) * rollouts))
            for seen, times in solved.items()
        ]
    )


def expected_solved(share: float, alike: float, n: int, rollouts: int) -> dict[float, float]:
    """How many of n examples are solved how often, on average.

    >>> {mean: round(times, 3) for mean, times in expected_solved(0.5, 0.0, 4, 2).items()}
    {0.0: 1.0, 0.5: 2.0, 1.0: 1.0}
    """
    strength = 1 / min(max(alike, 1e-6), _ALIKE[-1]) - 1
    a, b = share * strength, (1 - share) * strength

    def chance(right: int) -> float:
        wrong, lgamma = rollouts - right, math.lgamma
        ways = lgamma(rollouts + 1) - lgamma(right + 1) - lgamma(wrong + 1)
        each = lgamma(a + right) - lgamma(a) + lgamma(b + wrong) - lgamma(b)
        return math.exp(ways + each + lgamma(strength) - lgamma(strength + rollouts))

    return {right / rollouts: n * chance(right) for right in range(rollouts + 1)}
