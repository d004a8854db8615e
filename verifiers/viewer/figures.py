"""The data for the pages of a run: means with intervals, distributions, causes of failure, pass@k."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from verifiers import stats
from verifiers.results import listed_as
from verifiers.store.record import read_usage
from verifiers.types import Usage
from verifiers.viewer.cards import figure, known_column, run_card
from verifiers.viewer.index import FAILED, STATUSES, Names, RolloutIndex
from verifiers.viewer.library import Run

MAX_BARS = 12  # distinct values that get a bar each
RANGES = 24
SHOWN = 50  # the maximum number of listed tasks, causes and stop conditions


def run_page(run: Run) -> dict[str, Any]:
    """The properties of a run and how much of it has been read; `run_figures` has the metrics."""
    index = run.index
    with index.lock:
        return {
            **run_card(run),
            "metadata": run.metadata,
            "version": index.version,
            "stamp": run.stamp(),
            "share_read": index.share_read,
            "rollouts": len(index),
            "examples": len(index.keys),
            "failed": index.statuses.count(FAILED),
            "statuses": [[STATUSES[code], count] for code, count in sorted(Counter(index.statuses).items())],
            "truncated": sum(index.truncated),
            "tasks": _counted(index.tasks, index.task_names),
            "stops": _counted(index.stops, index.stop_names),
            "causes": [item for item in _counted(index.causes, index.cause_names) if item[0]],
            "steps": step_counts(index.steps),
            "metric_names": list(index.metrics),
            # Includes failed rollouts that were rerun; their usage is in the metadata.
            "usage": asdict(index.usage + (read_usage(run.metadata.get("retried_usage")) or Usage())),
            "has_advantages": any(not math.isnan(value) for value in index.advantages[:1000]),
            "notices": notices(run),
        }


def notices(run: Run) -> list[str]:
    """Problems of the folder, as sentences."""
    index, found = run.index, []
    metadata, problem = run.read_metadata()
    if problem:
        found.append(problem)
    if isinstance(metadata.get("until"), dict) and metadata["until"].get("reason"):
        found.append(str(metadata["until"]["reason"]))
    if index.trouble is not None:
        found.append(f"results.jsonl cannot be read: {index.trouble}")
    elif not run.results_path.is_file() and not run.is_training:  # supervised fine-tuning has no rollouts
        found.append("results.jsonl is missing: no rollout has finished, or the file was removed")
    if index.damaged:
        where = ", ".join(f"line {item['line']} ({item['reason']})" for item in index.damaged_lines[:3])
        found.append(
            f"{index.damaged} damaged line(s) of results.jsonl cannot be read and are left out: {where}"
            f"{' and more' if index.damaged > 3 else ''}; resuming the run moves them to damaged.txt"
        )
    if run.metrics.damaged:
        found.append(f"{run.metrics.damaged} line(s) of metrics.jsonl cannot be read and are left out")
    if index.has_more_metrics:
        found.append(f"there are more than {len(index.metrics)} metrics; only the first ones are shown")
    return found


def run_figures(index: RolloutIndex, until: Any = None) -> dict[str, Any]:
    """All metrics over all scored rollouts. ``until`` is the saved result of an early stop, with its own interval."""
    with index.lock:
        examples = index.examples
        rewards = known_column(index.rewards)
        columns = {"reward": rewards, **{listed_as(name): known_column(index.metric(name)) for name in index.metrics}}
        figures = [{"name": name, **_interval(name, column, examples)} for name, column in columns.items()]
        if isinstance(until, dict) and figure(until.get("low")) is not None:
            figures[0] |= {"low": figure(until["low"]), "high": figure(until.get("high"))}
        return {
            "version": index.version,
            "figures": figures,
            "mean_with_failures": _with_failures(rewards, examples, index.statuses),
            "histogram": histogram([reward for reward in rewards if reward is not None]),
            "pass_at_k": _pass_at_k(rewards, examples, index.repeats),
            "by_task": _by_task(index, rewards),
            "time_ms": _spread(index.times_ms),
            "tokens": _spread(index.tokens),
        }


def _interval(name: str, column: Sequence[float | None], examples: Sequence[int]) -> dict[str, Any]:
    found = stats.mean_interval(column, examples)
    shown = [value for value in column if value is not None]
    return {
        "mean": found.mean,
        "low": None if stats.is_count(name) else found.low,
        "high": None if stats.is_count(name) else found.high,
        "n": found.n,
        "least": min(shown, default=None),
        "most": max(shown, default=None),
        "histogram": histogram(shown),
    }


def histogram(values: Sequence[float]) -> list[dict[str, Any]]:
    """Counts by value if there are few values, else in equal ranges.

    >>> histogram([0.0, 1.0, 1.0])
    [{'low': 0.0, 'high': 0.0, 'count': 1}, {'low': 1.0, 'high': 1.0, 'count': 2}]
    """
    counts = Counter(round(value, 9) for value in values)  # sums of weights differ in the last digits
    if len(counts) <= MAX_BARS:
        return [{"low": value, "high": value, "count": count} for value, count in sorted(counts.items())]
    low, high = min(counts), max(counts)
    step = (high - low) / RANGES or 1.0
    ranges = [0] * RANGES
    for value, count in counts.items():
        ranges[min(int((value - low) / step), RANGES - 1)] += count
    return [
        {"low": low + i * step, "high": low + (i + 1) * step if i < RANGES - 1 else high, "count": count}
        for i, count in enumerate(ranges)
    ]


def _pass_at_k(rewards: Sequence[float | None], examples: Sequence[int], repeats: Sequence[int]) -> list[Any]:
    """pass@k if the reward is right-or-wrong and examples have several rollouts."""
    if not {0.0, 1.0, None}.issuperset(rewards) or max(repeats, default=0) < 1:
        return []
    most = max(Counter(examples).values())
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k < most] + [most]
    found = [stats.pass_at_k(rewards, examples, k=k) for k in ks]
    every = {k: stats.pass_hat_k(rewards, examples, k=k).mean for k in ks}
    return [
        {
            "k": item.k,
            "mean": item.mean,
            "low": item.low,
            "high": item.high,
            "all": every[item.k],
            "examples": item.examples,
            "left_out": len(item.left_out),
        }
        for item in found
        if item.examples
    ]


def _with_failures(
    rewards: Sequence[float | None], examples: Sequence[int], statuses: Sequence[int]
) -> tuple[float, float] | None:
    """The smallest and the largest mean if the failed rollouts had been scored; None if none failed."""
    return stats.with_failures(rewards, examples) if FAILED in statuses else None


def _by_task(index: RolloutIndex, rewards: Sequence[float | None]) -> list[dict[str, Any]]:
    names = index.task_names.texts
    if not 1 < len(names) <= SHOWN:
        return []
    parts: list[tuple[list[float | None], list[int]]] = [([], []) for _ in names]
    for task, reward, example in zip(index.tasks, rewards, index.examples, strict=True):
        parts[task][0].append(reward)
        parts[task][1].append(example)
    figures = [(name, stats.mean_interval(*part)) for name, part in zip(names, parts, strict=True)]
    return [{"task": name, "mean": f.mean, "low": f.low, "high": f.high, "n": f.n} for name, f in figures]


def _spread(column: Sequence[float]) -> dict[str, float] | None:
    ordered = sorted(value for value in column if not math.isnan(value))
    if not ordered:
        return None
    last = len(ordered) - 1
    return {"median": ordered[last // 2], "p95": ordered[int(last * 0.95)], "most": ordered[-1]}


def _counted(column: Sequence[int], names: Names) -> list[list[Any]]:
    return [[names.texts[code], count] for code, count in Counter(column).most_common(SHOWN)]


def step_counts(steps: Sequence[float]) -> list[list[float]]:
    counts = Counter(step for step in steps if not math.isnan(step))
    return [[step, count] for step, count in sorted(counts.items())]


def shares_page(run: Run) -> dict[str, Any]:
    """The contribution of each reward function to the mean reward, weight times mean; for a training, by step."""
    found = run.metadata.get("reward_weights")
    weights = found if isinstance(found, dict) else {}
    weights = {name: value for name, weight in weights.items() if (value := figure(weight)) is not None}
    if run.is_training:
        return run.metrics.shares(weights)
    index = run.index
    with index.lock:
        names = [name for name in weights if name in index.metrics]
        means = {name: stats.mean_interval(known_column(index.metric(name)), index.examples).mean for name in names}
        reward = stats.mean_interval(known_column(index.rewards), index.examples).mean
    functions = [
        {
            "name": name,
            "weight": weights[name],
            "is_scheduled": False,
            "values": [None if mean is None else weights[name] * mean],
            "means": [mean],
        }
        for name, mean in means.items()
    ]
    return {"steps": [], "functions": functions, "reward": [reward]}
