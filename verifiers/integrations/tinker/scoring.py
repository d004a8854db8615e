"""Tokens → their logprobs under the active adapter, independent of the batch, for training and sampling.

The rounding of a matrix product depends on its shape. On a CPU it does not from some number of rows on, so data is
packed as in our trainers. On a GPU a sequence is computed in a rectangle whose shape only depends on the length of the
sequence, and lm_head runs on a fixed number of positions: every product that a token is in always has the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiers.integrations.tinker.data import Datum
from verifiers.kernels.modules import linear_parameters
from verifiers.trainers.base_config import TrainingConfig
from verifiers.trainers.learning.logprobs import TokenScorer
from verifiers.trainers.learning.micro_batches import ANY_LENGTH, MicroBatch, TrainSample, fully_trained, micro_batches
from verifiers.trainers.learning.target_logprobs import chunks_of
from verifiers.trainers.memory.job import Job
from verifiers.trainers.sampling import PLAIN, Distribution
from verifiers.trainers.threads import sensible_threads

LEAST_ROWS = 16  # MKL sums products of fewer than 12 rows in a different order, so shorter data is padded
HEAD_ROWS = 512  # positions per lm_head call on a GPU
# Tokens per rectangle on a GPU, unless a sequence is longer. For a small model launching kernels dominates a pass, so
# few tokens cost the same as many; for a large model the time is proportional to the tokens, padding included.
FEWEST_TOKENS, MOST_TOKENS = 1 << 12, 1 << 14
PASS_FLOPS = 2e13
NARROWEST = 64


@dataclass(frozen=True, slots=True)
class Reply:
    """Tokens to score, the tokens before them, and their sampling distribution."""

    prompt: list[int]
    ids: list[int]
    drawn_from: Distribution = PLAIN

    @property
    def places(self) -> int:
        """The number of positions that predict a token of the sequence."""
        return len(self.prompt) + len(self.ids) - 1

    def trained(self) -> TrainSample:
        return fully_trained(self.prompt, self.ids)._replace(drawn_from=((len(self.ids), self.drawn_from),))


@dataclass(frozen=True, slots=True)
class _Pass:
    """Replies computed together: their indices, each one's slice of positions, and the positions per lm_head call."""

    batch: MicroBatch
    members: list[int]
    places: list[slice]
    head_rows: int | None = None


