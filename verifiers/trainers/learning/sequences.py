"""Rollouts of a batch become token sequences to train on, each with its advantages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, groupby, pairwise
from typing import Any

import torch

from verifiers.chat import ChatWriter
from verifiers.samples import NotSampledError, Sample, are_ids_of, exact_samples, written_samples
from verifiers.trainers import sampling
from verifiers.trainers.batch import Batch
from verifiers.trainers.config import GRPOConfig
from verifiers.trainers.learning.micro_batches import TrainSample
from verifiers.trainers.losses import token_weights
from verifiers.trainers.sampling import Distribution

FindTokens = Callable[[Any, Any], list[Sample]]


def trained_sequences(
    batch: Batch,
    config: GRPOConfig,
    default: Distribution,
    *,
    find_tokens: FindTokens | None = None,
    writer: ChatWriter | None = None,
    longest: int | None = None,
) -> list[TrainSample]:
    """The samples of a batch's rollouts with their advantages; a rollout whose history was rewritten has several.

    ``default`` is the distribution of tokens for which none was recorded. A rollout is left out, with the reason in
    ``batch.refused``, if its sampled tokens are not known or it has a sequence of more than ``longest`` tokens. Saved
    rollouts need a ``writer``.
    """
    trained: list[TrainSample] = []
    is_off_policy = bool(config.num_batches_ahead) or config.updates_per_generation > 1
    batch.refused.clear()
    columns = zip(batch["prompts"], batch["completions"], batch["advantages"], strict=True)
    for i, (prompt, reply, advantage) in enumerate(columns):
        state: Mapping[str, Any] = getattr(reply, "state", None) or {}
        if advantage is None or (config.mask_truncated_completions and state.get("is_truncated")):
            continue
        try:
            samples = samples_of_reply(prompt, reply, find_tokens, writer)
            lengths = [len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples]
            if longest is not None and (beyond := [n for n in lengths if n > longest]):
                raise NotSampledError(
                    f"it has {beyond[0]} tokens, more than the limit of {longest} (max_seq_length, the model)"
                )
        except NotSampledError as error:
            batch.refused.append(str(error))
            continue
        for sample, own in zip(samples, advantages_of_samples(advantage, samples, state), strict=True):
            sample = sample if writer is None else sampling.without_greedy_logprobs(sample)
            drawn = sampling.distributions(sample, default)
            sample = sampling.without_doubtful_logprobs(sample, drawn, is_off_policy=is_off_policy)
            trained.append(TrainSample(sample=sample, advantage=own, drawn_from=drawn, rollout=i))
    return trained


def with_token_weights(
    sequences: Sequence[TrainSample],
    kind: str,
    max_new_tokens: int,
    *,
    gather: Callable[[Any], list[Any]] = lambda own: [own],
) -> tuple[list[TrainSample], int]:
    """The sequences with their token weights in the mean of a loss, and the total number of trained tokens.

    A rollout counts once, even if it has several samples. ``gather`` returns the values of all processes.
    """
    owners = [f"sequence {i}" if one.rollout is None else one.rollout for i, one in enumerate(sequences)]
    lengths: Counter[Any] = Counter()
    for owner, one in zip(owners, sequences, strict=True):
        lengths[owner] += sum(one.sample.completion_mask)
    parts = gather((len(lengths), lengths.total()))
    totals = sum(n for n, _ in parts), sum(tokens for _, tokens in parts)
    found = token_weights(kind, torch.tensor([*lengths.values()]), max_new_tokens, totals).tolist()
    weights = dict(zip(lengths, found, strict=True))
    return [one._replace(weight=weights[owner]) for owner, one in zip(owners, sequences, strict=True)], totals[1]


def samples_of_reply(
    prompt: Any, reply: Any, find_tokens: FindTokens | None, writer: ChatWriter | None = None
) -> list[Sample]:
    """The tokens of one rollout as they were sampled; raises NotSampledError if they are not known.

    With a ``writer``, text that was saved without its tokens is tokenized.
    """
    state: Mapping[str, Any] = getattr(reply, "state", None) or {}
    completion = getattr(reply, "messages", reply)
    if writer is not None and not are_ids_of(state.get("trajectory") or (), writer):
        return written_samples(prompt, completion, writer, state)
    try:
        return exact_samples(state, completion)
    except NotSampledError:
        # Text without a state may be a reply of this policy. A state records itself what was sampled.
        if not state and find_tokens is not None and (known := find_tokens(prompt, completion)):
            return known
        if writer is not None:
            return written_samples(prompt, completion, writer, state)
        if state:
            raise
        raise NotSampledError(
            "its text is not a known reply of this policy: leave replies unchanged after sampling, or pass saved "
            "rollouts as dataset="
        ) from None


def advantages_of_samples(
    advantage: float | Sequence[float], samples: Sequence[Sample], state: Mapping[str, Any]
) -> list[float | list[float]]:
    """A rollout's advantage for each of its samples: one number, or one for each token of the completion.

    Advantages of turns or of sampled tokens are assigned to the sampled tokens; other tokens have 0.

    >>> sample = Sample(prompt_ids=[1], completion_ids=[2, 3, 9, 4], completion_mask=[1, 1, 0, 1],
    ...                 completion_logprobs=[0.0] * 4)
    >>> advantages_of_samples([0.5, -1.0], [sample], {})
    [[0.5, 0.5, 0.0, -1.0]]
    """
    if isinstance(advantage, (int, float)):
        return [float(advantage)] * len(samples)
    total = sum(sum(sample.completion_mask) for sample in samples)
    turns, order = _turn_lengths(samples, state, total)
    if len(advantage) == len(turns):
        advantage = [one for one, length in zip(advantage, turns, strict=True) for _ in range(length)]
    if len(advantage) != total:
        raise ValueError(
            f"{len(advantage)} advantages for a rollout with {len(turns)} turns and {total} sampled tokens; return one "
            "number, or one for each turn or for each sampled token"
        )
    starts = list(accumulate(turns, initial=0))
    of_turns = [list(advantage[start:end]) for start, end in pairwise(starts)]
    values = chain.from_iterable(of_turns[number] for number in order)
    return [[next(values) if is_sampled else 0.0 for is_sampled in sample.completion_mask] for sample in samples]


def _turn_lengths(samples: Sequence[Sample], state: Mapping[str, Any], total: int) -> tuple[list[int], Sequence[int]]:
    """The number of sampled tokens of each turn, and the order of the turns in the samples.

    Samples that were tokenized from text may differ from the trajectory; then each run of 1s in the mask is a turn.
    """
    tokens = [step.get("tokens") for step in state.get("trajectory") or ()]
    turns = [0 if one is None or one.get("overlong_prompt") else len(one["completion_ids"]) for one in tokens]
    if turns and sum(turns) == total:
        return turns, [number for sample in samples for number in sample.steps]
    parts = [len(list(part)) for sample in samples for is_own, part in groupby(sample.completion_mask) if is_own]
    return parts, range(len(parts))
