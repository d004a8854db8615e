"""Runs and scores rows, each with its own client, and returns the rollouts in the same order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verifiers.clients.asking_for import ask_for
from verifiers.envs.calling import find_answerer, merge_sampling
from verifiers.envs.environment import Environment
from verifiers.envs.run_steps import score_alone, score_group
from verifiers.rubrics.rubric import timing
from verifiers.rubrics.score import Score, note_scoring_time, write_advantages, write_score
from verifiers.types import Row, SamplingArgs, State

AT_ONCE = 64
OnFunction = Callable[[State, str, float], None]  # (rollout, name of the reward function, seconds it took)


async def play(
    env: Environment,
    pairs: Sequence[tuple[Mapping[str, Any], Any]],
    *,
    model: str = "none",
    sampling_args: SamplingArgs | None = None,
    names: Sequence[str] | None = None,
    judged: Sequence[Any] | None = None,
    on_function: OnFunction | None = None,
) -> list[State]:
    """Run each row with its client; rollouts of one example are scored as a group.

    ``names`` identify the rollouts, so that a cassette of judges finds its replies. ``judged`` contains the saved judge
    replies of each rollout, or None. ``on_function`` is called with the seconds that each reward function took.
    """
    sampling = merge_sampling(env.sampling_args, sampling_args)
    gate = asyncio.Semaphore(AT_ONCE)

    known = names or [f"{i}" for i in range(len(pairs))]

    async def play_one(row: Row, client: Any, name: str) -> State:
        async with gate:
            ask_for(name)
            return await env.run_row(row, find_answerer(client, model), sampling)

    rows = [env.formatted(row) for row, _ in pairs]  # before creating coroutines: this may raise
    plays = [play_one(row, client, name) for row, (_, client), name in zip(rows, pairs, known, strict=True)]
    states = list(await asyncio.gather(*plays))
    for state, replies in zip(states, judged or (), strict=False):
        if isinstance(replies, Mapping):
            state["judge_response"] = dict(replies)
    groups: dict[Any, list[tuple[State, str]]] = {}
    for state, name in zip(states, known, strict=True):
        groups.setdefault(state.get("example_id"), []).append((state, name))
    for group in groups.values():
        await score(env, [state for state, _ in group], [name for _, name in group], on_function)
    return states


async def score(
    env: Environment, group: Sequence[State], names: Sequence[str] = (), on_function: OnFunction | None = None
) -> None:
    """Score the rollouts of one example that have no error, and write the scores into their states."""
    began = time.perf_counter()
    named = zip(group, names or [""] * len(group), strict=True)
    pairs = [(state, name) for state, name in named if state.get("error") is None]
    live = [state for state, _ in pairs]

    async def score_one(state: State, name: str) -> Score:
        ask_for(name)
        with timing(None if on_function is None else lambda func, took: on_function(state, func, took)):
            return await score_alone(env, state)

    scores = list(await asyncio.gather(*(score_one(state, name) for state, name in pairs)))
    await score_group(env, live, scores)
    for state, found in zip(live, scores, strict=True):
        write_score(state, found)
    note_scoring_time(live, (time.perf_counter() - began) * 1000 / max(len(live), 1))
    write_advantages(group)