class Scoring:
    """The logprobs of any targets under the active adapter."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.scorer = TokenScorer(model)
        job = Job(config=TrainingConfig(gradient_checkpointing=False), device=self.device)
        dtype = next(model.parameters()).dtype
        planned = job.plan_module(model, dtype=dtype, is_whole=True).micro_batch_tokens
        self._tokens = planned if self.device.type == "cpu" else min(planned, tokens_for(linear_parameters(model)))
        self._vocabulary = model.config.get_text_config().vocab_size

    def logprobs(self, data: Sequence[Datum]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Yield for some data at a time: their indices, the logprob of each target, each target's datum among them."""
        replies = [Reply(ids[:1], [*ids[1:], 0]) for ids in (one.ids_T.tolist() for one in data)]
        for some in self._passes(replies):
            target_TKs = [data[i].targets.reshape(len(data[i].ids_T), -1) for i in some.members]
            target_NK = np.zeros((len(some.batch.logit_index_N), max(one.shape[1] for one in target_TKs)), np.int64)
            for place, target_TK in zip(some.places, target_TKs, strict=True):
                target_NK[place, : target_TK.shape[1]] = target_TK
            found = self._scored(some, torch.from_numpy(target_NK).to(self.device))
            each = zip(some.places, target_TKs, strict=True)
            logprobs = torch.cat([found[place, : target_TK.shape[1]].flatten() for place, target_TK in each])
            sequence_N = np.repeat(np.arange(len(target_TKs)), [one.size for one in target_TKs])
            yield some.members, logprobs, torch.from_numpy(sequence_N).to(self.device)

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not typed here
    def replies(self, replies: Sequence[Reply]) -> list[list[float]]:
        """The logprobs of each reply's tokens under its sampling distribution."""
        found: list[list[float]] = [[] for _ in replies]
        with sensible_threads(self.model):
            for some in self._passes(replies):
                logprob_N = self._scored(some, some.batch.target_N[:, None])[:, 0].cpu()
                for i, place in zip(some.members, some.places, strict=True):
                    found[i] = logprob_N[place].tolist()
        return found

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def beside(self, ids: list[int], tokens: Sequence[Sequence[int]]) -> list[list[float]]:
        """The logits of alternative ``tokens`` at the last positions of ``ids``, minus those of the actual tokens."""
        n, most = len(tokens), max(map(len, tokens))
        other_NK = torch.tensor([[*some, *[0] * (most - len(some))] for some in tokens], device=self.device)
        gaps = torch.empty((n, most), device=self.device)
        with sensible_threads(self.model):
            (some,) = self._passes([Reply(ids[:1], ids[1:])])
            out, end = self.scorer.outputs(some.batch), some.places[0].stop
            for part in chunks_of(len(out), self._vocabulary * 4, self.device, some.head_rows):
                first, last = max(part.start, end - n), min(part.stop, end)
                if first < last:
                    logits_NV = self.scorer.logits(out[part])[first - part.start : last - part.start].float()
                    at = slice(first - (end - n), last - (end - n))
                    own_N = some.batch.target_N[first:last]
                    gaps[at] = logits_NV.gather(1, other_NK[at]) - logits_NV.gather(1, own_N[:, None])
        return [row[: len(some)] for row, some in zip(gaps.tolist(), tokens, strict=True)]

    def _scored(self, some: _Pass, target_NK: Tensor) -> Tensor:
        target = target_NK[:, 0] if target_NK.shape[1] == 1 else target_NK
        (drawn_from,) = some.batch.distributions
        out = self.scorer.outputs(some.batch)
        found = self.scorer.score_outputs(out, target, drawn_from, rows=some.head_rows).logprob_N
        return found.view(target_NK.shape)

    # --- batching -------------------------------------------------------------------------------------------------

    def _passes(self, replies: Sequence[Reply]) -> Iterator[_Pass]:
        for drawn_from in dict.fromkeys(one.drawn_from for one in replies):
            members = [i for i, one in enumerate(replies) if one.drawn_from == drawn_from and one.ids]
            make = self._packed if self.device.type == "cpu" else self._rectangles
            for some in make([replies[i] for i in members]):
                yield _Pass(some.batch, [members[i] for i in some.members], some.places, some.head_rows)

    def _packed(self, replies: Sequence[Reply]) -> Iterator[_Pass]:
        """Pack replies as in our trainers: a common prompt is computed once."""
        limits, trained = self.scorer.layouts, [one.trained() for one in replies]
        if sum(len(one.ids) for one in replies) < LEAST_ROWS:
            trained.append(Reply([0], [0] * LEAST_ROWS, replies[0].drawn_from).trained())
        for batch in micro_batches(
            trained,
            max_tokens=self._tokens,
            longest_packed=limits.longest_packed,
            longest_batched=limits.longest_batched,
        ):
            ends = torch.bincount(batch.sequence_N).cumsum(0).tolist()
            each = zip(batch.members, pairwise((0, *ends)), strict=True)
            kept = [(member, slice(*place)) for member, place in each if member < len(replies)]
            if kept:  # otherwise only the filler, in a model that computes one sequence at a time
                yield _Pass(batch, [member for member, _ in kept], [place for _, place in kept])

    def _rectangles(self, replies: Sequence[Reply]) -> Iterator[_Pass]:
        """Put replies of similar length into rectangles of a fixed size, padded if not full."""
        longest, by_width = self.scorer.layouts.longest_batched, dict[int, list[int]]()
        for i, one in enumerate(replies):
            alone = one.places > longest
            by_width.setdefault(one.places if alone else width_for(one.places), []).append(i)
        for width, members in by_width.items():
            rows = 1 if width > longest else rows_for(width, self._tokens)
            for some in (members[i : i + rows] for i in range(0, len(members), rows)):
                trained = [_padded(replies[i], width).trained() for i in some]
                trained += [Reply([0], [0] * width, replies[0].drawn_from).trained()] * (rows - len(some))
                (batch,) = micro_batches(trained, max_tokens=ANY_LENGTH)
                ends = [row * width + replies[i].places for row, i in enumerate(some)]
                places = [slice(end - len(replies[i].ids), end) for i, end in zip(some, ends, strict=True)]
                yield _Pass(batch.to(self.device), some, places, HEAD_ROWS)


def _padded(one: Reply, width: int) -> Reply:
    """The sequence padded to ``width`` positions, all of which are scored."""
    whole = [*one.prompt, *one.ids, *[0] * (width - one.places)]
    return Reply(whole[:1], whole[1:], one.drawn_from)


def tokens_for(parameters: int) -> int:
    """The maximum number of tokens in a rectangle, by the number of model parameters.

    >>> [tokens_for(n) for n in (135_000_000, 1_700_000_000, 7_000_000_000)]
    [16384, 4096, 4096]
    """
    wanted = int(PASS_FLOPS / (2 * max(parameters, 1)))
    return min(max(1 << wanted.bit_length() - 1, FEWEST_TOKENS), MOST_TOKENS)


def width_for(places: int) -> int:
    """The width of a sequence's rectangle; from 256 positions on, at most a quarter is padding.

    >>> [width_for(n) for n in (1, 64, 65, 500, 513, 1500, 5000)]
    [64, 64, 128, 512, 640, 1536, 5120]
    """
    step = max(NARROWEST, 1 << max(0, (places - 1).bit_length() - 3))
    return math.ceil(places / step) * step


def rows_for(width: int, tokens: int) -> int:
    """The number of rows of a rectangle of about ``tokens`` tokens, such that `HEAD_ROWS` divides its size.

    >>> [rows_for(width, 4096) for width in (64, 320, 640, 1536, 5120)]
    [64, 8, 4, 2, 1]
    """
    unit = HEAD_ROWS // math.gcd(width, HEAD_ROWS)
    return unit * max(1, tokens // (width * unit))
