"""Quantiles and tail probabilities of the normal and Student's t distributions, the sign test, incomplete beta."""

import math
from functools import lru_cache
from statistics import NormalDist


def z_quantile(p: float) -> float:
    """The normal quantile.

    >>> round(z_quantile(0.975), 6)
    1.959964
    """
    return NormalDist().inv_cdf(p)


def z_tail(z: float) -> float:
    """The two-sided normal p-value, P(|Z| ≥ |z|).

    >>> round(z_tail(1.959964), 6)
    0.05
    """
    return math.erfc(abs(z) / math.sqrt(2))


@lru_cache(maxsize=1024)
def t_quantile(p: float, df: float) -> float:
    """The quantile of Student's t.

    >>> round(t_quantile(0.975, 9), 6)
    2.262157
    """
    if p < 0.5:
        return -t_quantile(1 - p, df)
    z = z_quantile(p)
    if p == 0.5 or df > 1e6:
        return z + (z**3 + z) / (4 * df)
    low, high = z, 2 * z
    while t_tail(high, df) > 2 * (1 - p):
        low, high = high, 2 * high
    while high - low > 1e-14 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, df) > 2 * (1 - p) else (low, middle)
    return (low + high) / 2


def t_tail(t: float, df: float) -> float:
    """The two-sided p-value of Student's t, P(|T| ≥ |t|).

    >>> round(t_tail(2.262157, 9), 6)
    0.05
    """
    square = t * t
    return beta_share(df / (df + square), square / (df + square), df / 2, 0.5)


def sign_test(won: int, lost: int, seen: float = 1.0) -> float:
    """The exact two-sided p-value of the hypothesis that wins and losses are equally likely (McNemar's exact test).

    `seen` is the weight of the observed outcome in "at least as extreme".

    >>> round(sign_test(1, 5), 6), round(sign_test(1, 5, seen=0.5), 6)
    (0.21875, 0.125)
    """
    fewer, n = min(won, lost), won + lost
    if 2 * fewer == n:
        return 1.0
    whole = 2 * beta_share(0.5, 0.5, n - fewer, fewer + 1)
    if seen == 1:
        return min(1.0, whole)
    log_chance = math.lgamma(n + 1) - math.lgamma(won + 1) - math.lgamma(lost + 1) - n * math.log(2)
    return min(1.0, whole - 2 * (1 - seen) * math.exp(log_chance))


def beta_share(x: float, y: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), where y is 1 - x at full precision.

    >>> round(beta_share(0.5, 0.5, 2, 3), 4)  # 2 or more of 4 tosses
    0.6875
    """
    if x <= 0 or y <= 0:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2) and y <= (b + 1) / (
        a + b + 2
    ):  # both hold where rounding decides: then either will do
        return 1 - beta_share(y, x, b, a)
    log_x = math.log(x) if x < 0.5 else math.log1p(-y)
    log_y = math.log(y) if y < 0.5 else math.log1p(-x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * log_x + b * log_y
    return math.exp(log_front) / a / _beta_fraction(x, a, b)


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method."""
    fraction, c, d = 1.0, 1.0, 0.0
    for i in range(1, 1_000_000):
        m = i // 2
        if i % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / (1 + term * d or 1e-300)
        c = 1 + term / c or 1e-300
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return fraction
