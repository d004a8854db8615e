"""Samples become rectangles of token ids of about the same length, small enough for one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verifiers.samples import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """One sample to train on: its tokens, what was sampled where, and how good that was."""

    sample: Sample
    advantage: float
    weight: float = 1.0

    @property
    def length(self) -> int:
        return len(self.sample.prompt_ids) + len(self.sample.completion_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Sequences side by side (ids_BT, padded on the right), and their trained tokens end to end (axis N).

    ``place_N`` is where the model predicts each of them, in the rectangle laid flat; ``sequence_N`` the row it is in.
    """

    ids_BT: Tensor
    place_N: Tensor
    target_N: Tensor
    sequence_N: Tensor
    old_N: Tensor
    advantage_N: Tensor
    weight_N: Tensor
    members: tuple[int, ...]

    def to(self, device: torch.device) -> MicroBatch:
        names = ("ids_BT", "place_N", "target_N", "sequence_N", "old_N", "advantage_N", "weight_N")
        return MicroBatch(**{name: getattr(self, name).to(device) for name in names}, members=self.members)


def micro_batches(sequences: Sequence[Trained], *, max_tokens: int, pad_id: int = 0) -> Iterator[MicroBatch]:
    """All sequences that have something to train on, longest first, in rectangles of at most ``max_tokens`` tokens.

    A sequence longer than that gets a rectangle of its own. Attention is causal, so the padding on the right is seen by
    no token that counts.
    """
    trained = [i for i, one in enumerate(sequences) if any(one.sample.completion_mask)]
    order = sorted(trained, key=lambda i: -sequences[i].length)
    members: list[int] = []
    for i in order:
        width = sequences[members[0] if members else i].length
        if members and width * (len(members) + 1) > max_tokens:
            yield _rectangle(sequences, members, pad_id)
            members = []
        members.append(i)
    if members:
        yield _rectangle(sequences, members, pad_id)


def _rectangle(sequences: Sequence[Trained], members: Sequence[int], pad_id: int) -> MicroBatch:
    width = max(sequences[i].length for i in members)
    ids_BT = np.full((len(members), width), pad_id, np.int64)
    places, rows, old, counts = [], [], [], []
    for row, i in enumerate(members):
        sample = sequences[i].sample
        start = len(sample.prompt_ids)
        ids_BT[row, :start] = sample.prompt_ids
        ids_BT[row, start : sequences[i].length] = sample.completion_ids
        chosen = np.flatnonzero(sample.completion_mask)
        chosen = chosen[chosen + start > 0]  # a first token without a prompt is predicted from nothing
        places.append(row * width + start + chosen)
        rows.append(np.full(len(chosen), row))
        old.append(np.asarray(sample.completion_logprobs, np.float32)[chosen])
        counts.append(len(chosen))
    place_N = np.concatenate(places)
    return MicroBatch(
        ids_BT=torch.from_numpy(ids_BT),
        place_N=torch.from_numpy(place_N - 1),  # a token is predicted at the place before it
        target_N=torch.from_numpy(ids_BT.reshape(-1)[place_N]),
        sequence_N=torch.from_numpy(np.concatenate(rows)),
        old_N=torch.from_numpy(np.concatenate(old)),
        advantage_N=torch.from_numpy(np.repeat([sequences[i].advantage for i in members], counts).astype(np.float32)),
        weight_N=torch.from_numpy(np.repeat([sequences[i].weight for i in members], counts).astype(np.float32)),
        members=tuple(members),
    )
