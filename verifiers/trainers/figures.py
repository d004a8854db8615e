"""A batch of rollouts becomes the figures of a step: rewards with their interval, lengths, what went wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from verifiers.stats import mean_interval
from verifiers.trainers.advantages import flat_groups
from verifiers.trainers.batch import Batch


def rollout_figures(batch: Batch) -> dict[str, Any]:
    """What a batch says before it is learned from."""
    rewards = [reward for reward in batch["rewards"] if reward is not None]
    states = [state for reply in batch["completions"] if (state := getattr(reply, "state", None)) is not None]
    tokens = [_said(state) for state in states]
    lengths = [len(logprobs) for logprobs in tokens]
    groups = set(batch["groups"])
    figures: dict[str, Any] = {
        "samples": len(batch["rewards"]),
        "failed": len(batch.failed),
        "zero_variance": len(flat_groups(batch["rewards"], batch["groups"])) / max(len(groups), 1),
        "metrics": _means([state.get("metrics") or {} for state in states]),
    }
    if rewards:
        interval = mean_interval(batch["rewards"], batch["groups"])
        mean = math.fsum(rewards) / len(rewards)
        figures |= {"reward": mean, "reward_low": interval.low, "reward_high": interval.high}
        figures["reward_std"] = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    if lengths:
        figures |= {
            "completion_tokens": sum(lengths) / len(lengths),
            "completion_tokens_max": max(lengths),
            "sampled_tokens": sum(lengths),
            "truncated": sum(bool(state.get("is_truncated")) for state in states) / len(states),
        }
        drawn = np.fromiter(chain.from_iterable(tokens), np.float64, sum(lengths))
        drawn = drawn[np.isfinite(drawn)]
        figures["entropy"] = float(-drawn.mean()) if len(drawn) else None
        figures["scoring_s"] = sum((state.get("timing") or {}).get("scoring_ms", 0.0) for state in states) / 1000
    return figures


def batch_view(batch: Batch) -> dict[str, Any]:
    """A batch's columns for those who watch it."""
    states = [getattr(reply, "state", None) or {} for reply in batch["completions"]]
    names = sorted({name for state in states for name in state.get("metrics") or {}})
    return {
        "rewards": batch["rewards"],
        "groups": batch["groups"],
        "metrics": {name: [(state.get("metrics") or {}).get(name) for state in states] for name in names},
        "is_truncated": [bool(state.get("is_truncated")) for state in states],
        "lengths": [sum(map(len, _logprobs(state))) for state in states],
    }


def _logprobs(state: Any) -> list[list[float]]:
    """The logprobs of what the model said, turn by turn."""
    steps = state.get("trajectory") or ()
    return [step["tokens"]["completion_logprobs"] for step in steps if step.get("tokens") is not None]


def _said(state: Any) -> list[float]:
    turns = _logprobs(state)
    return turns[0] if len(turns) == 1 else [logprob for turn in turns for logprob in turn]


def _means(metrics: Sequence[dict[str, Any]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for one in metrics:
        for name, value in one.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                values.setdefault(name, []).append(float(value))
    return {name: math.fsum(found) / len(found) for name, found in values.items()}
