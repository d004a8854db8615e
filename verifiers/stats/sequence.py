"""A confidence sequence: an interval for a mean that stays valid while scores arrive, so a run may stop at any time."""

import math

from verifiers.stats.scores import TOLERANCE, check_share

_MOST_BET = 0.75  # the largest share of the capital to bet on one score
_SURELY_TOO_FEW = 0.7  # share of the scores that will be needed at the current variance
_STEPS = 30  # of the bisection


class ConfidenceSequence:
    """An interval for the mean of bounded scores that is valid at all times simultaneously, with probability `level`.

    An interval for a number of scores fixed in advance is wrong too often if a run is stopped once the interval looks
    good. This one is the betting sequence of Waudby-Smith and Ramdas (2024): against each possible mean, one bettor
    bets that scores are larger and one that they are smaller, and each bet depends on earlier scores only. If the mean
    is the true one, the probability that either ever multiplies the capital by 2 / (1 - level) is at most 1 - level.
    The interval consists of the means at which neither has. It requires only that scores are within the bounds and
    that each has the same mean given the earlier ones, as with examples in random order. `until` is the half width to
    stop at: bets are optimised for it, but the interval is valid for any bets.

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
        self._bets: list[float] = []
        self._total, self._square = 0.5, 0.25  # one pseudo-score in the middle, so that the first bet is finite
        self._goal = math.log(2 / (1 - level))

    def add(self, score: float) -> None:
        """Add the next score; a score outside the bounds is a ValueError."""
        least, most = self.bounds
        if not least - TOLERANCE <= score <= most + TOLERANCE:
            raise ValueError(f"a score of {score!r} is outside the bounds {least:g} to {most:g}")
        x = min(1.0, max(0.0, (score - least) / (most - least)))
        self.n += 1
        self._bets.append(self._reach / (self._square / self.n + self._reach**2))
        self._scores.append(x)
        self._total += x
        self._square += (x - self._total / (self.n + 1)) ** 2

    @property
    def mean(self) -> float | None:
        """The mean of the scores so far."""
        least, most = self.bounds
        return least + (most - least) * math.fsum(self._scores) / self.n if self.n else None

    def range(self) -> tuple[float, float]:
        """The interval from the scores so far."""
        least, most = self.bounds
        low = self._edge(self._scores)
        high = 1 - self._edge([1 - x for x in self._scores])
        return least + low * (most - least), least + high * (most - least)

    @property
    def is_reached(self) -> bool:
        """Whether the interval is narrow enough; it is computed only if there are enough scores for that."""
        spread = self._square / (self.n + 1) + self._reach**2
        if self.n < _SURELY_TOO_FEW * 2 * self._goal * spread / self._reach**2:
            return False
        low, high = self.range()
        return (high - low) / 2 <= self.until

    def _edge(self, scores: list[float]) -> float:
        """The largest mean at which the bettor on larger scores has reached the goal; capital falls with it."""
        if not scores or self._capital(scores, 0.0) < self._goal:
            return 0.0
        low, high = 0.0, 1.0
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._capital(scores, middle) >= self._goal else (low, middle)
        return low

    def _capital(self, scores: list[float], mean: float) -> float:
        """The logarithm of the capital after betting against this mean."""
        most = _MOST_BET / mean if mean > 0 else math.inf
        return math.fsum(math.log1p(min(bet, most) * (x - mean)) for bet, x in zip(self._bets, scores, strict=True))
