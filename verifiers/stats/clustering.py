"""How strongly rollouts may cluster by example, given how often each example was solved."""

import math
from collections.abc import Mapping

from verifiers.stats.student import z_quantile

_ICCS = (*((i / 16) ** 2 for i in range(16)), 1 - 1e-6)  # intraclass correlations to try
_FEW = 5  # effective examples up to which the clustering counts as poorly known
_LOG_ODDS_SCALES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.4, 0.2)  # means to try: the log-odds of the observed one, shrunk to 0


def variance_of_mean(icc: float, rollouts: float) -> float:
    """The variance of an example's mean relative to that of one rollout; `icc` is the intraclass correlation.

    >>> variance_of_mean(0.0, 4), variance_of_mean(1.0, 4)
    (0.25, 1.0)
    """
    return icc + (1 - icc) / rollouts


def variance_inflation(solved: Mapping[float, float], rollouts: float, level: float) -> float:
    """The largest plausible variance of examples' means, relative to that of the most likely clustering.

    `solved` counts examples by the share of their `rollouts` that were right. The model is beta-binomial. A clustering
    is plausible if its likelihood, maximised over the mean, is not much below the maximum. Evenly spread wrong answers
    exclude strong clustering; a single one does not.

    >>> spread, single = {1.0: 2, 0.9375: 2, 0.875: 1}, {1.0: 4, 0.9375: 1}
    >>> round(variance_inflation(spread, 16, 0.95), 1), round(variance_inflation(single, 16, 0.95), 1)
    (2.4, 5.9)
    """
    n = math.fsum(solved.values())
    share = math.fsum(mean * times for mean, times in solved.items()) / n
    worth = 4 * n * share * (1 - share)  # n if half are right; small if nearly all are right, or nearly all wrong
    drop = min(1.0, _FEW / worth) * z_quantile((1 + level) / 2) ** 2 / 4
    fits: list[float] = []
    for icc in _ICCS:
        fits.append(_best_fit(solved, share, rollouts, icc))
        if fits[-1] < max(fits) - drop:
            break
    best = max(fits)
    last = max(i for i, fit in enumerate(fits) if fit >= best - drop)
    most = _ICCS[last]
    if last + 1 < len(fits):
        inside, outside = fits[last] - (best - drop), best - drop - fits[last + 1]
        most += (_ICCS[last + 1] - most) * inside / (inside + outside)
    likeliest = _ICCS[fits.index(best)]
    return variance_of_mean(most, rollouts) / variance_of_mean(likeliest, rollouts)


def _best_fit(solved: Mapping[float, float], share: float, rollouts: float, icc: float) -> float:
    """The log-likelihood of a clustering, maximised over means from the observed one towards 0.5."""
    log_odds, best = math.log(share / (1 - share)), -math.inf
    for scale in _LOG_ODDS_SCALES:
        fit = _log_likelihood(solved, rollouts, 1 / (1 + math.exp(-scale * log_odds)), icc)
        if fit < best:
            break
        best = fit
    return best


def _log_likelihood(solved: Mapping[float, float], rollouts: float, mean: float, icc: float) -> float:
    """The beta-binomial log-likelihood, without terms that depend on neither the mean nor the clustering."""
    if not icc:
        log_right, log_wrong = rollouts * math.log(mean), rollouts * math.log1p(-mean)
        return math.fsum([times * (seen * log_right + (1 - seen) * log_wrong) for seen, times in solved.items()])
    strength, lgamma = 1 / icc - 1, math.lgamma
    a, b = mean * strength, (1 - mean) * strength
    whole = lgamma(strength) - lgamma(strength + rollouts) - lgamma(a) - lgamma(b)
    return math.fsum(
        [
            times * (whole + lgamma(a + seen * rollouts) + lgamma(b + (1 - seen) * rollouts))
            for seen, times in solved.items()
        ]
    )


def expected_solved(share: float, icc: float, n: int, rollouts: int) -> dict[float, float]:
    """The expected number of n examples for each share of right rollouts.

    >>> {mean: round(times, 3) for mean, times in expected_solved(0.5, 0.0, 4, 2).items()}
    {0.0: 1.0, 0.5: 2.0, 1.0: 1.0}
    """
    strength = 1 / min(max(icc, 1e-6), _ICCS[-1]) - 1
    a, b = share * strength, (1 - share) * strength

    def chance(right: int) -> float:
        wrong, lgamma = rollouts - right, math.lgamma
        ways = lgamma(rollouts + 1) - lgamma(right + 1) - lgamma(wrong + 1)
        each = lgamma(a + right) - lgamma(a) + lgamma(b + wrong) - lgamma(b)
        return math.exp(ways + each + lgamma(strength) - lgamma(strength + rollouts))

    return {right / rollouts: n * chance(right) for right in range(rollouts + 1)}
