"""Compares two runs: which is better, by how much, and on which examples; paired by example, or as two samples."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from verifiers.stats.evidence import Evidence, paired_evidence, unpaired_evidence
from verifiers.stats.intervals import describe_range
from verifiers.stats.scores import TOLERANCE, check_share, finite

Scores = Mapping[Any, float | Iterable[float | None] | None]  # by example id, which may be any hashable

_COUNT_ENDINGS = ("_calls", "_count", "_counts", "_tokens", "_turns", "_retries", "_cells", "_steps", "_faults")
_COUNT_NAMES = ("turns", "retries", "cells", "tokens", "length", "steps", "calls", "faults")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The change from A to B; every difference is B - A.

    `verdict` is "better", "worse", "no difference shown" or, with a `margin`, "not worse"; None if the metric was not
    tested. `won`, `lost` and `tied` contain example ids from B's side, the largest change first. Examples in `only_a`
    and `only_b` were scored in one run only, those in `unscored` in neither; a paired comparison uses none of them.
    The interval from `low` to `high` at `level`, and `p_value`, come from `test`. If `metrics` were tested at once,
    Holm's correction has raised `level` and computed `adjusted_p`. `sd` is the standard deviation of the differences.
    """

    mean_a: float | None
    mean_b: float | None
    difference: float | None
    low: float | None
    high: float | None
    p_value: float | None
    adjusted_p: float | None
    verdict: str | None
    test: str
    margin: float | None
    is_paired: bool
    sd: float | None
    examples: int
    won: tuple[Hashable, ...]
    lost: tuple[Hashable, ...]
    tied: tuple[Hashable, ...]
    only_a: tuple[Hashable, ...]
    only_b: tuple[Hashable, ...]
    unscored: tuple[Hashable, ...]
    failed_a: int
    failed_b: int
    level: float
    metrics: int

    def __str__(self) -> str:
        unused = f"{len(self.only_a)} only in A, {len(self.only_b)} only in B, {len(self.unscored)} without a score"
        if self.difference is None:
            return f"no example has a score in both runs ({unused})"
        lines = [f"{self.verdict_in_words} {_where(self.difference, self.low, self.high, self.level)}"]
        if self.p_value is not None and self.adjusted_p is not None:
            among = f"; corrected for {self.metrics} metrics (Holm): {self.adjusted_p:.3g}" if self.metrics > 1 else ""
            lines.append(f"p = {self.p_value:.3g} ({self.test}){among}")
        means = f"A {self.mean_a:.3f}, B {self.mean_b:.3f}"
        if self.is_paired:
            won = f"(B won {len(self.won)}, lost {len(self.lost)}, tied {len(self.tied)})"
            lines += [f"{means}; shared examples: {self.examples} {won}", f"not compared: {unused}"]
        else:
            lines.append(f"{means}; compared as two samples of examples, not example by example")
        if self.failed_a or self.failed_b:
            lines.append(f"failed rollouts, left out: {self.failed_a} in A, {self.failed_b} in B")
        return "\n".join(lines)

    @property
    def verdict_in_words(self) -> str:
        """The verdict as the beginning of a report."""
        margin = "" if self.margin is None else f"{self.margin:g}"
        return {
            None: "No verdict:",
            "better": "B is better:",
            "worse": "B is worse:",
            "not worse": f"B is not worse by {margin} or more:",
            "no difference shown": f"Not shown that B is not worse by {margin} or more:"
            if margin
            else "No difference shown:",
        }[self.verdict]


def compare(
    a: Scores,
    b: Scores,
    *,
    level: float = 0.95,
    margin: float | None = None,
    paired: bool = True,
    seed: int = 0,
) -> Comparison:
    """Compare run B with run A; each maps an example id to its score or scores.

    Runs are compared example by example, or with `paired=False` as two samples of examples. With a `margin`, the
    comparison also asks whether B is worse by less than that.

    >>> a = {"sum": [1, 0], "sort": [0, 0], "spell": [1, 1], "plan": [None, 0]}
    >>> b = {"sum": [1, 1], "sort": [1, 0], "spell": [1, 1], "plan": [None, None]}
    >>> result = compare(a, b)
    >>> round(result.difference, 3), result.won, result.tied, result.only_a
    (0.333, ('sum', 'sort'), ('spell',), ('plan',))
    """
    (found,) = compare_metrics({"": a}, {"": b}, level=level, margin=margin, paired=paired, seed=seed).values()
    return found


