"""Sample the next tokens of running sequences from the logits; compute logprobs of alternatives and of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from verifiers.engine.constraints import ConstraintError
from verifiers.engine.sequence import LARGEST, ActiveSequence, Alternatives, Sampling
from verifiers.kernels.cpu.model import Drawn
from verifiers.kernels.devices import to_device
from verifiers.kernels.sampling import SamplingColumns, log_softmax, sample, truncate

if TYPE_CHECKING:
    from verifiers.engine.batch_table import BatchTable
    from verifiers.engine.cuda_runner import CudaDecoder

CHUNK = 128  # prompt tokens whose logprobs are computed in one step; bounds the memory of [CHUNK, vocabulary] logits


def draw(
    logits_NV: Tensor,
    sequences: Sequence[ActiveSequence],
    rows_N: np.ndarray,
    table: BatchTable,
    cuda: CudaDecoder | None = None,
) -> Drawn:
    """Sample a token for each sequence, with its own sampling arguments and seed."""
    raw_NV = logits_NV
    needs_logits = bool(table.needs_logits[rows_N].any())
    if needs_logits:
        logits_NV = processed(
            logits_NV, sequences, [[] if one.processor is None else table.reply(one.row).tolist() for one in sequences]
        )
    columns = table.columns(rows_N, logits_NV.device)
    truncates = bool(table.truncates[rows_N].any())
    if cuda is not None and not truncates:
        token_N, logprob_N, raw_N = cuda.sample(logits_NV, columns)
    else:
        is_plain = not truncates and bool((table.temperature[rows_N] == 1.0).all())
        token_N, logprob_N, raw_N = sample(logits_NV, columns, truncates=truncates, is_plain=is_plain)
    if raw_NV is not logits_NV:
        raw_N = log_softmax(raw_NV).gather(1, token_N[:, None])[:, 0]
    if needs_logits:
        note_alternatives(logits_NV, sequences, columns)
    return Drawn(*(value.cpu().numpy()[None] for value in (token_N, logprob_N, raw_N)))


class Penalties:
    """Presence and frequency penalties count the reply's tokens, as in OpenAI's API. The repetition penalty also
    counts the prompt's tokens, as in transformers."""

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int], vocabulary: int, device: torch.device) -> None:
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._repetition = sampling.repetition_penalty
        self._count_V = torch.zeros(vocabulary, device=device)
        self._is_seen_V = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._is_seen_V[torch.tensor(list(prompt_ids), device=device)] = True
        self._counted = 0

    def apply_(self, logits_V: Tensor, ids: Sequence[int]) -> None:
        """Apply the penalties after the reply ``ids`` to the logits, in place."""
        if len(ids) > self._counted:
            new = torch.tensor(list(ids[self._counted :]), device=logits_V.device)
            self._count_V.index_add_(0, new, torch.ones(len(new), device=logits_V.device))
            self._is_seen_V[new] = True
            self._counted = len(ids)
        if self._repetition != 1.0:
            penalized_V = torch.where(logits_V < 0, logits_V * self._repetition, logits_V / self._repetition)
            penalized_V.clamp_(max=LARGEST)
            logits_V.copy_(torch.where(self._is_seen_V, penalized_V, logits_V))
        if self._presence or self._frequency:
            logits_V -= self._frequency * self._count_V + self._presence * (self._count_V > 0)


class LogitsProcessor:
    """One request's logit changes, in this order: penalties, logit bias, ``min_tokens`` (no stop token), grammar."""

    def __init__(
        self,
        sampling: Sampling,
        prompt_ids: Sequence[int],
        *,
        stop_ids: frozenset[int],
        vocabulary: int,
        device: torch.device,
    ) -> None:
        self._min_tokens = sampling.min_tokens
        self._stop_ids = [token for token in stop_ids | sampling.stop_ids if 0 <= token < vocabulary]
        self._bias_N: tuple[Tensor, Tensor] | None = None
        if bias := sampling.logit_bias:
            values = torch.tensor(list(bias.values()), device=device, dtype=torch.float32)
            self._bias_N = torch.tensor(list(bias), device=device), values
        has_penalties = sampling.has_penalties
        self._penalties = Penalties(sampling, prompt_ids, vocabulary, device) if has_penalties else None
        self._matcher = None if sampling.constraint is None else sampling.constraint.start()

    def apply_(self, logits_V: Tensor, ids: Sequence[int]) -> None:
        """Change the logits after the reply ``ids`` in place; ConstraintError if the grammar cannot continue."""
        if self._penalties is not None:
            self._penalties.apply_(logits_V, ids)
        if self._bias_N is not None:
            tokens_N, values_N = self._bias_N
            logits_V.index_add_(0, tokens_N, values_N)
        allowed_V = None if self._matcher is None else self._matcher.allowed(ids, len(logits_V))
        # A grammar that allows only stop tokens takes precedence over min_tokens.
        if len(ids) < self._min_tokens and (allowed_V is None or allowed_V.sum() > allowed_V[self._stop_ids].sum()):
            logits_V[self._stop_ids] = -torch.inf
        if allowed_V is not None:
            logits_V.masked_fill_(~to_device(allowed_V, logits_V.device), -torch.inf)


