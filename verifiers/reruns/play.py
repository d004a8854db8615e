"""Rows, each with a client of its own → scored rollouts, in the same order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.envs.calling import find_answerer, merge_sampling
from verifiers.envs.environment import Environment
from verifiers.envs.run_steps import score_alone, score_group
from verifiers.rubrics.score import note_scoring_time, write_advantages, write_score
from verifiers.types import Row, SamplingArgs, State

AT_ONCE = 64


async def play(
    env: Environment,
    pairs: Sequence[tuple[Mapping[str, Any], Any]],
    *,
    model: str = "none",
    sampling_args: SamplingArgs | None = None,
) -> list[State]:
    """Play each row with its client; rollouts of one example are scored as a group."""
    sampling = merge_sampling(env.sampling_args, sampling_args)
    gate = asyncio.Semaphore(AT_ONCE)

    async def play_one(row: Row, client: Any) -> State:
        async with gate:
            return await env.run_row(row, find_answerer(client, model), sampling)

    states = list(await asyncio.gather(*(play_one(env.formatted(row), client) for row, client in pairs)))
    groups: dict[Any, list[State]] = {}
    for state in states:
        groups.setdefault(state.get("example_id"), []).append(state)
    for group in groups.values():
        await score(env, group)
    return states


async def score(env: Environment, group: Sequence[State]) -> None:
    """Score the rollouts of one example, those without an error, and write the scores into them."""
    began = time.perf_counter()
    live = [state for state in group if state.get("error") is None]
    scores = list(await asyncio.gather(*(score_alone(env, state) for state in live)))
    await score_group(env, live, scores)
    for state, found in zip(live, scores, strict=True):
        write_score(state, found)
    note_scoring_time(live, (time.perf_counter() - began) * 1000 / max(len(live), 1))
    write_advantages(group)