def compare_metrics(
    a: Mapping[str, Scores],
    b: Mapping[str, Scores],
    *,
    tested: Iterable[str] | None = None,
    level: float = 0.95,
    margin: float | None = None,
    paired: bool = True,
    seed: int = 0,
) -> dict[str, Comparison]:
    """Compare two runs in several metrics at once; each run maps a metric to the scores of its examples.

    Only `tested` metrics (default: all except counts) get a verdict. Holm's correction limits the chance that any
    verdict is wrong to 1 - level: each metric's test and interval use the level of its Holm step. A metric with the
    same scores as an earlier one is not tested again.

    >>> a, b = dict.fromkeys(range(8), 0), dict.fromkeys(range(8), 1)
    >>> found = compare_metrics({"reward": a, "num_turns": a}, {"reward": b, "num_turns": b})
    >>> found["reward"].verdict, found["num_turns"].verdict
    ('better', None)
    """
    check_share(level, "level")
    if margin is not None and not 0 <= margin < math.inf:
        raise ValueError(f"margin={margin!r} must be a finite number of 0 or more: how much worse B may be")
    names = [*a, *(name for name in b if name not in a)]
    wanted = {name for name in names if not is_count(name)} if tested is None else set(tested)
    pairs = {name: Pair(a.get(name, {}), b.get(name, {}), paired, seed, level) for name in names}
    ranked = _ranked({name: pair for name, pair in pairs.items() if name in wanted and pair.evidence is not None})
    levels, adjusted = _holm(ranked, level)
    same = {name: first for first, pair, _ in ranked for name in wanted if pairs[name].has_same_scores(pair)}
    found = {}
    for name, pair in pairs.items():
        first = same.get(name)
        if first is None:
            found[name] = pair.comparison(level, margin)
        else:
            found[name] = pair.comparison(levels[first], margin, adjusted[first], len(ranked))
    return found


def is_count(name: str) -> bool:
    """Whether a metric is a count, judging by its name: more turns, for example, are neither better nor worse.

    >>> is_count("num_turns"), is_count("total_tool_calls"), is_count("exact")
    (True, True, False)
    """
    return name.startswith("num_") or name in _COUNT_NAMES or name.endswith(_COUNT_ENDINGS)


class Pair:
    """The scores of two runs in one metric, the examples they share, and the test that applies."""

    def __init__(self, a: Scores, b: Scores, paired: bool, seed: int, level: float) -> None:
        self.all_ids = {**a, **b}
        self.a, self.failed_a = _scored(a, "a")
        self.b, self.failed_b = _scored(b, "b")
        self.is_paired = paired
        self.shared = [example for example in self.a if example in self.b]
        self.groups_a = [self.a[example] for example in self.shared] if paired else list(self.a.values())
        self.groups_b = [self.b[example] for example in self.shared] if paired else list(self.b.values())
        self.evidence: Evidence | None = None
        if self.groups_a and self.groups_b:
            find = paired_evidence if paired else unpaired_evidence
            self.evidence = find(self.groups_a, self.groups_b, seed=seed, level=level)

    def has_same_scores(self, other: "Pair") -> bool:
        return self is other or (self.a == other.a and self.b == other.b)

    def comparison(
        self, level: float, margin: float | None, adjusted_p: float | None = None, metrics: int = 1
    ) -> Comparison:
        """The result at one level; without `adjusted_p` the metric is not tested and gets no verdict."""
        means_a, means_b = [*map(fmean, self.groups_a)], [*map(fmean, self.groups_b)]
        changes = {example: fmean(self.b[example]) - fmean(self.a[example]) for example in self.shared}
        by_size = sorted(self.shared, key=lambda example: -abs(changes[example]))
        low = high = p_value = None
        if self.evidence is not None:
            low, high = self.evidence.interval(level)
            p_value = self.evidence.p_value
        found = Comparison(
            mean_a=fmean(means_a) if means_a else None,
            mean_b=fmean(means_b) if means_b else None,
            difference=fmean(means_b) - fmean(means_a) if means_a and means_b else None,
            low=low,
            high=high,
            p_value=p_value if adjusted_p is not None else None,
            adjusted_p=adjusted_p,
            verdict=None,
            test=self.evidence.name if self.evidence is not None else "no test",
            margin=margin,
            is_paired=self.is_paired,
            sd=stdev(changes.values()) if len(changes) > 1 else None,
            examples=len(self.shared),
            won=tuple(example for example in by_size if changes[example] > TOLERANCE),
            lost=tuple(example for example in by_size if changes[example] < -TOLERANCE),
            tied=tuple(example for example in by_size if abs(changes[example]) <= TOLERANCE),
            only_a=tuple(example for example in self.a if example not in self.b),
            only_b=tuple(example for example in self.b if example not in self.a),
            unscored=tuple(example for example in self.all_ids if example not in self.a and example not in self.b),
            failed_a=self.failed_a,
            failed_b=self.failed_b,
            level=level,
            metrics=metrics,
        )
        return replace(found, verdict=_verdict(found))


