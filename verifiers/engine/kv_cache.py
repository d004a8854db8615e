"""The KV cache: a slot for each sequence, and what prefill and decode do with keys and values in PyTorch.

Slots of running sequences come first. Behind them lie slots that keep the keys and values of finished ones, for a
prompt that begins like one of them.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiers.kernels.devices import host_index
from verifiers.kernels.norms import HeadNorms
from verifiers.kernels.reference import causal_attention


@dataclass(frozen=True, slots=True)
class Shape:
    """What the cache of a model looks like."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        """Read off a transformers configuration, under whatever names the family uses."""
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        return cls(layers=text.num_hidden_layers, kv_heads=kv_heads, head_dim=head_dim)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * int(dtype.itemsize)


def _zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, which on a CPU take memory only where they are written to: most conversations are shorter than planned."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(size))


class SlotCache:
    """Keys and values of every layer: ``[layers, 2, rows, kv_heads, length, head_dim]``."""

    def __init__(self, shape: Shape, rows: int, length: int, *, dtype: torch.dtype, device: torch.device) -> None:
        size = (shape.layers, 2, rows, shape.kv_heads, length, shape.head_dim)
        self.store = _zeros(size, dtype, device)
        self.layers = [(self.store[i, 0], self.store[i, 1]) for i in range(shape.layers)]

    def move(self, source: int, target: int, n: int) -> None:
        """Copy the first ``n`` positions of a row over another."""
        if source != target:
            self.store[:, :, target, :, :n] = self.store[:, :, source, :, :n]

    def swap(self, one: int, other: int, n_one: int, n_other: int) -> None:
        if one == other:
            return
        n = max(n_one, n_other)
        kept = self.store[:, :, one, :, :n].clone()
        self.store[:, :, one, :, :n] = self.store[:, :, other, :, :n]
        self.store[:, :, other, :, :n] = kept

    def clear(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.store[:, :, row] = 0

    def spread(self, source: int, targets: Sequence[int], n: int) -> None:
        """Copy a row to several others at once."""
        index = host_index(targets, self.store.device)
        self.store[:, :, index, :, :n] = self.store[:, :, source : source + 1, :, :n]


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's part of a packed prefill: tokens ``[start, end)`` go to a slot that holds ``past`` already."""

    start: int
    end: int
    slot: int
    past: int


@dataclass(slots=True)
class Prefill:
    """Several prompts side by side in one row of tokens; each attends to itself and to its row's past."""

    cache: SlotCache
    segments: list[Segment]

    def slots_of_tokens(self) -> np.ndarray:
        """Which slot of the cache each token goes to."""
        rows, lengths = zip(*((one.slot, one.end - one.start) for one in self.segments), strict=True)
        return np.repeat(np.array(rows, np.int64), lengths)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        keys, values = self.cache.layers[layer]
        outputs = []
        for segment in self.segments:
            part = slice(segment.start, segment.end)
            q_part, k_part, v_part = q[:, :, part], k[:, :, part], v[:, :, part]
            end = segment.past + segment.end - segment.start
            keys[segment.slot, :, segment.past : end] = k_part[0]
            values[segment.slot, :, segment.past : end] = v_part[0]
            if segment.past:
                row = slice(segment.slot, segment.slot + 1)
                k_part, v_part = keys[row, :, :end], values[row, :, :end]
            outputs.append(causal_attention(q_part, k_part, v_part, segment.past, scale, window, softcap))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


@dataclass(slots=True)
class Decode:
    """One new token for each of the first B rows; ``length_B`` positions of each are filled before it."""

    cache: SlotCache
    slots_B: Tensor
    length_B: Tensor
    span: int
    _masks: dict[int | None, Tensor] = field(default_factory=dict)
    _index: Tensor | None = None
    _angles: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        keys, values = self.cache.layers[layer]
        batch, heads, _, dim = q.shape
        groups, length = keys.shape[1], keys.shape[2]
        if self._index is None:
            group_G = torch.arange(groups, device=q.device)
            self._index = ((self.slots_B[:, None] * groups + group_G) * length + self.length_B[:, None]).view(-1)
        keys.view(-1, dim).index_copy_(0, self._index, k.reshape(-1, dim))
        values.view(-1, dim).index_copy_(0, self._index, v.reshape(-1, dim))
        k_seen = keys.view(-1, length, dim)[: batch * groups, : self.span]
        v_seen = values.view(-1, length, dim)[: batch * groups, : self.span]
        q = q.reshape(batch * groups, heads // groups, dim)
        mask = self._mask(window, q.dtype, groups)
        if softcap is None:
            scores = torch.baddbmm(mask, q, k_seen.transpose(1, 2), alpha=scale)
        else:
            scores = torch.tanh(torch.bmm(q, k_seen.transpose(1, 2)) * (scale / softcap)) * softcap + mask
        return torch.bmm(torch.softmax(scores, -1), v_seen).view(batch, heads, 1, dim)

    def rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None,
        **settings: Any,
    ) -> Tensor:  # fmt: skip
        """Queries and keys are turned together, by angles that are the same in every layer."""
        q, k = (q, k) if norms is None else norms.of(q, k)
        half = q.shape[-1] // 2
        if self._angles is None or self._angles[0] is not cos:
            self._angles = cos, cos[:, None], torch.cat((-sin[..., :half], sin[..., half:]), -1)[:, None]
        _, cos_B, sin_B = self._angles
        both = torch.cat((q, k), 1)
        turned = torch.cat((both[..., half:], both[..., :half]), -1)
        both = (both * cos_B).addcmul_(turned, sin_B)
        heads = q.shape[1]
        return self(layer, both[:, :heads], both[:, heads:], v, **settings)

    def _mask(self, window: int | None, dtype: torch.dtype, groups: int) -> Tensor:
        mask = self._masks.get(window)
        if mask is None:
            position_S = torch.arange(self.span, device=self.length_B.device)
            hidden = position_S[None] > self.length_B[:, None]
            if window is not None:
                hidden = hidden | (position_S[None] <= self.length_B[:, None] - window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            mask = self._masks[window] = mask.repeat_interleave(groups, 0)[:, None]
        return mask
