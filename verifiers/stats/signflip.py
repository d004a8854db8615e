"""The sign-flip test of the mean of paired differences, and the interval that inverts the test."""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, compress
from random import Random

from verifiers.stats.scores import TOLERANCE

SEEN = 0.75  # weight of the observed outcome in "at least as extreme"
_MOST_EXACT = 20_000  # distinct subsets up to which all are enumerated
_MOST_DRAWS = 10_000
_MOST_WORK = 8_000_000  # random numbers: about a second
_ZEROS = bytes.maketrans(b"01", b"\0\1")


class SignFlips:
    """The sign-flip test that differences are symmetric about a value.

    The mean is significantly above a value if few sign flips about it give as large a mean. This holds if few subsets
    of the differences have a mean at or below the value (Hartigan's typical values). So the means of all subsets give
    every p-value, and their quantiles give the interval: the two always agree. All subsets are enumerated if there are
    few, else a seeded sample is drawn. The empty subset, which stands for the observed signs, counts on both sides.

    Flips that give exactly the observed mean count for three quarters: if they counted fully, a few right-or-wrong
    scores would hardly ever be significant; if they counted half (mid-p), they would be too often.

    >>> test = SignFlips([1.0] * 5 + [0.0] * 6 + [-1.0])
    >>> test.p_at_most(0.0)  # 1 of 64 flips gives a larger mean, 6 the same
    0.0859375
    """

    def __init__(self, changes: Sequence[float], seed: int = 0) -> None:
        rounded = (0.0 if abs(change) <= TOLERANCE else round(change, 12) for change in changes)
        counts = Counter(rounded)
        values = sorted(counts, key=lambda value: (abs(value), value))
        if math.prod(count + 1 for count in counts.values()) <= _MOST_EXACT:
            atoms = _all_subsets([(value, counts[value]) for value in values])
            self.name = "sign-flip test"
        else:
            draws = max(1_000, min(_MOST_DRAWS, _MOST_WORK // len(counts)))
            atoms = _drawn_subsets(values, counts, draws, Random(seed))
            self.name = f"sign-flip test, {draws:,} draws"
        self.unchanged = math.fsum(weight for mean, weight in atoms if mean is None)
        known = sorted((mean, weight) for mean, weight in atoms if mean is not None)
        self.means = [mean for mean, _ in known]
        self.shares = [0.0, *accumulate(weight for _, weight in known)]

    def p_at_most(self, value: float) -> float:
        """The one-sided p-value of the hypothesis that the mean is at most this value."""
        below = self.shares[bisect_left(self.means, value - TOLERANCE)]
        return min(1.0, below + SEEN * (self.unchanged + self._at(value)))

    def p_at_least(self, value: float) -> float:
        above = self.shares[-1] - self.shares[bisect_right(self.means, value + TOLERANCE)]
        return min(1.0, above + SEEN * (self.unchanged + self._at(value)))

    def _at(self, value: float) -> float:
        start, end = bisect_left(self.means, value - TOLERANCE), bisect_right(self.means, value + TOLERANCE)
        return self.shares[end] - self.shares[start]

    def low(self, tail: float) -> float | None:
        """The value below which all means are rejected; None if none is."""
        left = tail - SEEN * self.unchanged
        if left <= 0:
            return None
        place = bisect_left(self.shares, left - 1e-12)
        return self.means[min(place, len(self.means)) - 1]

    def high(self, tail: float) -> float | None:
        left = tail - SEEN * self.unchanged
        if left <= 0:
            return None
        place = bisect_right(self.shares, self.shares[-1] - left + 1e-12)
        return self.means[max(place, 1) - 1]


Atoms = list[tuple[float | None, float]]  # (mean of a subset, or None for the empty one; its probability)


def _all_subsets(counts: Sequence[tuple[float, int]]) -> Atoms:
    """All subsets; those with the same number of each value are merged."""
    found = [(0.0, 0, 1.0)]
    for value, count in counts:
        shares = [_binomial_share(count, chosen) for chosen in range(count + 1)]
        found = [
            (total + chosen * value, size + chosen, weight * share)
            for total, size, weight in found
            for chosen, share in enumerate(shares)
        ]
    return [(_mean(total, size), weight) for total, size, weight in found]


def _drawn_subsets(values: Sequence[float], counts: Counter[float], draws: int, random: Random) -> Atoms:
    """Random subsets, each with its complement, and one entry for the observed signs."""
    singles = [value for value in values if counts[value] == 1]
    repeated = [(value, counts[value]) for value in values if counts[value] > 1]
    whole, size_of_all = math.fsum(value * counts[value] for value in values), counts.total()
    weight = 1 / (draws + 1)
    atoms: Atoms = [(None, weight)]
    for _ in range(draws // 2):
        total, size = 0.0, 0
        if singles:
            chosen = random.getrandbits(len(singles))
            digits = format(chosen, f"0{len(singles)}b").encode().translate(_ZEROS)
            total, size = sum(compress(singles, digits)), chosen.bit_count()
        for value, count in repeated:
            taken = random.getrandbits(count).bit_count()
            total, size = total + taken * value, size + taken
        atoms.append((_mean(total, size), weight))
        atoms.append((_mean(whole - total, size_of_all - size), weight))
    return atoms


def _mean(total: float, size: int) -> float | None:
    return None if not size else 0.0 if abs(total) <= TOLERANCE else total / size


def _binomial_share(n: int, chosen: int) -> float:
    if n < 1000:
        return float(math.comb(n, chosen) / 2**n)
    return math.exp(math.lgamma(n + 1) - math.lgamma(chosen + 1) - math.lgamma(n - chosen + 1) - n * math.log(2))
