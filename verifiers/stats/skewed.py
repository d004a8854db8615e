"""An interval for the mean of values that may be skewed: Student's t, corrected for skewness."""

import math
from collections.abc import Sequence
from statistics import fmean

from verifiers.stats.student import t_quantile

_SKEWNESS_FACTOR = 1.25  # the skewness of a small sample underestimates that of its distribution


def skewed_range(values: Sequence[float], level: float) -> tuple[float, float]:
    """The interval for the mean of independent values that are not all equal.

    The t interval is too short on the side of the long tail. Hall's transformation of the t statistic removes the
    skewness; each end is the farther one of the two intervals'. There is one degree of freedom less than usual,
    because the skewness is estimated too.

    >>> low, high = skewed_range([0.0, 0.1, 0.1, 0.2, 0.9], 0.95)
    >>> round(low, 3), round(high, 3)
    (-0.259, 1.301)
    """
    n, mean = len(values), fmean(values)
    square = math.fsum((value - mean) ** 2 for value in values)
    se = math.sqrt(square / (n - 1) / n)
    critical = t_quantile((1 + level) / 2, max(1.0, n - 2))
    low, high = -critical, critical
    if n > 2:
        scale = math.sqrt(square / n)
        skewness = math.fsum(((value - mean) / scale) ** 3 for value in values) / n
        a = _SKEWNESS_FACTOR * skewness * math.sqrt(n * (n - 1)) / (n - 2) / (3 * math.sqrt(n))
        low, high = min(low, -_inverse_hall(critical, a)), max(high, -_inverse_hall(-critical, a))
    return mean + low * se, mean + high * se


def _inverse_hall(y: float, a: float) -> float:
    """The t at which Hall's transformation t + a·t² + a²·t³/3 + a/2 equals y."""
    if abs(a) < 1e-9:
        return y
    return (math.cbrt(1 + 3 * a * (y - a / 2)) - 1) / a
