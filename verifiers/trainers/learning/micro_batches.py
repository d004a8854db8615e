"""Samples become micro-batches of about equal size, small enough for one forward and backward pass.

There are two layouts: padded on the right to a rectangle, or packed, without padding and with shared prefixes computed
once (`learning.packing`). In both, positions after the last one that predicts a trained token are dropped, because no
loss depends on them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verifiers.kernels.prove import text_config
from verifiers.samples import Sample
from verifiers.trainers.learning.packing import Packing
from verifiers.trainers.sampling import PLAIN, Distribution

WORTH_PACKING = 15 / 16  # largest packed share of padded tokens; above it, copying keys costs more than packing saves
ANY_LENGTH = 1 << 62
End = Callable[[int, int], int]  # (first sequence, cost) → end of a micro-batch of at most this cost
KEY_SHARE = 16  # copying the keys and values of about this many tokens costs as much memory as one token's activations


class TrainSample(NamedTuple):
    """A sample to train on: tokens and loss mask, advantage, and the distributions its tokens were sampled from."""

    sample: Sample
    advantage: float | Sequence[float]  # of all tokens, or of each token of the completion
    weight: float = 1.0  # of a token in the loss
    # (number of tokens, distribution) of each part of the completion; empty: the model's own distribution
    drawn_from: tuple[tuple[int, Distribution], ...] = ()
    rollout: int | None = None  # index of its rollout in the batch

    @property
    def has_advantage(self) -> bool:
        return bool(self.advantage) if isinstance(self.advantage, (int, float)) else any(self.advantage)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Sequences in a padded rectangle (ids_BT), or packed (B = 1); and their trained tokens, concatenated (axis N).

    For each trained token, ``logit_index_N`` is the index in flattened ``ids_BT`` of the position that predicts it,
    ``sequence_N`` the index of its sequence in the micro-batch, and ``drawn_from_N`` the index of its distribution in
    ``distributions`` (None if there is only one). ``members`` are the indices of the sequences in the input list.
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

    @property
    def is_idle(self) -> bool:
        return not self.members

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {one.name: value for one in fields(self) if isinstance(value := getattr(self, one.name), Tensor)}
        if self.packing is None:
            return replace(self, **_moved(tensors, device))
        on_device = _moved({**tensors, "position_T": self.packing.position_T}, device)
        packing = replace(self.packing, position_T=on_device.pop("position_T"))
        return replace(self, **on_device, packing=packing)


class _Tokens(NamedTuple):
    """A sequence as arrays. The prefix is the prompt without its last token; sequences may share it. The suffix
    is the rest, up to the last position (``at``) that predicts a trained token (``target``)."""

    member: int  # index of the sequence in the input list
    prefix: int  # number of the prefix; equal prefixes have the same number
    prefix_ids: np.ndarray
    ids: np.ndarray  # of the suffix
    at: np.ndarray
    target: np.ndarray
    old: np.ndarray
    advantage: np.ndarray
    drawn_from: np.ndarray  # index of the distribution that a target was sampled from
    weight: float

    @property
    def length(self) -> int:
        return len(self.prefix_ids) + len(self.ids)


def _tokens_of(sequences: Sequence[TrainSample]) -> tuple[list[_Tokens], tuple[Distribution, ...]]:
    """The sequences that have trained tokens, and the distributions that these tokens were sampled from."""
    found: list[_Tokens] = []
    prefixes: dict[tuple[int, ...], tuple[int, np.ndarray]] = {}
    known: dict[Distribution, int] = {}
    for member, one in enumerate(sequences):
        sample, has_prompt = one.sample, bool(one.sample.prompt_ids)
        trained = _array(sample.completion_mask, bool).nonzero()[0]
        if not has_prompt:  # no position predicts the first token
            trained = trained[trained > 0]
        if not len(trained):
            continue
        prefix = tuple(sample.prompt_ids[:-1])
        if prefix not in prefixes:
            prefixes[prefix] = len(prefixes), np.array(prefix, np.int64)
        number, prefix_ids = prefixes[prefix]
        completion = _array(sample.completion_ids, np.int64)
        drawn_from, start = np.zeros(len(completion), np.int64), 0
        for n, drawn in one.drawn_from or ((len(completion), PLAIN),):
            drawn_from[start : start + n] = known.setdefault(drawn, len(known))
            start += n
        at = trained - 1 + has_prompt
        ids = np.concatenate((np.array(sample.prompt_ids[-1:], np.int64), completion))[: at[-1] + 1]
        found.append(
            _Tokens(
                member=member,
                prefix=number,
                prefix_ids=prefix_ids,
                ids=ids,
                at=at,
                target=completion[trained],
                old=_array(sample.completion_logprobs, np.float32)[trained],
                advantage=_advantages(one.advantage, trained),
                drawn_from=drawn_from[trained],
                weight=one.weight,
            )
        )
    return found, tuple(known)


def _array(values: Sequence[Any], dtype: Any) -> np.ndarray:
    """A list as an array, in half the time of ``np.array``, which inspects each value."""
    return np.fromiter(values, dtype, len(values))


def _advantages(given: float | Sequence[float], trained: np.ndarray) -> np.ndarray:
    """The advantage of each trained token, from the advantage of the sequence or of each of its tokens."""
    if isinstance(given, int | float):
        return np.full(len(trained), given, np.float32)
    advantages: np.ndarray = np.array(given, np.float32)[trained]
    return advantages


def _moved(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Tensors moved to a device; to a GPU, in one non-blocking transfer for each dtype."""
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

    They are about equally large. A sequence longer than ``max_tokens`` or ``longest_batched`` gets a micro-batch of its
    own. Micro-batches are packed if no sequence is longer than ``longest_packed`` and packing saves tokens. Padding is
    on the right, where no other token attends to it, because attention is causal.
    """
    tokens, distributions = _tokens_of(split_at_rope_bounds(sequences, rope_bounds))
    if not tokens:
        return
    ordered, end = _padded_order(tokens, longest_batched)
    make: Callable[..., MicroBatch] = partial(_padded, pad_id=pad_id)
    cuts = balanced(len(tokens), end, max_tokens)
    if ordered[0].length <= longest_packed:
        prefixes = {one.prefix: len(one.prefix_ids) for one in tokens}
        packed_tokens = sum(len(one.ids) for one in tokens) + sum(prefixes.values())
        padded_tokens = sum(ordered[i].length * (j - i) for i, j in cuts)
        if packed_tokens <= WORTH_PACKING * padded_tokens:
            ordered, end = _packed_order(tokens)
            cuts, make = balanced(len(tokens), end, max_tokens), _packed
    for i, j in cuts:
        yield make(ordered[i:j], distributions)


def split_at_rope_bounds(sequences: Sequence[TrainSample], rope_bounds: Sequence[int]) -> list[TrainSample]:
    """Split sequences at lengths beyond which the angles of the rotary embedding change (LongRoPE).

    Tokens up to the bound were sampled with the angles of a short sequence, later tokens with those of a long one. The
    first part ends at the bound. The second is the whole sequence, with only the tokens after the bound trained on.
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
    """Cut ``n`` items, in order, into the fewest parts that cost at most ``most`` each, with about equal costs.

    ``end(i, cost)`` is the end of the longest part that starts at ``i`` and costs at most this much.

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


def _padded_order(tokens: Sequence[_Tokens], longest_batched: int) -> tuple[list[_Tokens], End]:
    """Longest first, so that a rectangle is as wide as its first sequence; one that is too long is on its own."""
    ordered = sorted(tokens, key=lambda one: -one.length)
    lengths = [one.length for one in ordered]

    def end(i: int, cost: int) -> int:
        return i + 1 if lengths[i] > longest_batched else min(len(lengths), i + cost // lengths[i])

    return ordered, end


def _packed_order(tokens: Sequence[_Tokens]) -> tuple[list[_Tokens], End]:
    """Sequences with the same prefix are adjacent; a prefix whose sequences are cut apart is computed in both parts."""
    longest: dict[int, int] = {}
    for one in tokens:
        longest[one.prefix] = max(one.length, longest.get(one.prefix, 0))
    ordered = sorted(tokens, key=lambda one: (-longest[one.prefix], one.prefix, -len(one.ids)))
    prefix_costs = [len(one.prefix_ids) for one in ordered]
    is_first = [True, *(one.prefix != before.prefix for before, one in pairwise(ordered))]
    costs = [0]
    for one, prefix, is_new in zip(ordered, prefix_costs, is_first, strict=True):
        costs.append(costs[-1] + len(one.ids) + prefix // KEY_SHARE + is_new * prefix)

    def end(i: int, cost: int) -> int:
        own = cost - (0 if is_first[i] else prefix_costs[i])
        return bisect_right(costs, costs[i] + own) - 1

    return ordered, end


def check_tokens(batch: MicroBatch, config: Any) -> MicroBatch:
    """Refuse token ids outside the vocabulary: on a GPU, their embedding would abort the process."""
    vocabulary = text_config(config).vocab_size
    for ids in (batch.ids_BT, batch.target_N):
        low, high = (int(one) for one in ids.aminmax())
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"token id {low if low < 0 else high} is outside the model's vocabulary of {vocabulary} tokens: were "
                "these tokens made with the tokenizer of another model?"
            )
    return batch


def idle_batch(pad_id: int) -> MicroBatch:
    """A micro-batch of weight 0, for a process with fewer than others, as passes of a sharded model are collective."""
    sequence = fully_trained([pad_id], [pad_id])._replace(advantage=0.0, weight=0.0)
    (made,) = micro_batches([sequence], max_tokens=ANY_LENGTH)
    return replace(made, members=())


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


def _padded(members: Sequence[_Tokens], distributions: tuple[Distribution, ...], pad_id: int) -> MicroBatch:
    """A rectangle of sequences, padded on the right."""
    ids_BT = np.full((len(members), max(one.length for one in members)), pad_id, np.int64)
    for row, one in zip(ids_BT, members, strict=True):
        row[: one.length] = np.concatenate((one.prefix_ids, one.ids))
    starts = [i * ids_BT.shape[1] + len(one.prefix_ids) for i, one in enumerate(members)]
    return _micro_batch(members, distributions, ids_BT, starts)


def _packed(members: Sequence[_Tokens], distributions: tuple[Distribution, ...]) -> MicroBatch:
    """A packed batch: each distinct prefix once, then the suffixes."""
    prefixes = sorted({one.prefix: one.prefix_ids for one in members}.items())
    index_of = {prefix: i for i, (prefix, _) in enumerate(prefixes)}
    parts = [*(ids for _, ids in prefixes), *(one.ids for one in members)]
    ends = np.cumsum([len(ids) for ids in parts])
    positions = [np.arange(len(ids)) for _, ids in prefixes]
    positions += [np.arange(len(one.prefix_ids), one.length) for one in members]
    packing = Packing(
        prefix_G=np.array([len(ids) for _, ids in prefixes]),
        suffix_B=np.array([len(one.ids) for one in members]),
        prefix_of_B=np.array([index_of[one.prefix] for one in members]),
        position_T=torch.from_numpy(np.concatenate(positions)),
    )
    starts = ends[len(prefixes) - 1 : -1].tolist()
    return _micro_batch(members, distributions, np.concatenate(parts)[None], starts, packing)


def _micro_batch(
    members: Sequence[_Tokens],
    distributions: tuple[Distribution, ...],
    ids_BT: Any,
    starts: Sequence[int],
    packing: Packing | None = None,
) -> MicroBatch:
    """``starts`` are the indices of the members' suffixes in flattened ids."""

    def joined(parts: Iterable[Any]) -> Tensor:
        return torch.from_numpy(np.concatenate(list(parts)))

    counts = [len(one.at) for one in members]
    return MicroBatch(
        ids_BT=torch.from_numpy(ids_BT),
        logit_index_N=joined(one.at + start for one, start in zip(members, starts, strict=True)),
        target_N=joined(one.target for one in members),
        sequence_N=torch.from_numpy(np.repeat(np.arange(len(members)), counts)),
        old_N=joined(one.old for one in members),
        advantage_N=joined(one.advantage for one in members),
        weight_N=torch.from_numpy(np.repeat(np.array([one.weight for one in members], np.float32), counts)),
        members=tuple(one.member for one in members),
        packing=packing,
        distributions=distributions,
        drawn_from_N=joined(one.drawn_from for one in members) if len(distributions) > 1 else None,
    )
