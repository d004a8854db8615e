"""Scores as they come → an interval of their mean that may be looked at at any time, and stopped at."""

import math

from verifiers.stats.scores import TOLERANCE, check_share

_MOST_BET = 0.75  # of the capital, on one score
_SURELY_TOO_FEW = 0.7  # of the scores that are needed if they go on to vary as before
_STEPS = 30  # halvings of an interval


class ConfidenceSequence:
    """The interval of a mean of bounded scores that holds at every moment at once, with a chance of `level`.

    An interval for a number of scores fixed in advance is wrong too often if one looks again and again and stops when
    it pleases. This one is the betting sequence of Waudby-Smith and Ramdas (2024): against each possible mean stands a
    gambler who bets on the scores being larger, and one who bets on their being smaller, each with a stake that depends
    on earlier scores only. Were the mean the true one, neither would ever multiply his money by 2 / (1 - level), except
    with a chance of 1 - level. The interval has the means at which neither has. All it needs is that scores lie within
    the bounds, and that each has the mean in question, whatever came before: examples in a random order. `until` is the
    half width one wants to stop at: stakes are chosen to be best there, and the interval holds whatever they are.

    >>> sequence = ConfidenceSequence(until=0.1)
    >>> for score in [1, 0, 1, 1] * 50:
    ...     sequence.add(score)
    >>> low, high = sequence.range()
    >>> round(low, 2), round(high, 2)
    (0.65, 0.82)
    """

    def __init__(self, *, until: float, bounds: tuple[float, float] = (0.0, 1.0), level: float = 0.95) -> None:
        check_share(level, "level")
        if not 0 < until < math.inf:
            raise ValueError(f"until={until!r} must be a positive number, such as 0.02 for ±0.02")
        least, most = bounds
        if not -math.inf < least < most < math.inf:
            raise ValueError(f"bounds={bounds!r} must be two finite numbers, the smaller first")
        self.bounds, self.level, self.until = (float(least), float(most)), level, until
        self._reach = until / (most - least)
        self.n = 0
        self._scores: list[float] = []
        self._stakes: list[float] = []
        self._total, self._square = 0.5, 0.25  # one imagined score in the middle, so that the first stake is finite
        self._goal = math.log(2 / (1 - level))

    def add(self, score: float) -> None:
        """Take in the next score; one outside the bounds is refused."""
        least, most = self.bounds
        if not least - TOLERANCE <= score <= most + TOLERANCE:
            raise ValueError(f"a score of {score!r} lies outside the bounds {least:g} to {most:g}")
        x = min(1.0, max(0.0, (score - least) / (most - least)))
        self.n += 1
        self._stakes.append(self._reach / (self._square / self.n + self._reach**2))
        self._scores.append(x)
        self._total += x
        self._square += (x - self._total / (self.n + 1)) ** 2

    @property
    def mean(self) -> float | None:
        """The mean of the scores so far."""
        least, most = self.bounds
        return least + (most - least) * math.fsum(self._scores) / self.n if self.n else None

    def range(self) -> tuple[float, float]:
        """The interval by the scores so far."""
        least, most = self.bounds
        low = self._edge(self._scores)
        high = 1 - self._edge([1 - x for x in self._scores])
        return least + low * (most - least), least + high * (most - least)

    @property
    def is_reached(self) -> bool:
        """Whether the interval is as narrow as wanted; it is only worked out where it can be."""
        spread = self._square / (self.n + 1) + self._reach**2
        if self.n < _SURELY_TOO_FEW * 2 * self._goal * spread / self._reach**2:
            return False
        low, high = self.range()
        return (high - low) / 2 <= self.until

    def _edge(self, scores: list[float]) -> float:
        """The largest mean below which the gambler on larger scores has reached the goal; his money falls with it."""
        if not scores or self._capital(scores, 0.0) < self._goal:
            return 0.0
        low, high = 0.0, 1.0
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._capital(scores, middle) >= self._goal else (low, middle)
        return low

    def _capital(self, scores: list[float], mean: float) -> float:
        """The logarithm of his money were this the mean."""
        most = _MOST_BET / mean if mean > 0 else math.inf
        return math.fsum(
            math.log1p(min(stake, most) * (x - mean)) for stake, x in zip(self._stakes, scores, strict=True)
        )
