"""Rollouts that a host collected → results with the metadata of a run, for prime-rl."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.clients.secrets import hide_in_url
from verifiers.envs.host_calls import get_results_path
from verifiers.results import Results
from verifiers.types import GenerateMetadata, SamplingArgs, State

if TYPE_CHECKING:
    from verifiers.envs.environment import Environment


def prepare_results(
    env: Environment,
    rollouts: Sequence[Mapping[str, Any]],
    *,
    model: str,
    client: Any,
    state_columns: Sequence[str] | None,
    results_path: Path | None,
    sampling_args: SamplingArgs | None,
    began: float,
) -> Results:
    """Results from states or rollouts as plain data, with metadata. ``began`` is a value of ``time.perf_counter``."""
    results = Results([_as_state(rollout) for rollout in rollouts])
    repeats = Counter(state.get("example_id") for state in results.rollouts)
    rewards = [reward for reward in results["reward"] if reward is not None]
    metadata = GenerateMetadata(
        env_id=env.env_id or type(env).__name__,
        env_args=env.env_args,
        model=model,
        base_url=hide_in_url(str(getattr(client, "base_url", "") or "")),
        num_examples=len(repeats),
        rollouts_per_example=max(repeats.values(), default=0),
        sampling_args=sampling_args or {},
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        time_ms=(time.perf_counter() - began) * 1000,
        avg_reward=sum(rewards) / len(rewards) if rewards else None,
        avg_metrics={name: _mean(results[name]) for name in results.metric_names},
        state_columns=list(state_columns or ()),
        path_to_save=results_path or get_results_path(env.env_id or type(env).__name__, model),
    )
    results.metadata.update(metadata)
    return results


def _as_state(rollout: Mapping[str, Any]) -> State:
    """A state from a rollout whose row fields are under ``input``, or (in plain data) among the others.

    >>> _as_state({"prompt": "2+2?", "answer": "4", "reward": 1.0})["input"]
    {'prompt': '2+2?', 'answer': '4'}
    """
    if "input" in rollout:
        return State(rollout)
    row = {name: rollout[name] for name in State.INPUT_FIELDS if name in rollout}
    return State({**{name: value for name, value in rollout.items() if name not in row}, "input": row})


def _mean(column: Sequence[float | None]) -> float:
    known = [value for value in column if value is not None]
    return sum(known) / len(known) if known else 0.0
