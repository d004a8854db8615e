"""Samples become micro-batches of about equal size, small enough for one forward and backward pass.

Two layouts: sequences padded on the right to a rectangle; or packed, without padding and with shared prefixes computed
once (`learning.packing`). In both, positions after the last one that predicts a trained token are cut off: no loss
depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verifiers.kernels.prove import text_config
from verifiers.samples import Sample
from verifiers.trainers.learning.packing import Packing
from verifiers.trainers.learning.token_columns import Columns
from verifiers.trainers.learning.token_layout import ranges
from verifiers.trainers.sampling import PLAIN, Distribution

WORTH_PACKING = 15 / 16  # most tokens of a packed batch, of the padded ones: else copying keys costs more than it saves
ANY_LENGTH = 1 << 62
End = Callable[[int, int], int]  # (first sequence, cost) → where a micro-batch of at most this cost ends
KEY_SHARE = 16  # copied keys and values that take as much memory as the activations of one token, about


class TrainSample(NamedTuple):
    """A sample to train on: tokens and loss mask, its advantage, and what its tokens were sampled from."""

    sample: Sample
    advantage: float | Sequence[float]  # of all tokens, or of each token of the completion
    weight: float = 1.0  # of a token in the loss
    # (tokens, distribution) of each part of the completion; empty: the model's own
    drawn_from: tuple[tuple[int, Distribution], ...] = ()
    rollout: int | None = None  # index of its rollout in the batch

    @property
    def has_advantage(self) -> bool:
        return bool(self.advantage) if isinstance(self.advantage, (int, float)) else any(self.advantage)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Sequences in a padded rectangle (ids_BT), or packed (B = 1); and their trained tokens, concatenated (axis N).

    Of each of these, ``logit_index_N`` is the index of the position that predicts it, in flattened ``ids_BT``;
    ``sequence_N`` the index of its sequence in the micro-batch; ``drawn_from_N`` that of what it was sampled from in
    ``distributions`` (None: there is only one). ``members`` are the indices of the sequences among those given.
    """

    ids_BT: Tensor
    logit_index_N: Tensor
    target_N: Tensor
    sequence_N: Tensor
    old_N: Tensor
    advantage_N: Tensor
    weight_N: Tensor
    members: tuple[int, ...]
    packing: Packing | None = None
    distributions: tuple[Distribution, ...] = (PLAIN,)
    drawn_from_N: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {one.name: value for one in fields(self) if isinstance(value := getattr(self, one.name), Tensor)}
        if self.packing is None:
            return replace(self, **_moved(tensors, device))
        on_device = _moved({**tensors, "position_T": self.packing.position_T}, device)
        packing = replace(self.packing, position_T=on_device.pop("position_T"))
        return replace(self, **on_device, packing=packing)


