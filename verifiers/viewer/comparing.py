"""Two runs → their examples side by side: what was won, what was lost, and by how much."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from verifiers import stats
from verifiers.viewer.index import RolloutIndex

VERDICTS = ("won", "lost", "tied", "only in A", "only in B", "without a score")
_KEPT_FIGURES = ("mean_a", "mean_b", "difference", "low", "high", "p_value", "test", "examples")


def compare(a: RolloutIndex, b: RolloutIndex) -> dict[str, Any]:
    """The paired comparison, and one row an example, the largest change first; every difference is B - A."""
    scores_a, scores_b = scores_of(a), scores_of(b)
    found = stats.compare(scores_a, scores_b, resamples=0)
    groups = (found.lost, found.won, found.tied, found.only_a, found.only_b, found.unscored)
    verdicts = ("lost", "won", "tied", "only in A", "only in B", "without a score")
    rows = [
        _row(example, verdict, scores_a, scores_b)
        for group, verdict in zip(groups, verdicts, strict=True)
        for example in group
    ]
    rows.sort(key=lambda row: -abs(row["difference"] or 0.0))
    figures = asdict(found)
    return {
        "figures": {name: figures[name] for name in _KEPT_FIGURES},
        "counts": {verdict: len(group) for group, verdict in zip(groups, verdicts, strict=True)},
        "rows": rows,
    }


def scores_of(index: RolloutIndex) -> dict[int | str, list[float | None]]:
    """The rewards by example; None is a failed rollout."""
    scores: dict[int | str, list[float | None]] = {}
    with index.lock:
        for example, reward in zip(index.examples, index.rewards, strict=True):
            scores.setdefault(index.keys[example], []).append(None if math.isnan(reward) else reward)
    return scores


def _row(
    example: Any, verdict: str, a: dict[int | str, list[float | None]], b: dict[int | str, list[float | None]]
) -> dict[str, Any]:
    mean_a, mean_b = _mean(a.get(example, [])), _mean(b.get(example, []))
    return {
        "example_id": example,
        "verdict": verdict,
        "mean_a": mean_a,
        "mean_b": mean_b,
        "n_a": len(a.get(example, [])),
        "n_b": len(b.get(example, [])),
        "difference": None if mean_a is None or mean_b is None else mean_b - mean_a,
    }


def _mean(rewards: list[float | None]) -> float | None:
    known = [reward for reward in rewards if reward is not None]
    return math.fsum(known) / len(known) if known else None
