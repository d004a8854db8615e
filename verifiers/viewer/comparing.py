"""Two runs → their examples side by side: what was won, what was lost, and by how much."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import msgspec

from verifiers.store.comparing import Side, compare_sides
from verifiers.viewer.index import FAILED, RolloutIndex
from verifiers.viewer.numbers import known

VERDICTS = ("won", "lost", "tied", "only in A", "only in B", "without a score")
_KEPT_FIGURES = (
    "mean_a", "mean_b", "difference", "low", "high", "level", "p_value", "adjusted_p", "metrics", "verdict", "test",
    "examples", "failed_a", "failed_b",
)  # fmt: skip


class _Asked(msgspec.Struct):
    prompt: Any = None


def compare(a: RolloutIndex, b: RolloutIndex) -> dict[str, Any]:
    """The comparison that ``vf compare`` makes, and one row an example, the largest change first; all is B - A."""
    side_a, side_b = side_of(a), side_of(b)
    compared = compare_sides(side_a, side_b)
    found = compared.metrics["reward"]
    scores_a, scores_b = side_a.scores["reward"], side_b.scores["reward"]
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
        "verdict": found.verdict_in_words.rstrip(":"),
        "refusal": compared.refusal,
        "counts": {verdict: len(group) for group, verdict in zip(groups, verdicts, strict=True)},
        "rows": rows,
    }


def side_of(index: RolloutIndex) -> Side:
    """The scores of a run by metric and example, and what the first rollout of each example was asked."""
    side = Side()
    with index.lock:
        columns = {"reward": index.rewards, **{name: index.metric(name) for name in index.metrics}}
        for number, example in enumerate(index.examples):
            key = index.keys[example]
            if key not in side.questions:
                side.ask(key, _prompt(index.line(number)))
            is_failed = index.statuses[number] == FAILED
            for name, column in columns.items():
                side.score(name, key, None if is_failed else known(column[number]))
    return side


def _prompt(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line, type=_Asked).prompt
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _row(
    example: Any, verdict: str, a: dict[Any, list[float | None]], b: dict[Any, list[float | None]]
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