def _moved(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Tensors on a device; to a GPU, those of one dtype in one transfer that does not block."""
    if device.type != "cuda":
        return {name: one.to(device) for name, one in tensors.items()}
    on_device: dict[str, Tensor] = {}
    for dtype in {one.dtype for one in tensors.values()}:
        mine = {name: one for name, one in tensors.items() if one.dtype == dtype}
        packed = torch.cat([one.reshape(-1) for one in mine.values()]).pin_memory().to(device, non_blocking=True)
        parts = packed.split([one.numel() for one in mine.values()])
        on_device |= {name: part.view(one.shape) for (name, one), part in zip(mine.items(), parts, strict=True)}
    return {name: on_device[name] for name in tensors}


def micro_batches(
    sequences: Sequence[TrainSample],
    *,
    max_tokens: int,
    pad_id: int = 0,
    longest_packed: int = 0,
    longest_batched: int = ANY_LENGTH,
    rope_bounds: Sequence[int] = (),
) -> Iterator[MicroBatch]:
    """All sequences with trained tokens, longest first, in as few micro-batches as ``max_tokens`` allows.

    These are about equally large. A sequence longer than ``max_tokens``, or than ``longest_batched``, gets one of its
    own. They are packed if no sequence is longer than ``longest_packed`` and that saves tokens. Attention is causal:
    no token that counts attends to padding on the right.
    """
    columns = Columns.of(split_at_rope_bounds(sequences, rope_bounds))
    n = len(columns.index_S)
    if not n:
        return
    order, end = _padded_order(columns, longest_batched)
    cuts, make = balanced(n, end, max_tokens), partial(_padded, columns, pad_id=pad_id)
    if int(columns.length_S.max()) <= longest_packed:
        packed_tokens = int(columns.suffix_S.sum() + columns.prefix_P.sum())
        padded_tokens = sum(int(columns.length_S[order[i]]) * (j - i) for i, j in cuts)
        if packed_tokens <= WORTH_PACKING * padded_tokens:
            order, end = _packed_order(columns)
            cuts, make = balanced(n, end, max_tokens), partial(_packed, columns)
    for i, j in cuts:
        yield make(order[i:j])


def split_at_rope_bounds(sequences: Sequence[TrainSample], rope_bounds: Sequence[int]) -> list[TrainSample]:
    """Split sequences at lengths past which the angles of the rotary embedding change (LongRoPE).

    Tokens up to the bound were sampled with the angles of a short sequence, later ones with those of a long one: the
    first part ends at the bound, and of the second, which is whole, only later tokens are trained on.
    """
    parts = list(sequences)
    for bound in rope_bounds:
        split: list[TrainSample] = []
        for one in parts:
            n, sample = bound + 1 - len(one.sample.prompt_ids), one.sample  # tokens of the reply up to the bound
            if not (0 < n < len(sample.completion_ids) and any(sample.completion_mask[:n])):
                split.append(one)
                continue
            early = one.advantage if isinstance(one.advantage, (int, float)) else one.advantage[:n]
            split.append(one._replace(sample=sample.first(n), advantage=early))
            split.append(one._replace(sample=replace(sample, completion_mask=[0] * n + sample.completion_mask[n:])))
        parts = split
    return parts


def balanced(n: int, end: End, most: int) -> list[tuple[int, int]]:
    """Cut ``n`` items, in order, into as few parts of cost at most ``most`` as possible, of about equal cost.

    ``end(i, cost)`` is where a part that starts at ``i`` ends, if it may cost that much.

    >>> balanced(10, lambda i, cost: min(10, i + cost), 4)
    [(0, 4), (4, 8), (8, 10)]
    >>> balanced(9, lambda i, cost: min(9, i + cost), 4)
    [(0, 3), (3, 6), (6, 9)]
    """
    fewest = _parts(n, end, most)
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if len(_parts(n, end, middle)) <= len(fewest):
            high = middle
        else:
            low = middle + 1
    return _parts(n, end, low)


def _parts(n: int, end: End, cost: int) -> list[tuple[int, int]]:
    parts, i = [], 0
    while i < n:
        j = max(end(i, cost), i + 1)
        parts.append((i, j))
        i = j
    return parts


def _padded_order(columns: Columns, longest_batched: int) -> tuple[Any, End]:
    """Longest first: a rectangle is as wide as its first sequence; one that is too long is alone in it."""
    order = np.argsort(-columns.length_S, kind="stable")
    lengths = columns.length_S[order].tolist()

    def end(i: int, cost: int) -> int:
        return i + 1 if lengths[i] > longest_batched else min(len(lengths), i + cost // lengths[i])

    return order, end


def _packed_order(columns: Columns) -> tuple[Any, End]:
    """Sequences with the same prefix are neighbours; where they are cut apart the prefix is computed in both parts."""
    prefix_of_S = columns.prefix_of_S
    longest_P = np.zeros(len(columns.prefix_P), np.int64)
    np.maximum.at(longest_P, prefix_of_S, columns.length_S)
    order = np.lexsort((-columns.suffix_S, prefix_of_S, -longest_P[prefix_of_S]))
    prefixes = prefix_of_S[order]
    prefix_costs = columns.prefix_P[prefixes]
    is_first = np.r_[True, prefixes[1:] != prefixes[:-1]]
    shared = prefix_costs // KEY_SHARE + np.where(is_first, prefix_costs, 0)
    costs = np.r_[0, np.cumsum(columns.suffix_S[order] + shared)]

    def end(i: int, cost: int) -> int:
        own = cost - (0 if is_first[i] else int(prefix_costs[i]))
        return int(np.searchsorted(costs, costs[i] + own, "right")) - 1

    return order, end


def check_tokens(batch: MicroBatch, config: Any) -> MicroBatch:
    """Refuse token ids that the model does not have: on a GPU, embedding one would abort the process."""
    vocabulary = text_config(config).vocab_size
    for ids in (batch.ids_BT, batch.target_N):
        low, high = (int(one) for one in ids.aminmax())
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"there is a token {low if low < 0 else high} to learn from, and the model has {vocabulary}: was it "
                "made with the tokenizer of another model?"
            )
    return batch


def idle_batch(pad_id: int) -> MicroBatch:
    """A micro-batch of weight 0, for a process that has fewer than others: passes of a sharded model are collective."""
    sequence = fully_trained([pad_id], [pad_id])._replace(advantage=0.0, weight=0.0)
    (made,) = micro_batches([sequence], max_tokens=ANY_LENGTH)
    return made


def fully_trained(prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> TrainSample:
    """A sequence whose whole completion is trained on, with an advantage of 1."""
    n = len(completion_ids)
    sample = Sample(
        prompt_ids=list(prompt_ids),
        completion_ids=list(completion_ids),
        completion_mask=[1] * n,
        completion_logprobs=[0.0] * n,
    )
    return TrainSample(sample=sample, advantage=1.0)


def _padded(columns: Columns, members: Any, pad_id: int) -> MicroBatch:
    """A rectangle of sequences, padded on the right."""
    suffixes, prefixes = columns.suffix_S[members], columns.prefix_of_S[members]
    lengths = columns.prefix_P[prefixes]
    rows, width = np.arange(len(members)), int((lengths + suffixes).max())
    ids_BT = np.full((len(members), width), pad_id, np.int64)
    ids_BT[np.repeat(rows, lengths), ranges(0 * lengths, lengths)] = columns.prefix_ids[
        ranges(columns.prefix_start_P[prefixes], lengths)
    ]
    indices = np.repeat(rows, suffixes) * width + ranges(lengths, suffixes)
    ids_BT.reshape(-1)[indices] = columns.ids[ranges(columns.start_S[members], suffixes)]
    return _micro_batch(columns, members, ids_BT, indices)


def _packed(columns: Columns, members: Any) -> MicroBatch:
    """A packed batch: prefixes first, each once, then suffixes."""
    suffixes = columns.suffix_S[members]
    prefixes, prefix_of_B = np.unique(columns.prefix_of_S[members], return_inverse=True)
    lengths = columns.prefix_P[prefixes]
    prefix_ids = columns.prefix_ids[ranges(columns.prefix_start_P[prefixes], lengths)]
    ids = np.concatenate((prefix_ids, columns.ids[ranges(columns.start_S[members], suffixes)]))
    positions = np.concatenate((ranges(0 * lengths, lengths), ranges(lengths[prefix_of_B], suffixes)))
    packing = Packing(
        prefix_G=lengths, suffix_B=suffixes, prefix_of_B=prefix_of_B, position_T=torch.from_numpy(positions)
    )
    return _micro_batch(columns, members, ids[None], np.arange(len(prefix_ids), len(ids)), packing)


def _micro_batch(
    columns: Columns, members: Any, ids_BT: Any, indices: Any, packing: Packing | None = None
) -> MicroBatch:
    """``indices`` are those of the members' suffix tokens in flattened ids."""
    suffixes = columns.suffix_S[members]
    at = ranges(columns.start_S[members], suffixes)
    chosen = np.flatnonzero(columns.is_trained[at])
    at, sequence_N = at[chosen], np.repeat(np.arange(len(members)), suffixes)[chosen]
    return MicroBatch(
        ids_BT=torch.from_numpy(ids_BT),
        logit_index_N=torch.from_numpy(indices[chosen]),
        target_N=torch.from_numpy(columns.target[at]),
        sequence_N=torch.from_numpy(sequence_N),
        old_N=torch.from_numpy(columns.old[at]),
        advantage_N=torch.from_numpy(columns.advantage[at]),
        weight_N=torch.from_numpy(columns.weight_S[members][sequence_N]),
        members=tuple(columns.index_S[members].tolist()),
        packing=packing,
        distributions=columns.distributions,
        drawn_from_N=None if columns.drawn_from is None else torch.from_numpy(columns.drawn_from[at]),
    )
