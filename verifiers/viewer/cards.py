"""The data for a run's line in the list: names, status, reward with its interval, duration."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from verifiers import stats
from verifiers.viewer.index import FAILED, RolloutIndex
from verifiers.viewer.library import Run
from verifiers.viewer.numbers import as_number, known

SPARKLINE = 60  # points of a training in the list of runs
MAX_TAGS = 12
MAX_AGGREGATES = 50
MAX_KEPT = 4096  # runs whose summaries are cached


class Summaries:
    """A cache of the rewards of runs that were read; entries of runs that have changed since are not used."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[str, dict[str, Any]]] = OrderedDict()

    def get(self, run: Run) -> dict[str, Any] | None:
        stamp, found = self._kept.get(run.id, ("", {}))
        return found if stamp == run.stamp() else None

    def keep(self, run: Run) -> None:
        """Store the summary of a run if its index has read the whole file."""
        if run.index.share_read < 1.0 or not len(run.index):
            return
        self._kept[run.id] = run.stamp(), summary_of(run.index)
        self._kept.move_to_end(run.id)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)


def summary_of(index: RolloutIndex) -> dict[str, Any]:
    with index.lock:
        rewards = [known(value) for value in index.rewards]
        found = stats.mean_interval(rewards, index.examples)
        return {
            "rollouts": len(index),
            "failed": index.statuses.count(FAILED),
            "reward": found.mean,
            "low": found.low,
            "high": found.high,
        }


def run_card(run: Run, summary: dict[str, Any] | None = None) -> dict[str, Any]:
    """A run in the list: its metadata, completed with what has been read of its rollouts."""
    metadata, problem = run.read_metadata()
    index = run.index
    if summary is None and len(index) and index.share_read == 1.0:
        summary = run.kept.get(("summary", index.version), lambda: summary_of(index))
    card: dict[str, Any] = {
        **_names(run, metadata),
        "date": text(metadata.get("date")),
        "changed": run.changed_at() or None,
        "kind": "training" if run.is_training else "evaluation",
        "is_live": run.is_live,
        "is_finished": run.is_finished,
        "rollouts": _count(metadata.get("num_rollouts")),
        "failed": _count(metadata.get("num_failed")),
        "reward": figure(metadata.get("avg_reward")),
        "low": None,
        "high": None,
        "duration_ms": figure(metadata.get("time_ms")),
        "tags": _tags(metadata.get("tags")),
        "note": text(metadata.get("note"))[:500],
        "aggregates": _aggregates(metadata.get("aggregates")),
        "problem": problem,
    }
    card |= summary or {}
    if isinstance(until := metadata.get("until"), dict) and figure(until.get("low")) is not None:
        card |= {"low": figure(until["low"]), "high": figure(until.get("high"))}
    if run.is_training:
        card |= _training_card(run, card)
    card["status"] = _status(card)
    if card["duration_ms"] is None:
        card["duration_ms"] = _time_since(card["date"], run.changed_at())
    return card


def safe_card(run: Run, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The card of a folder with any content: if reading it raises, a card with the error, so that the list is shown."""
    try:
        return make()
    except Exception as error:  # a folder may contain anything
        return {
            **_names(run, {}),
            **dict.fromkeys(("changed", "rollouts", "failed", "reward", "low", "high", "duration_ms")),
            **dict.fromkeys(("is_live", "is_finished"), False),
            **dict.fromkeys(("date", "note"), ""),
            "kind": "evaluation",
            "status": "damaged",
            "tags": [],
            "aggregates": [],
            "problem": f"this run cannot be read: {type(error).__name__}: {error}"[:500],
        }


def env_of(run: Run) -> str:
    return text(run.metadata.get("env_id")) or run.path.parent.name.partition("--")[0]


def _names(run: Run, metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": run.id,
        "name": run.path.name,
        "folder": run.path.parent.name,
        "env_id": text(metadata.get("env_id")) or run.path.parent.name.partition("--")[0],
        "model": text(metadata.get("model")) or run.path.parent.name.partition("--")[2],
    }


def _training_card(run: Run, card: dict[str, Any]) -> dict[str, Any]:
    metrics = run.metrics
    metrics.refresh()
    if not metrics.steps:
        return {"step": None, "rewards": []}
    name = "reward" if "reward" in metrics.series else "loss"
    times = [value for value in metrics.series.get("time", ()) if not math.isnan(value)]
    first_s = next((value for value in metrics.series.get("step_s", ()) if not math.isnan(value)), 0.0)
    took_s = times[-1] - times[0] + first_s if times else math.nan
    return {
        "step": metrics.steps[-1],
        "reward": metrics.last("reward"),
        "low": metrics.last("reward_low"),
        "high": metrics.last("reward_high"),
        "loss": metrics.last("loss"),
        "rewards": metrics.outline(name, SPARKLINE),
        "duration_ms": None if math.isnan(took_s) else 1000 * max(took_s, 0.0),
        "rollouts": card["rollouts"],
    }


def _status(card: dict[str, Any]) -> str:
    if card["problem"]:
        return "damaged"
    if card["is_live"]:
        return "live"
    return "finished" if card["is_finished"] else "unfinished"


def _time_since(date: str, changed_at: float) -> float | None:
    """The duration of an unfinished run in ms: from the start in its metadata to its last change."""
    try:
        began = datetime.fromisoformat(date).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
    return 1000 * (changed_at - began) if changed_at > began else None


def _tags(value: Any) -> list[str]:
    return [tag[:60] for tag in value if isinstance(tag, str)][:MAX_TAGS] if isinstance(value, list) else []


def _aggregates(found: Any) -> list[dict[str, Any]]:
    """The saved aggregate metrics; they are not recomputed, because that would run the environment's code."""
    named = [(name, one) for name, one in found.items() if isinstance(one, dict)] if isinstance(found, dict) else []
    return [
        {
            "name": str(name)[:200],
            "mean": figure(one.get("value")),
            "low": figure(one.get("low")),
            "high": figure(one.get("high")),
            "error": text(one.get("error"))[:200],
        }
        for name, one in named[:MAX_AGGREGATES]
    ]


def text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Any) -> int | None:
    return value if type(value) is int else None


def figure(value: Any) -> float | None:
    return known(as_number(value)) if type(value) in (int, float) else None


def known_column(column: Sequence[float]) -> list[float | None]:
    return [None if value != value else value for value in column]  # NaN alone is not itself
