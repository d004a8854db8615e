"""Compares evaluations example by example: examples won and lost, differences, and verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from verifiers import stats
from verifiers.results import listed_as
from verifiers.store.comparing import Side, compare_sides, refusal_of
from verifiers.viewer.cards import env_of
from verifiers.viewer.index import FAILED, RolloutIndex
from verifiers.viewer.library import Run
from verifiers.viewer.numbers import known

VERDICTS = ("won", "lost", "tied", "only in A", "only in B", "without a score")
TRAINING = "a training samples from a different policy at each step, so runs of trainings are compared by their curves"
_KEPT_FIGURES = (
    "mean_a", "mean_b", "difference", "low", "high", "level", "p_value", "adjusted_p", "metrics", "verdict", "test",
    "examples", "failed_a", "failed_b",
)  # fmt: skip


class _Asked(msgspec.Struct):
    prompt: Any = None


def compare(a: Run, b: Run, metric: str = "reward") -> dict[str, Any]:
    """The comparison of ``vf compare``, with one row per example, largest change first; differences are B - A."""
    side_a, side_b = side_of(a), side_of(b)
    if a.is_training or b.is_training:
        raise ValueError(TRAINING)
    compared = compare_sides(side_a, side_b)
    if metric not in compared.metrics:
        raise ValueError(f"there is no metric {metric[:80]!r} in these runs")
    found = compared.metrics[metric]
    scores_a, scores_b = side_a.scores.get(metric, {}), side_b.scores.get(metric, {})
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
        "metric": metric,
        "metric_names": list(compared.metrics),
        "figures": {name: figures[name] for name in _KEPT_FIGURES},
        "verdict": found.verdict_in_words.rstrip(":"),
        "refusal": compared.refusal,
        "counts": {verdict: len(group) for group, verdict in zip(groups, verdicts, strict=True)},
        "rows": rows,
    }


def compare_many(runs: Sequence[Run], metric: str = "reward") -> dict[str, Any]:
    """Every run compared with the first in one metric, with Holm's correction over the comparisons."""
    if any(run.is_training for run in runs):
        raise ValueError(TRAINING)
    sides = [side_of(run) for run in runs]
    names = list(dict.fromkeys(name for side in sides for name in side.scores))
    if metric not in names:
        raise ValueError(f"there is no metric {metric[:80]!r} in these runs")
    base, others = sides[0], dict(zip((run.id for run in runs[1:]), sides[1:], strict=True))
    refusals = {run_id: refusal_of(base, side, _differing(base, side)) for run_id, side in others.items()}
    tested = [run_id for run_id, refusal in refusals.items() if refusal is None and not stats.is_count(metric)]
    compared = stats.compare_metrics(
        dict.fromkeys(others, base.scores.get(metric, {})),
        {run_id: side.scores.get(metric, {}) for run_id, side in others.items()},
        tested=tested,
    )
    rows = []
    for run, side in zip(runs, sides, strict=True):
        row: dict[str, Any] = {"id": run.id, "figures": [_figure(name, side) for name in names]}
        if run.id in compared:
            found = asdict(compared[run.id])
            row |= {
                "against_first": {name: found[name] for name in _KEPT_FIGURES},
                "verdict": compared[run.id].verdict_in_words.rstrip(":").replace("B is", "it is"),
                "refusal": refusals[run.id],
                "won": len(found["won"]),
                "lost": len(found["lost"]),
            }
        rows.append(row)
    return {"metric": metric, "metric_names": names, "rows": rows}


def side_of(run: Run) -> Side:
    """The scores of a run by metric and example, and the question of each example's first rollout."""
    found: Side = run.kept.get(("side", run.index.version), lambda: _read_side(run.index, env_of(run)))
    return found


def _read_side(index: RolloutIndex, env_id: str) -> Side:
    side = Side(env_id)
    with index.lock:
        columns = {"reward": index.rewards, **{listed_as(name): index.metric(name) for name in index.metrics}}
        for number, example in enumerate(index.examples):
            key = index.keys[example]
            if key not in side.questions:
                side.ask(key, _prompt(index.line(number)))
            is_failed = index.statuses[number] == FAILED
            for name, column in columns.items():
                side.score(name, key, None if is_failed else known(column[number]))
    return side


def _differing(a: Side, b: Side) -> list[Any]:
    return [key for key in a.questions if key in b.questions and a.questions[key] != b.questions[key]]


def _figure(name: str, side: Side) -> dict[str, Any]:
    scores = [(score, example) for example, group in side.scores.get(name, {}).items() for score in group]
    found = stats.mean_interval([score for score, _ in scores], [example for _, example in scores])
    is_count = stats.is_count(name)
    return {
        "name": name,
        "mean": found.mean,
        "low": None if is_count else found.low,
        "high": None if is_count else found.high,
    }


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
    scored = [reward for reward in rewards if reward is not None]
    return math.fsum(scored) / len(scored) if scored else None
