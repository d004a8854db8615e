"""A rollout → the one sequence that verl trains on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from verifiers.samples import Sample, exact_samples

logger = logging.getLogger("verifiers.integrations.verl")


def last_sample(state: Mapping[str, Any]) -> Sample:
    """The sequence of a rollout. If the template rewrote earlier turns, the last of several, with a warning."""
    samples = exact_samples(state)
    if not samples:
        raise ValueError(f"the rollout of example {state.get('example_id')} ended before the first model call")
    if len(samples) > 1:
        logger.warning(
            "a rollout of example %s has %d sequences, because the chat template rewrote earlier turns; "
            "verl takes one, so only the last is trained on",
            state.get("example_id"),
            len(samples),
        )
    return samples[-1]


def fit(sample: Sample, length: int) -> Sample:
    """Truncate a sample's response to the length of verl's tensors.

    >>> long = Sample(prompt_ids=[1], completion_ids=[2, 3], completion_mask=[1, 1], completion_logprobs=[0.0, -1.0])
    >>> fit(long, 1).completion_ids
    [2]
    """
    if len(sample.completion_ids) <= length:
        return sample
    return replace(
        sample,
        completion_ids=sample.completion_ids[:length],
        completion_mask=sample.completion_mask[:length],
        completion_logprobs=sample.completion_logprobs[:length],
        is_truncated=True,
        sampling=(),
    )
