"""Samples become columns of their tokens, end to end: converted once, whatever they are cut into."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers.samples import Sample
from verifiers.trainers.sampling import PLAIN, Distribution

if TYPE_CHECKING:
    from verifiers.trainers.learning.micro_batches import Trained


@dataclass(frozen=True, slots=True)
class Columns:
    """The tokens of all sequences that are trained on, end to end.

    A sequence is a prefix, all but the last token of its prompt, which it may share with others, and a suffix, up to
    the last position that predicts a trained token. Each position of a suffix has the token that it predicts
    (``target``), whether that is trained on, the logprob it was sampled with, and its advantage.
    """

    index_S: Any  # which of the sequences given
    prefix_of_S: Any
    suffix_S: Any  # lengths
    start_S: Any  # where in the columns of suffixes each begins
    prefix_P: Any  # lengths
    prefix_start_P: Any
    prefix_ids: Any
    ids: Any
    target: Any
    is_trained: Any
    old: Any
    advantage: Any
    weight_S: Any
    distributions: tuple[Distribution, ...]  # what tokens were drawn from
    drawn_from: Any  # which of them each target was; None: there is but one

    @property
    def length_S(self) -> Any:
        return self.prefix_P[self.prefix_of_S] + self.suffix_S

    @classmethod
    def of(cls, sequences: Sequence[Trained]) -> Columns:
        rows, lasts = [], []
        for row, one in enumerate(sequences):
            last = _last_place(one.sample)
            if last > 0:
                rows.append(row)
                lasts.append(last)
        samples = [sequences[row].sample for row in rows]
        prefixes: dict[tuple[int, ...], int] = {}
        prefix_of_S = [prefixes.setdefault(tuple(one.prompt_ids[:-1]), len(prefixes)) for one in samples]
        sizes = np.array([min(len(one.prompt_ids), 1) + len(one.completion_ids) for one in samples], np.int64)
        start_S = np.cumsum(sizes) - sizes
        # A suffix begins with the last token of its prompt, which no position of the suffix predicts: its mask and
        # logprob are never read.
        is_reply = np.ones(int(sizes.sum()), bool)
        is_reply[start_S[[bool(one.prompt_ids) for one in samples]]] = False
        ids = _spread([one.completion_ids for one in samples], is_reply, np.int64)
        ids[~is_reply] = [one.prompt_ids[-1] for one in samples if one.prompt_ids]
        mask = _spread([one.completion_mask for one in samples], is_reply, np.int64)
        old = _spread([one.completion_logprobs for one in samples], is_reply, np.float32)
        prefix_P = np.array([len(prefix) for prefix in prefixes], np.int64)
        distributions, drawn_from = _drawn([sequences[row] for row in rows])
        return cls(
            index_S=np.array(rows, np.int64),
            prefix_of_S=np.array(prefix_of_S, np.int64),
            suffix_S=np.array(lasts, np.int64),
            start_S=start_S,
            prefix_P=prefix_P,
            prefix_start_P=np.cumsum(prefix_P) - prefix_P,
            prefix_ids=_flat(prefixes, np.int64),
            ids=ids,
            target=np.roll(ids, -1),
            is_trained=np.roll(mask, -1) != 0,
            old=np.roll(old, -1),
            advantage=np.roll(_advantages([sequences[row] for row in rows], sizes), -1),
            weight_S=np.array([sequences[row].weight for row in rows], np.float32),
            distributions=distributions,
            drawn_from=None if drawn_from is None else np.roll(drawn_from, -1),
        )


def _advantages(sequences: Sequence[Trained], sizes: Any) -> Any:
    """The advantage of each place of the suffixes, of which there are so many in each sequence."""
    if all(isinstance(one.advantage, (int, float)) for one in sequences):
        return np.repeat(np.array([one.advantage for one in sequences], np.float32), sizes)
    parts = []
    for one, size in zip(sequences, sizes.tolist(), strict=True):
        n = len(one.sample.completion_ids)
        own = np.array(one.advantage, np.float32) if not isinstance(one.advantage, (int, float)) else one.advantage
        parts += [np.zeros(size - n, np.float32), np.broadcast_to(own, n)]
    return np.concatenate(parts).astype(np.float32)


def _drawn(sequences: Sequence[Trained]) -> tuple[tuple[Distribution, ...], Any]:
    """The distributions that there are, and for each place of the suffixes which one it is, if there are several."""
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


def _spread(parts: Iterable[Iterable[Any]], is_place: Any, dtype: Any) -> Any:
    """Values end to end in the places that are theirs; 0 in the others."""
    spread = np.zeros(len(is_place), dtype)
    spread[is_place] = _flat(parts, dtype)
    return spread


def _flat(parts: Iterable[Iterable[Any]], dtype: Any) -> Any:
    return np.fromiter(chain.from_iterable(parts), dtype)


def _last_place(sample: Sample) -> int:
    """How many places of a sample's suffix there are up to the one that predicts its last trained token."""
    n = len(sample.completion_mask)
    while n and not sample.completion_mask[n - 1]:
        n -= 1
    return n - 1 + min(len(sample.prompt_ids), 1) if n else 0  # a first token without a prompt is predicted by nothing
