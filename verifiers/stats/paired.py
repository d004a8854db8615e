"""Two runs on the same examples → which is better, by how much, and on which examples."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean, stdev
from typing import Any

from verifiers.stats.intervals import describe_range
from verifiers.stats.scores import TOLERANCE, check_share, finite
from verifiers.stats.student import sign_test, t_quantile, t_tail, z_quantile, z_tail

Scores = Mapping[Any, float | Iterable[float | None] | None]  # by example id, any hashable one
Range = tuple[float | None, float | None]
_MAX_DRAWS = 10_000_000  # about a second of resampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What B changed against A on the examples both scored; every difference is B - A.

    `won`, `lost` and `tied` hold the ids from B's side, the largest change first. `only_a` and `only_b` were scored in
    one run only, `unscored` in neither; none of them is used. `test` names where `p_value` comes from; `sd` is that of
    the differences, which `examples_needed(difference_sd=…)` takes.
    """

    mean_a: float | None
    mean_b: float | None
    difference: float | None
    low: float | None
    high: float | None
    bootstrap: Range
    p_value: float | None
    test: str
    sd: float | None
    examples: int
    won: tuple[Hashable, ...]
    lost: tuple[Hashable, ...]
    tied: tuple[Hashable, ...]
    only_a: tuple[Hashable, ...]
    only_b: tuple[Hashable, ...]
    unscored: tuple[Hashable, ...]
    level: float
    resamples: int

    def __str__(self) -> str:
        unused = f"{len(self.only_a)} only in A, {len(self.only_b)} only in B, {len(self.unscored)} without a score"
        if self.difference is None or self.p_value is None:
            return f"no example has a score in both runs ({unused})"
        confidence = describe_range(self.low, self.high, self.level, "+")
        bootstrap = describe_range(*self.bootstrap, self.level, "+")
        return "\n".join(
            (
                f"{self._verdict(self.difference, self.p_value)} B - A = {self.difference:+.3f} ({confidence})",
                f"p = {self.p_value:.3g} ({self.test}); bootstrap: {bootstrap}",
                f"A {self.mean_a:.3f}, B {self.mean_b:.3f}; shared examples: {self.examples} "
                f"(B won {len(self.won)}, lost {len(self.lost)}, tied {len(self.tied)})",
                f"not compared: {unused}",
            )
        )

    def _verdict(self, difference: float, p_value: float) -> str:
        if p_value >= 1 - self.level:
            return "No difference shown:"
        return "B is better:" if difference > 0 else "B is worse:"