def processed(logits_NV: Tensor, sequences: Sequence[ActiveSequence], ids_N: Sequence[Sequence[int]]) -> Tensor:
    """The logits to sample from; ``ids_N`` are the replies so far. ``logits_NV`` itself is not changed."""
    if all(sequence.processor is None for sequence in sequences):
        return logits_NV
    logits_NV = logits_NV.to(torch.float32, copy=True)
    for row_V, sequence, ids in zip(logits_NV, sequences, ids_N, strict=True):
        if sequence.processor is None:
            continue
        try:
            sequence.processor.apply_(row_V, ids)
        except ConstraintError as error:  # the sequence fails with it after this step's token
            sequence.failure = error
    return logits_NV


def note_alternatives(logits_NV: Tensor, sequences: Sequence[ActiveSequence], columns: SamplingColumns) -> None:
    """Record the most likely tokens of a step for sequences with ``top_logprobs``, under the sampling distribution."""
    wanted = [i for i, sequence in enumerate(sequences) if sequence.sampling.top_logprobs]
    if not wanted:
        return
    some = columns.each(lambda one: one[wanted])
    cold_B = torch.where(some.temperature_B <= 0, torch.ones_like(some.temperature_B), some.temperature_B)
    logprobs_BV = log_softmax(logits_NV[wanted].float() / cold_B[:, None])
    if any(sequences[i].sampling.truncates and sequences[i].sampling.temperature > 0 for i in wanted):
        probs_BV = truncate(logprobs_BV.exp(), some)
        cut_BV = probs_BV.log() - probs_BV.sum(-1, keepdim=True).log()
        logprobs_BV = torch.where((some.temperature_B > 0)[:, None], cut_BV, logprobs_BV)
    found = most_likely(logprobs_BV, max(sequences[i].sampling.top_logprobs for i in wanted))
    for i, alternatives in zip(wanted, found, strict=True):
        sequence = sequences[i]
        sequence.future.top_logprobs.append(alternatives[: sequence.sampling.top_logprobs])


def most_likely(logprobs_NV: Tensor, count: int) -> list[Alternatives]:
    """The most likely tokens of each row, without those of probability 0. Of equal ones the lowest id comes first, as
    in a greedy reply. In half precision many are equal."""
    values_NK, tokens_NK = logprobs_NV.topk(min(count, logprobs_NV.shape[1]))
    # `topk` takes and orders equal ones arbitrarily.
    least_N1 = values_NK.masked_fill(values_NK == -torch.inf, torch.inf).amin(-1, keepdim=True)
    is_equal_NK = (values_NK[:, 1:] == values_NK[:, :-1]) & (values_NK[:, 1:] > -torch.inf)
    has_ties_N = is_equal_NK.any(-1) | ((logprobs_NV >= least_N1).sum(-1) > (values_NK >= least_N1).sum(-1))
    for row in has_ties_N.nonzero()[:, 0].tolist():
        tokens_M = (logprobs_NV[row] >= least_N1[row]).nonzero()[:, 0]
        found_K = tokens_M[logprobs_NV[row, tokens_M].sort(descending=True, stable=True).indices][: tokens_NK.shape[1]]
        tokens_NK[row, : len(found_K)] = found_K
    return [
        [(token, value) for token, value in zip(tokens, values, strict=True) if value > -np.inf]
        for tokens, values in zip(tokens_NK.tolist(), values_NK.tolist(), strict=True)
    ]


def score_prompt(sequence: ActiveSequence, start: int, logits_TV: Tensor) -> None:
    """Append the raw logprobs of the prompt tokens after ``start``, with their most likely alternatives."""
    count, scores = sequence.sampling.prompt_logprobs or 0, sequence.future.prompt_logprobs
    if start == 0:
        scores[:] = [None]
    following = sequence.prompt_ids[start + 1 : start + 1 + len(logits_TV)]
    logprobs_TV = log_softmax(logits_TV[: len(following)])
    next_T = torch.tensor(following, device=logprobs_TV.device, dtype=torch.int64)
    own_T = logprobs_TV.gather(1, next_T[:, None])[:, 0].tolist()
    tops: list[Alternatives] = most_likely(logprobs_TV, count) if count else [[] for _ in own_T]
    scores += zip(own_T, tops, strict=True)
