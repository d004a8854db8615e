"""The weight version that each token was sampled with → the staleness of a batch, in updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from verifiers.clients.protocol import Completion
from verifiers.errors import BadReplyError
from verifiers.trainers.batch import Batch
from verifiers.types import VersionSpan


class OtherWeightsError(BadReplyError):
    """A reply from weights that this trainer did not send to its server."""


def with_versions(completion: Completion, oldest: int, newest: int | None) -> Completion:
    """A reply with its weight versions: those that its server reported, once checked, or else the oldest possible."""
    tokens = completion.tokens
    if tokens is None:
        return completion
    if not tokens.weight_versions:
        span = VersionSpan(str(oldest), 0, len(tokens.completion_ids))
        return replace(completion, tokens=replace(tokens, weight_versions=(span,)))
    least = oldest
    for span in tokens.weight_versions:
        if span.updates is None or span.updates < least or (newest is not None and span.updates > newest):
            raise OtherWeightsError(
                f"the server answered with weights of version {span.version!r:.50}; expected version {oldest}"
                + (" or later" if newest is None else f" to {newest}" if newest > oldest else "")
                + ": it was restarted, or another trainer sends weights to it"
            )
        least = span.updates
    return completion


def note_versions(states: Iterable[Mapping[str, Any]], version: int) -> None:
    """Set the version of tokens whose server did not report one to the version when they were requested.

    >>> state = {"trajectory": [{"tokens": {"completion_ids": [1, 2, 3]}}]}
    >>> note_versions([state], 4); versions_of(state)
    [(3, 4)]
    """
    for state in states:
        for step in state.get("trajectory") or ():
            if (tokens := step.get("tokens")) and not tokens.get("weight_versions"):
                tokens["weight_versions"] = [VersionSpan(str(version), 0, len(tokens["completion_ids"]))]


def versions_of(state: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(Number of tokens, weight version) of each span of sampled tokens of a rollout, where its engine reported it.

    >>> tokens = {"completion_ids": [1, 2, 3], "weight_versions": [("4", 0, 2), ("5", 2, 3)]}
    >>> versions_of({"trajectory": [{"tokens": tokens}]})
    [(2, 4), (1, 5)]
    """
    spans = [
        VersionSpan(str(version), start, end)
        for step in state.get("trajectory") or ()
        for version, start, end in ((step.get("tokens") or {}).get("weight_versions") or ())
    ]
    return [(span.end - span.start, span.updates) for span in spans if span.updates is not None]


def staleness_figures(batch: Batch, updates: int) -> dict[str, Any]:
    """Mean and max number of updates since tokens were sampled, and the share of rollouts sampled across an update."""
    found = [spans for state in batch.states if state is not None and (spans := versions_of(state))]
    tokens = sum(n for spans in found for n, _ in spans)
    if not tokens:
        return {}
    return {
        "staleness": sum(n * (updates - version) for spans in found for n, version in spans) / tokens,
        "staleness_max": max(updates - version for spans in found for _, version in spans),
        "across_updates": sum(len({version for _, version in spans}) > 1 for spans in found) / len(found),
    }
