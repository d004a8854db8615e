"""Rollouts and the weights that their tokens were sampled from → how old they are when they are learned from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifiers.trainers.batch import Batch


def versions_of(state: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(Tokens, version of the weights) of each stretch of what was sampled in a rollout, where its engine said so.

    >>> tokens = {"completion_ids": [1, 2, 3], "weight_versions": [("4", 0, 2), ("5", 2, 3)]}
    >>> versions_of({"trajectory": [{"tokens": tokens}]})
    [(2, 4), (1, 5)]
    """
    spans = [
        span
        for step in state.get("trajectory") or ()
        for span in ((step.get("tokens") or {}).get("weight_versions") or ())
    ]
    return [(end - start, int(version)) for version, start, end in spans if str(version).isdecimal()]


def staleness_figures(batch: Batch, updates: int) -> dict[str, Any]:
    """How many updates older than the weights that learn from them tokens are; and how many rollouts crossed one."""
    found = [spans for state in batch.states if state is not None and (spans := versions_of(state))]
    tokens = sum(n for spans in found for n, _ in spans)
    if not tokens:
        return {}
    return {
        "staleness": sum(n * (updates - version) for spans in found for n, version in spans) / tokens,
        "staleness_max": max(updates - version for spans in found for _, version in spans),
        "across_updates": sum(len({version for _, version in spans}) > 1 for spans in found) / len(found),
    }
