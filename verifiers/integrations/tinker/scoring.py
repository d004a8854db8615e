"""Tokens → their logprobs under the adapter in force, whatever is computed beside them: for training and sampling.

The sums of a matrix product depend on its shape. On a CPU they do not from some rows on, and data is laid out as by our
trainers. On a card a sequence is computed in a rectangle whose shape follows from the length of the sequence alone, and
the head runs over a fixed number of places: so every product that a token is in has the same shape each time.
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

LEAST_ROWS = 16  # MKL's products of fewer than 12 rows add up in another order: what is shorter has others beside it
HEAD_ROWS = 512  # places that the head is run on at a time, on a card
# Tokens of a rectangle on a card, unless a sequence is longer. A pass over a small model takes as long as launching it
# does, however few tokens it has; one over a large model takes as long as its tokens do, padding included.
FEWEST_TOKENS, MOST_TOKENS = 1 << 12, 1 << 14
PASS_FLOPS = 2e13
NARROWEST = 64


@dataclass(frozen=True, slots=True)
class Reply:
    """Tokens whose logprobs are wanted, what stands before them, and what they were drawn from."""

    prompt: list[int]
    ids: list[int]
    drawn_from: Distribution = PLAIN

    @property
    def places(self) -> int:
        """Positions of the sequence that predict a token of it."""
        return len(self.prompt) + len(self.ids) - 1

    def trained(self) -> TrainSample:
        return fully_trained(self.prompt, self.ids)._replace(drawn_from=((len(self.ids), self.drawn_from),))


@dataclass(frozen=True, slots=True)
class _Pass:
    """Replies computed together: which, where each is among the places, and how many places the head takes at once."""

    batch: MicroBatch
    members: list[int]
    places: list[slice]
    head_rows: int | None = None


class Scoring:
    """The logprobs of any targets under the adapter in force."""

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
        """Some data at a time: which, the logprob of each of their targets, and the one that it is of."""
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
        """The logprobs of each reply's tokens, under what they were drawn from."""
        found: list[list[float]] = [[] for _ in replies]
        with sensible_threads(self.model):
            for some in self._passes(replies):
                logprob_N = self._scored(some, some.batch.target_N[:, None])[:, 0].cpu()
                for i, place in zip(some.members, some.places, strict=True):
                    found[i] = logprob_N[place].tolist()
        return found

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def beside(self, ids: list[int], tokens: Sequence[Sequence[int]]) -> list[list[float]]:
        """How far the logits of tokens at the last places of ``ids`` are from those of the tokens that stand there."""
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

    # --- what is computed together --------------------------------------------------------------------------------

    def _passes(self, replies: Sequence[Reply]) -> Iterator[_Pass]:
        for drawn_from in dict.fromkeys(one.drawn_from for one in replies):
            members = [i for i, one in enumerate(replies) if one.drawn_from == drawn_from and one.ids]
            make = self._packed if self.device.type == "cpu" else self._rectangles
            for some in make([replies[i] for i in members]):
                yield _Pass(some.batch, [members[i] for i in some.members], some.places, some.head_rows)

    def _packed(self, replies: Sequence[Reply]) -> Iterator[_Pass]:
        """As our trainers lay them out: a prompt that several begin with is computed once."""
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
            if kept:  # else the filler alone, in a model that computes one sequence at a time
                yield _Pass(batch, [member for member, _ in kept], [place for _, place in kept])

    def _rectangles(self, replies: Sequence[Reply]) -> Iterator[_Pass]:
        """Those of about the same length side by side, all places of a rectangle of a fixed size, full or not."""
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
    """The same sequence, all of whose places are trained, and padding after it."""
    whole = [*one.prompt, *one.ids, *[0] * (width - one.places)]
    return Reply(whole[:1], whole[1:], one.drawn_from)


def tokens_for(parameters: int) -> int:
    """How many tokens a rectangle has, at most, for a model of so many parameters.

    >>> [tokens_for(n) for n in (135_000_000, 1_700_000_000, 7_000_000_000)]
    [16384, 4096, 4096]
    """
    wanted = int(PASS_FLOPS / (2 * max(parameters, 1)))
    return min(max(1 << wanted.bit_length() - 1, FEWEST_TOKENS), MOST_TOKENS)


def width_for(places: int) -> int:
    """How wide the rectangle is that a sequence is computed in: at most a quarter is padding, from 256 on.

    >>> [width_for(n) for n in (1, 64, 65, 500, 513, 1500, 5000)]
    [64, 64, 128, 512, 640, 1536, 5120]
    """
    step = max(NARROWEST, 1 << max(0, (places - 1).bit_length() - 3))
    return math.ceil(places / step) * step


def rows_for(width: int, tokens: int) -> int:
    """How many sequences a rectangle of about so many tokens has, so that the head divides it into equal parts.

    >>> [rows_for(width, 4096) for width in (64, 320, 640, 1536, 5120)]
    [64, 8, 4, 2, 1]
    """
    unit = HEAD_ROWS // math.gcd(width, HEAD_ROWS)
    return unit * max(1, tokens // (width * unit))