def compare(a: Scores, b: Scores, *, level: float = 0.95, resamples: int = 2000, seed: int = 0) -> Comparison:
    """Compare run B with run A example by example; each maps an example id to its score or scores.

    >>> a = {"sum": [1, 0], "sort": [0, 0], "spell": [1, 1], "plan": [None, 0]}
    >>> b = {"sum": [1, 1], "sort": [1, 0], "spell": [1, 1], "plan": [None, None]}
    >>> result = compare(a, b)
    >>> round(result.difference, 3), result.won, result.tied, result.only_a
    (0.333, ('sum', 'sort'), ('spell',), ('plan',))
    """
    check_share(level, "level")
    if resamples != 0 and resamples < 100:
        raise ValueError(f"resamples={resamples} is too few for an interval; give 100 or more, or 0 for no bootstrap")
    scored_a, scored_b = _scored(a, "a"), _scored(b, "b")
    shared = [example for example in scored_a if example in scored_b]
    means_a = [fmean(scored_a[example]) for example in shared]
    means_b = [fmean(scored_b[example]) for example in shared]
    changes = [mean_b - mean_a for mean_a, mean_b in zip(means_a, means_b, strict=True)]
    low, high, p_value, test = _test(
        changes, [run[example] for run in (scored_a, scored_b) for example in shared], level
    )
    resamples = min(resamples, max(200, _MAX_DRAWS // len(shared))) if _vary(changes) else 0
    by_size = sorted(zip(shared, changes, strict=True), key=lambda pair: -abs(pair[1]))
    return Comparison(
        mean_a=fmean(means_a) if shared else None,
        mean_b=fmean(means_b) if shared else None,
        difference=fmean(changes) if shared else None,
        low=low,
        high=high,
        bootstrap=_bootstrap(changes, level, resamples, seed),
        p_value=p_value,
        test=test,
        sd=stdev(changes) if len(shared) > 1 else None,
        examples=len(shared),
        won=tuple(example for example, change in by_size if change > TOLERANCE),
        lost=tuple(example for example, change in by_size if change < -TOLERANCE),
        tied=tuple(example for example, change in by_size if abs(change) <= TOLERANCE),
        only_a=tuple(example for example in scored_a if example not in scored_b),
        only_b=tuple(example for example in scored_b if example not in scored_a),
        unscored=tuple(example for example in {**a, **b} if example not in scored_a and example not in scored_b),
        level=level,
        resamples=resamples,
    )


def _scored(run: Scores, name: str) -> dict[Hashable, list[float]]:
    """The examples of a run that have a score, with their scores."""
    scored: dict[Hashable, list[float]] = {}
    for example, given in run.items():
        scores = given if isinstance(given, Iterable) else [given]
        label = f"{name}[{example!r}]"
        numbers = [finite(score, label, position) for position, score in enumerate(scores) if score is not None]
        if numbers:
            scored[example] = numbers
    return scored


def _test(
    changes: Sequence[float], groups: Sequence[Sequence[float]], level: float
) -> tuple[float | None, float | None, float | None, str]:
    """The interval of the mean change, and the p-value that nothing changed with the name of its test."""
    won, lost = sum(change > TOLERANCE for change in changes), sum(change < -TOLERANCE for change in changes)
    if not changes:
        return None, None, None, "no test"
    if len(changes) > 1 and all(score in (0.0, 1.0) for group in groups for score in group):
        rollouts = fmean(map(len, groups))
        low, high, z = _right_or_wrong(changes, rollouts, level)
        if rollouts == 1:
            return low, high, sign_test(won, lost), "McNemar's exact test"
        return low, high, z_tail(z), "adjusted z test"
    if not _vary(changes):
        return None, None, sign_test(won, lost), "sign test"
    mean, se, df = fmean(changes), stdev(changes) / math.sqrt(len(changes)), len(changes) - 1
    reach = t_quantile((1 + level) / 2, df) * se
    return mean - reach, mean + reach, t_tail(mean / se, df), "paired t test"


def _vary(changes: Sequence[float]) -> bool:
    """Changes that are all alike, or only one, say nothing of how far off their mean is."""
    return bool(changes) and max(changes) - min(changes) > TOLERANCE


def _right_or_wrong(changes: Sequence[float], rollouts: float, level: float) -> tuple[float, float, float]:
    """Bonett and Price's interval for paired 0/1 scores and its z: two imagined examples, one won and one lost.

    Without them, two runs that agree everywhere would differ by ±0. They count for less the more rollouts an example
    has, as one rollout of several may be the only one to change.
    """
    n = len(changes) + 2
    center = math.fsum(changes) / n
    mean_square = (math.fsum(change * change for change in changes) + 2 / rollouts) / n
    se = math.sqrt((mean_square - center**2) / n)
    reach, mean = z_quantile((1 + level) / 2) * se, fmean(changes)
    return max(-1.0, min(mean, center - reach)), min(1.0, max(mean, center + reach)), center / se


def _bootstrap(changes: Sequence[float], level: float, resamples: int, seed: int) -> Range:
    """The middle `level` of the means of resampled examples; the same whatever order they come in.

    Resampled means vary too little where examples are few, so the tails cut off are as much smaller as Student's are
    (Hesterberg's expanded percentile interval).
    """
    if not resamples:
        return None, None
    n = len(changes)
    tail = z_tail(math.sqrt(n / (n - 1)) * t_quantile((1 + level) / 2, n - 1)) / 2
    random, ordered = Random(seed), sorted(changes)
    means = sorted(sum(random.choices(ordered, k=n)) / n for _ in range(resamples))
    cut = int(tail * resamples)
    return means[cut], means[-1 - cut]
