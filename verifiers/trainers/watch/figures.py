"""A batch of rollouts → the metrics of a step: rewards with their confidence interval, lengths, failures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from verifiers.stats import mean_interval
from verifiers.trainers.advantages import flat_groups, population_std
from verifiers.trainers.batch import Batch


def batch_view(batch: Batch) -> dict[str, Any]:
    """A batch as plain columns with one entry per rollout, for exchange between processes and for `Watch.look`."""
    states: list[Any] = [state or {} for state in batch.states]
    completions = [_completion_logprobs(state) for state in states]
    logprobs = np.fromiter(chain.from_iterable(completions), np.float64, sum(map(len, completions)))
    logprobs = logprobs[np.isfinite(logprobs)]
    known = zip(states, completions, strict=True)  # the length of a text saved without tokens is not known
    metrics = [state.get("metrics") or {} for state in states]
    timings = [state.get("timing") or {} for state in states]
    names = sorted({name for one in metrics for name in one})
    return {
        "rewards": batch["rewards"],
        "groups": batch["groups"],
        "examples": batch.examples,
        "sampled": batch.sampled,
        "metrics": {name: [one.get(name) for one in metrics] for name in names},
        "is_truncated": [bool(state.get("is_truncated")) for state in states],
        "is_played": [bool(state) for state in states],
        "lengths": [len(found) if found or not state.get("completion") else None for state, found in known],
        "has_advantage": [
            any(one) if isinstance(one, Iterable) else bool(one) for one in batch.get("advantages") or ()
        ],
        "failed": len(batch.failed),
        "tokens": batch.tokens,
        "logprobs": (float(logprobs.sum()), len(logprobs)),  # sum and count
        **{name: sum(one.get(name, 0.0) for one in timings) for name in ("scoring_ms", "total_ms")},
    }


def merge_views(views: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The merged views of all processes. A group is within one process; an example may be in several."""
    if len(views) == 1:
        return dict(views[0])
    merged: dict[str, Any] = {
        name: list(chain.from_iterable(view[name] for view in views))
        for name in ("rewards", "examples", "sampled", "is_truncated", "is_played", "lengths", "has_advantage")
    }
    merged["groups"] = [f"{i}:{group}" for i, view in enumerate(views) for group in view["groups"]]
    names = sorted({name for view in views for name in view["metrics"]})
    merged["metrics"] = {
        name: list(chain.from_iterable(view["metrics"].get(name, [None] * len(view["rewards"])) for view in views))
        for name in names
    }
    for name in ("failed", "tokens", "scoring_ms", "total_ms"):
        merged[name] = sum(view[name] for view in views)
    merged["logprobs"] = tuple(map(sum, zip(*(view["logprobs"] for view in views), strict=True)))
    return merged


def rollout_figures(view: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of a batch before its update: ``reward`` of the rollouts to train on, ``reward_sampled`` of all."""
    groups = set(view["groups"])
    learned = list(zip(view["examples"], view["rewards"], strict=True))
    rewards = _reward_figures(learned)
    sampled = rewards if view["sampled"] == learned else _reward_figures(view["sampled"])
    figures: dict[str, Any] = {
        "samples": len(view["rewards"]),
        "sampled": len(view["sampled"]) + view["failed"],
        "failed": view["failed"],
        "sampled_tokens": view["tokens"],
        "zero_variance": len(flat_groups(view["rewards"], view["groups"])) / max(len(groups), 1),
        "metrics": {
            name: mean
            for name, values in view["metrics"].items()
            if (mean := _mean(values, view["examples"])) is not None
        },
        **{f"reward{name}": value for name, value in rewards.items()},
        **{f"reward_sampled{name}": value for name, value in sampled.items()},
    }
    if known := [reward for reward in view["rewards"] if reward is not None]:
        figures["reward_std"] = population_std(known)
    played = [i for i, is_played in enumerate(view["is_played"]) if is_played]
    if played:
        lengths = [length for i in played if (length := view["lengths"][i]) is not None]
        total, count = view["logprobs"]
        figures |= {
            "completion_tokens": sum(lengths) / len(lengths) if lengths else None,
            "completion_tokens_max": max(lengths, default=None),
            "truncated": sum(view["is_truncated"][i] for i in played) / len(played),
            "entropy": -total / count if count else None,
        }
    return figures


def rollout_seconds(view: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """The wall time of concurrent rollouts, split in proportion to the total times of their phases.

    >>> rollout_seconds({"scoring_ms": 5000.0, "total_ms": 20000.0}, 2.0)
    {'generation_s': 1.5, 'scoring_s': 0.5}
    """
    scoring_s = seconds * min(view["scoring_ms"] / view["total_ms"], 1.0) if view["total_ms"] else 0.0
    return {"generation_s": seconds - scoring_s, "scoring_s": scoring_s}


def _reward_figures(pairs: Sequence[tuple[Any, float | None]]) -> dict[str, Any]:
    """Mean and confidence interval of (example, reward) pairs, clustered by example; empty if none was scored."""
    rewards = [reward for _, reward in pairs]
    if not any(reward is not None for reward in rewards):
        return {}
    interval = mean_interval(rewards, [example for example, _ in pairs])
    return {"": interval.mean, "_low": interval.low, "_high": interval.high}


def _completion_logprobs(state: Any) -> list[float]:
    """Logprobs of the sampled tokens of all turns."""
    steps = state.get("trajectory") or ()
    turns = [step["tokens"]["completion_logprobs"] for step in steps if step.get("tokens") is not None]
    return turns[0] if len(turns) == 1 else [logprob for turn in turns for logprob in turn]


def _mean(values: Sequence[Any], examples: Sequence[Any]) -> float | None:
    """The mean over examples of their means, so that each example counts once even if some rollouts failed."""
    known: dict[Any, list[float]] = {}
    for example, value in zip(examples, values, strict=True):
        if isinstance(value, (int, float)) and math.isfinite(value):
            known.setdefault(example, []).append(float(value))
    means = [math.fsum(found) / len(found) for found in known.values()]
    return math.fsum(means) / len(means) if means else None
