"""Samples become arrays of their concatenated tokens: converted once, however micro-batches are cut from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers.samples import Sample
from verifiers.trainers.sampling import PLAIN, Distribution

if TYPE_CHECKING:
    from verifiers.trainers.learning.micro_batches import TrainSample


@dataclass(frozen=True, slots=True)
class Columns:
    """The tokens of all sequences (S) with trained tokens, concatenated: distinct prefixes (P), and suffixes.

    A sequence is a prefix, all but the last token of its prompt, which it may share with others, and a suffix, up to
    the last position that predicts a trained token. Each position of a suffix has the token that it predicts
    (``target``), whether that is trained on, the logprob it was sampled with, and its advantage.
    """

    index_S: Any  # into the sequences given
    prefix_of_S: Any
    suffix_S: Any  # lengths
    start_S: Any  # where each suffix begins in the arrays of suffix tokens
    prefix_P: Any  # lengths
    prefix_start_P: Any
    prefix_ids: Any
    ids: Any
    target: Any
    is_trained: Any
    old: Any
    advantage: Any
    weight_S: Any
    distributions: tuple[Distribution, ...]  # that tokens were sampled from
    drawn_from: Any  # index into these for each target; None: there is only one

    @property
    def length_S(self) -> Any:
        return self.prefix_P[self.prefix_of_S] + self.suffix_S

    @classmethod
    def of(cls, sequences: Sequence[TrainSample]) -> Columns:
        suffixes = np.array([_suffix_length(one.sample) for one in sequences], np.int64)
        index_S = np.flatnonzero(suffixes)
        sequences = [sequences[i] for i in index_S.tolist()]
        samples = [one.sample for one in sequences]
        prefixes: dict[tuple[int, ...], int] = {}
        prefix_of_S = [prefixes.setdefault(tuple(one.prompt_ids[:-1]), len(prefixes)) for one in samples]
        sizes = np.array([min(len(one.prompt_ids), 1) + len(one.completion_ids) for one in samples], np.int64)
        start_S = np.cumsum(sizes) - sizes
        # A suffix begins with the last token of the prompt, which no position of the suffix predicts: its mask and
        # logprob are never read.
        is_reply = np.ones(int(sizes.sum()), bool)
        is_reply[start_S[[bool(one.prompt_ids) for one in samples]]] = False
        ids = _scattered([one.completion_ids for one in samples], is_reply, np.int64)
        ids[~is_reply] = [one.prompt_ids[-1] for one in samples if one.prompt_ids]
        mask = _scattered([one.completion_mask for one in samples], is_reply, np.int64)
        old = _scattered([one.completion_logprobs for one in samples], is_reply, np.float32)
        prefix_P = np.array([len(prefix) for prefix in prefixes], np.int64)
        distributions, drawn_from = _drawn_from(sequences)
        return cls(
            index_S=index_S,
            prefix_of_S=np.array(prefix_of_S, np.int64),
            suffix_S=suffixes[index_S],
            start_S=start_S,
            prefix_P=prefix_P,
            prefix_start_P=np.cumsum(prefix_P) - prefix_P,
            prefix_ids=_flat(prefixes, np.int64),
            ids=ids,
            target=np.roll(ids, -1),
            is_trained=np.roll(mask, -1) != 0,
            old=np.roll(old, -1),
            advantage=np.roll(_advantages(sequences, sizes), -1),
            weight_S=np.array([one.weight for one in sequences], np.float32),
            distributions=distributions,
            drawn_from=None if drawn_from is None else np.roll(drawn_from, -1),
        )


def _advantages(sequences: Sequence[TrainSample], sizes: Any) -> Any:
    """The advantage of each position of the suffixes, which have these sizes."""
    if all(isinstance(one.advantage, (int, float)) for one in sequences):
        return np.repeat(np.array([one.advantage for one in sequences], np.float32), sizes)
    parts = []
    for one, size in zip(sequences, sizes.tolist(), strict=True):
        n = len(one.sample.completion_ids)
        own = np.array(one.advantage, np.float32) if not isinstance(one.advantage, (int, float)) else one.advantage
        parts += [np.zeros(size - n, np.float32), np.broadcast_to(own, n)]
    return np.concatenate(parts).astype(np.float32)


def _drawn_from(sequences: Sequence[TrainSample]) -> tuple[tuple[Distribution, ...], Any]:
    """The distinct distributions, and for each position of the suffixes the index of its own if there are several."""
    known: dict[Distribution, int] = {}
    for one in sequences:
        for _, drawn in one.drawn_from or ((0, PLAIN),):
            known.setdefault(drawn, len(known))
    if len(known) < 2:
        return tuple(known) or (PLAIN,), None
    which: list[Any] = []
    for one in sequences:
        before, rest = min(len(one.sample.prompt_ids), 1), len(one.sample.completion_ids)
        which.append(np.zeros(before, np.int64))
        for n, drawn in one.drawn_from or ((rest, PLAIN),):
            which.append(np.full(min(n, rest), known[drawn], np.int64))
            rest -= min(n, rest)
        which.append(np.zeros(rest, np.int64))
    return tuple(known), np.concatenate(which)


def _scattered(parts: Iterable[Iterable[Any]], mask: Any, dtype: Any) -> Any:
    """Concatenated values at the positions of the mask; 0 at the others."""
    scattered = np.zeros(len(mask), dtype)
    scattered[mask] = _flat(parts, dtype)
    return scattered


def _flat(parts: Iterable[Iterable[Any]], dtype: Any) -> Any:
    return np.fromiter(chain.from_iterable(parts), dtype)


def _suffix_length(sample: Sample) -> int:
    """Positions of a sample's suffix, up to the one that predicts its last trained token; 0 if it has none."""
    n = len(sample.completion_mask)
    while n and not sample.completion_mask[n - 1]:
        n -= 1
    return n - 1 + min(len(sample.prompt_ids), 1) if n else 0  # without a prompt nothing predicts the first token
