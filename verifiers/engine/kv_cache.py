"""The KV cache in blocks, and the attention of prefill and decode over it in PyTorch.

Position t of a sequence is in block ``table[t // BLOCK]`` of its block table (see block_manager.py).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verifiers.engine.block_manager import BLOCK, blocks_for
from verifiers.kernels.cpu.model import Paged
from verifiers.kernels.devices import host_index, to_device
from verifiers.kernels.norms import HeadNorms
from verifiers.kernels.prove import text_config
from verifiers.kernels.reference import causal_attention


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model's keys and values."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        """Read the sizes from a transformers configuration. Model families use different names."""
        text = text_config(config)
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        return cls(layers=text.num_hidden_layers, kv_heads=kv_heads, head_dim=head_dim)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * int(dtype.itemsize)


def _zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU, pages are allocated when first written to: most sequences never fill theirs."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(size))


class KVCache:
    """Keys and values of every layer: ``[layers, 2, blocks, kv_heads, BLOCK, head_dim]``."""

    def __init__(self, shape: Shape, blocks: int, length: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.length = length  # maximum positions of a sequence
        self.store = _zeros((shape.layers, 2, blocks, shape.kv_heads, BLOCK, shape.head_dim), dtype, device)
        self.layers = [(self.store[i, 0], self.store[i, 1]) for i in range(shape.layers)]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        source, target = (host_index(blocks, self.store.device) for blocks in (sources, targets))
        self.store[:, :, target] = self.store[:, :, source]

    def clear(self, blocks: Sequence[int]) -> None:
        if blocks:
            self.store[:, :, host_index(blocks, self.store.device)] = 0

    def paged(self, tables: np.ndarray) -> Paged:
        """The cache and the block tables of some sequences, for the model in C."""
        return Paged(self.store, tables, self.length)


class Segment(NamedTuple):
    """Tokens ``[start, end)`` of a packed prefill. They follow ``past`` cached positions of one sequence.

    ``table`` is the index of the sequence's block table.
    """

    start: int
    end: int
    table: int
    past: int


def tables_and_positions(segments: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray]:
    """The index of each token's block table, and its position in its sequence.

    >>> [one.tolist() for one in tables_and_positions([Segment(0, 2, table=0, past=7), Segment(2, 3, table=1, past=0)])]
    [[0, 0, 1], [7, 8, 0]]
    """
    start, end, table, past = np.array(segments).T
    table_T, offset_T = (np.repeat(values, end - start) for values in (table, past - start))
    return table_T, np.arange(len(table_T)) + offset_T


@dataclass(slots=True)
class Prefill:
    """Attention of several packed prompts. Each attends to itself and to its sequence's past."""

    cache: KVCache
    tables: np.ndarray  # [sequences, blocks]
    segments: list[Segment]
    table_T: np.ndarray = field(init=False)  # the index of each token's block table
    position_T: np.ndarray = field(init=False)
    _at: tuple[Tensor, Tensor] | None = None  # block and offset of each token

    def __post_init__(self) -> None:
        self.table_T, self.position_T = tables_and_positions(self.segments)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        keys, values = self.cache.layers[layer]
        if self._at is None:
            block_T = self.tables[self.table_T, self.position_T // BLOCK].astype(np.int64)
            self._at = to_device(block_T, q.device), to_device(self.position_T % BLOCK, q.device)
        block_T, offset_T = self._at
        keys[block_T, :, offset_T] = k[0].transpose(0, 1)
        values[block_T, :, offset_T] = v[0].transpose(0, 1)
        outputs = []
        for one in self.segments:
            part, end = slice(one.start, one.end), one.past + one.end - one.start
            k_part, v_part = k[:, :, part], v[:, :, part]
            if one.past:
                read = to_device(self.tables[one.table, : blocks_for(end)].astype(np.int64), q.device)
                k_part, v_part = (x[read].transpose(0, 1).flatten(1, 2)[None, :, :end] for x in (keys, values))
            outputs.append(causal_attention(q[:, :, part], k_part, v_part, one.past, scale, window, softcap))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


@dataclass(slots=True)
class Decode:
    """Attention of one new token for each of B sequences, which have ``length_B`` positions before it."""

    cache: KVCache
    tables: np.ndarray  # [B, at least span // BLOCK]
    length_B: Tensor
    span: int  # positions to read, a multiple of BLOCK; those past a sequence's end are masked
    _masks: dict[int | None, Tensor] = field(default_factory=dict)  # by sliding window
    _at: tuple[Tensor, Tensor, Tensor] | None = None  # blocks that are read; block and offset of the new tokens
    _rotary: tuple[Tensor, Tensor, Tensor] | None = None  # cos as given; cos and signed sin for all heads

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        keys, values = self.cache.layers[layer]
        batch, heads, _, dim = q.shape
        groups = keys.shape[1]
        if self._at is None:
            read = to_device(self.tables[:, : self.span // BLOCK].astype(np.int64), q.device)
            last_B1 = self.length_B[:, None] // BLOCK
            # Past a sequence's last block, read its first block: a NaN in another sequence's block times a weight of 0
            # would be NaN.
            read = read.where(torch.arange(read.shape[1], device=q.device) <= last_B1, read[:, :1])
            self._at = read.view(-1), read.gather(1, last_B1)[:, 0], self.length_B % BLOCK
        read, block_B, offset_B = self._at
        keys[block_B, :, offset_B] = k[:, :, 0]
        values[block_B, :, offset_B] = v[:, :, 0]
        k_seen, v_seen = (
            one.index_select(0, read).view(batch, -1, groups, BLOCK, dim).transpose(1, 2).reshape(-1, self.span, dim)
            for one in (keys, values)
        )
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
        """Rotate queries and keys (RoPE) in one operation. The angles are the same in every layer."""
        q, k = (q, k) if norms is None else norms.of(q, k)
        half = q.shape[-1] // 2
        if self._rotary is None or self._rotary[0] is not cos:
            self._rotary = cos, cos[:, None], torch.cat((-sin[..., :half], sin[..., half:]), -1)[:, None]
        _, cos_B, sin_B = self._rotary
        both = torch.cat((q, k), 1)
        swapped = torch.cat((both[..., half:], both[..., :half]), -1)
        both = (both * cos_B).addcmul_(swapped, sin_B)
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