def _verdict(found: Comparison) -> str | None:
    """The verdict of the interval and the test, which agree: 0 is outside the interval if p < 1 - level."""
    if found.p_value is None or found.difference is None:
        return None
    is_shown = found.p_value < 1 - found.level
    if is_shown and found.difference > 0:
        return "better"
    if found.margin is not None and found.low is not None and found.low > -found.margin:
        return "not worse"
    return "worse" if is_shown else "no difference shown"


def _ranked(pairs: Mapping[str, Pair]) -> list[tuple[str, Pair, float]]:
    """The metrics to test, smallest p-value first; of metrics with the same scores, only the first."""
    chosen: list[tuple[str, Pair, float]] = []
    for name, pair in pairs.items():
        if pair.evidence is not None and not any(pair.has_same_scores(other) for _, other, _ in chosen):
            chosen.append((name, pair, pair.evidence.p_value))
    return sorted(chosen, key=lambda item: item[2])


def _holm(ranked: Sequence[tuple[str, Pair, float]], level: float) -> tuple[dict[str, float], dict[str, float]]:
    """Holm's level and adjusted p-value of each metric; after the first that is not significant, none is."""
    levels, adjusted = {}, {}
    largest, kept_level = 0.0, None
    for turn, (name, _, p_value) in enumerate(ranked):
        left = len(ranked) - turn
        largest = max(largest, min(1.0, left * p_value))
        own_level = 1 - (1 - level) / left
        levels[name] = kept_level or own_level
        adjusted[name] = largest
        if kept_level is None and p_value >= 1 - own_level:
            kept_level = own_level
    return levels, adjusted


def shared_scores(a: Scores, b: Scores) -> tuple[list[list[float]], list[list[float]]]:
    """The scores in A and in B of each example that is scored in both."""
    scored_a, scored_b = _scored(a, "a")[0], _scored(b, "b")[0]
    shared = [example for example in scored_a if example in scored_b]
    return [scored_a[example] for example in shared], [scored_b[example] for example in shared]


def _scored(run: Scores, name: str) -> tuple[dict[Hashable, list[float]], int]:
    """The scores of each example that has any, and the number of rollouts without a score."""
    scored: dict[Hashable, list[float]] = {}
    failed = 0
    for example, given in run.items():
        scores = list(given) if isinstance(given, Iterable) else [given]
        label = f"{name}[{example!r}]"
        numbers = [finite(score, label, position) for position, score in enumerate(scores) if score is not None]
        failed += len(scores) - len(numbers)
        if numbers:
            scored[example] = numbers
    return scored, failed


def _where(difference: float, low: float | None, high: float | None, level: float) -> str:
    return f"B - A = {difference:+.3f} ({describe_range(low, high, level, '+')})"
