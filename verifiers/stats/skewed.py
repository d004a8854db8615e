"""Values that may be skewed → an interval of their mean: Student's t, corrected for skewness."""

import math
from collections.abc import Sequence
from statistics import fmean

from verifiers.stats.student import t_quantile

_UNSEEN = 1.25  # few values show too little of the skewness that they were drawn with


def skewed_range(values: Sequence[float], level: float) -> tuple[float, float]:
    """The interval of the mean of independent values that are not all alike.

    The t interval reaches too little to the side of the long tail. Hall's transformation of the t statistic takes the
    skewness out; each end is the farther one of the two. As the skewness is estimated as well as the spread, there is
    one degree of freedom less.

    >>> low, high = skewed_range([0.0, 0.1, 0.1, 0.2, 0.9], 0.95)
    >>> round(low, 3), round(high, 3)
    (-0.259, 1.301)
    """
    n, mean = len(values), fmean(values)
    square = math.fsum((value - mean) ** 2 for value in values)
    se = math.sqrt(square / (n - 1) / n)
    reach = t_quantile((1 + level) / 2, max(1.0, n - 2))
    low, high = -reach, reach
    if n > 2:
        scale = math.sqrt(square / n)
        skewness = math.fsum(((value - mean) / scale) ** 3 for value in values) / n
        bend = _UNSEEN * skewness * math.sqrt(n * (n - 1)) / (n - 2) / (3 * math.sqrt(n))
        low, high = min(low, -_unbent(reach, bend)), max(high, -_unbent(-reach, bend))
    return mean + low * se, mean + high * se


def _unbent(y: float, bend: float) -> float:
    """The t at which Hall's t + bend·t² + bend²·t³/3 + bend/2 is y."""
    if abs(bend) < 1e-9:
        return y
    return (math.cbrt(1 + 3 * bend * (y - bend / 2)) - 1) / bend
