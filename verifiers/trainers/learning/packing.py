"""Packed batches: sequences are concatenated without padding, and a prefix that several of them share is computed once.

A sequence consists of a **prefix** (all but the last token of its prompt) and a **suffix** (the rest, up to the last
position that predicts a trained token). A packed batch has each distinct prefix once, then every suffix. Only attention
mixes positions: a prefix attends to itself, a suffix to its prefix and itself. An attention function that does this is
registered with transformers under `NAME`, so that any decoder that uses that registry can run packed batches with its
own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from verifiers.kernels import attention
from verifiers.kernels.attention import Asked, as_called
from verifiers.kernels.autograd import attended
from verifiers.kernels.cpu import learning as cpu
from verifiers.kernels.cpu.learning import Segments
from verifiers.kernels.devices import to_device

NAME = "verifiers_packed"
LARGEST_HEAD_DIM = 256  # of the fused attention kernels


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """The layout of a packed batch: lengths of its prefixes (G) and suffixes (B), and the prefix of each suffix.

    ``position_T`` is the position of each token in its own sequence.
    """

    prefix_G: np.ndarray
    suffix_B: np.ndarray
    prefix_of_B: np.ndarray
    position_T: Tensor

    @cached_property
    def prefix_tokens(self) -> int:
        """The number of tokens of all prefixes, which is also the index of the first suffix."""
        return int(self.prefix_G.sum())

    @cached_property
    def before_B(self) -> np.ndarray:
        """The length of the prefix of each suffix."""
        before: np.ndarray = self.prefix_G[self.prefix_of_B]
        return before

    @cached_property
    def longest(self) -> int:
        """The length of the longest sequence."""
        return int((self.before_B + self.suffix_B).max())

    @cached_property
    def segments(self) -> _VarlenAttention:
        return _VarlenAttention(self, with_prefixes=True)

    @cached_property
    def suffix_segments(self) -> _VarlenAttention:
        return _VarlenAttention(self, with_prefixes=False)

    @cached_property
    def cpu_segments(self) -> tuple[Segments, Segments]:
        """All segments, and the segments of the suffixes alone, for the C kernel.

        A segment is (start, length, start of its prefix, length of its prefix), in tokens.
        """
        lengths = np.concatenate((self.prefix_G, self.suffix_B))
        starts = np.cumsum(lengths) - lengths
        is_none = np.zeros_like(self.prefix_G)
        before = np.concatenate((is_none, starts[self.prefix_of_B])), np.concatenate((is_none, self.before_B))
        segments = np.stack((starts, lengths, *before), 1)
        most_keys = int((lengths + before[1]).max())
        parts = (segments[lengths > 0], segments[len(self.prefix_G) :])
        whole, suffixes = (torch.from_numpy(np.ascontiguousarray(one)) for one in parts)
        return Segments(whole, 0, most_keys), Segments(suffixes, self.prefix_tokens, most_keys)

    @cached_property
    def padded(self) -> _PaddedAttention:
        return _PaddedAttention(self)


class _SuffixKeys:
    """The keys (or values) that each suffix attends to: copies of those of its prefix, then its own.

    The backward pass sums the gradients of a prefix's copies in a fixed order, so that the result is reproducible.
    """

    def __init__(self, packing: Packing, start_B: Any, size: int, *, with_prefixes: bool = False) -> None:
        prefix_G, prefix_of_B = packing.prefix_G, packing.prefix_of_B
        before_B, split = packing.before_B, packing.prefix_tokens
        from_prefixes = ranges((np.cumsum(prefix_G) - prefix_G)[prefix_of_B], before_B)
        to_prefixes, to_suffixes = ranges(start_B, before_B), ranges(start_B + before_B, packing.suffix_B)
        tokens = np.zeros(size, np.int64)
        copies = np.full((split, int(np.bincount(prefix_of_B).max()) + with_prefixes), -1)
        if with_prefixes:
            tokens[:split] = copies[:, -1] = np.arange(split)
        tokens[to_prefixes], tokens[to_suffixes] = from_prefixes, split + np.arange(len(to_suffixes))
        copies[from_prefixes, np.repeat(_index_in_group(prefix_of_B), before_B)] = to_prefixes
        device = packing.position_T.device
        is_copy = None if (copies >= 0).all() else to_device((copies >= 0)[..., None, None], device)
        self._tokens, self._suffixes, self._copies = (
            to_device(one, device) for one in (tokens, to_suffixes, np.maximum(copies, 0))
        )
        self._is_copy = is_copy

    def of(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = _CopyKeys.apply(k, v, self._tokens, self._suffixes, self._copies, self._is_copy)
        return keys, values


class _CopyKeys(Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, tokens: Tensor, suffixes: Tensor, copies: Tensor, is_copy: Tensor | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(suffixes, copies, is_copy)
        return k.index_select(0, tokens), v.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        return *(_sum_copies(grad, *saved) for grad in grads), None, None, None, None


def _sum_copies(grad: Tensor, suffixes: Tensor, copies: Tensor, is_copy: Tensor | None) -> Tensor:
    split, most = copies.shape
    out = grad.new_empty((split + len(suffixes), *grad.shape[1:]))
    torch.index_select(grad, 0, suffixes, out=out[split:])
    if split:
        parts = grad.index_select(0, copies.view(-1)).view(split, most, *grad.shape[1:])
        torch.sum(parts if is_copy is None else parts.mul_(is_copy), 1, out=out[:split])
    return out


def ranges(starts: Any, lengths: Any) -> Any:
    """``arange(start, start + length)`` for each start and length, concatenated.

    >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    return np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())


def _index_in_group(groups: Any) -> Any:
    """The index of each element among those with the same value.

    >>> _index_in_group(np.array([4, 7, 4, 4])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(groups, kind="stable")
    ranks = np.empty_like(order)
    ranks[order] = ranges(0 * np.unique(groups), np.unique(groups, return_counts=True)[1])
    return ranks


class _PaddedAttention:
    """Plain attention on two padded rectangles: one of the prefixes, one of the suffixes with their prefix's keys."""

    def __init__(self, packing: Packing) -> None:
        device, suffix_B, before_B = packing.position_T.device, packing.suffix_B, packing.before_B
        self._split = packing.prefix_tokens
        self._prefixes, self._suffixes = (_Rectangle(lengths, device) for lengths in (packing.prefix_G, suffix_B))
        self._width = packing.longest
        self._keys = _SuffixKeys(packing, np.arange(len(suffix_B)) * self._width, len(suffix_B) * self._width)
        is_even = len(set(before_B.tolist())) == 1
        position_BC = torch.from_numpy((before_B[:1] if is_even else before_B)[:, None] + np.arange(suffix_B.max()))
        seen = torch.arange(self._width) <= position_BC[:, None, :, None]
        self._seen = seen.to(device).expand(len(suffix_B), 1, -1, -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float, suffixes_only: bool) -> Tensor:
        keys, values = (one.unflatten(0, (-1, self._width)) for one in self._keys.of(k, v))
        queries = self._suffixes.pad(q[self._split :])
        suffixes = self._suffixes.unpad(dense_attention(queries, keys, values, scale, dropout, self._seen))
        if suffixes_only or not self._split:
            return suffixes
        q, k, v = (self._prefixes.pad(one[: self._split]) for one in (q, k, v))
        return torch.cat((self._prefixes.unpad(dense_attention(q, k, v, scale, dropout)), suffixes))


class _Rectangle:
    """Pads concatenated sequences ``[T, …]`` to a rectangle ``[B, longest, …]``, and reverses this."""

    def __init__(self, lengths: Any, device: torch.device) -> None:
        self._shape = len(lengths), int(lengths.max())
        self._places = to_device(ranges(np.arange(len(lengths)) * self._shape[1], lengths), device)

    def pad(self, x: Tensor) -> Tensor:
        rows, width = self._shape
        return x.new_zeros((rows * width, *x.shape[1:])).index_copy(0, self._places, x).unflatten(0, self._shape)

    def unpad(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1).index_select(0, self._places)


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float = 0.0, seen: Tensor | None = None
) -> Tensor:
    """Attention of ``[B, T, heads, dim]``, causal or with the mask ``seen``; keys and values may have fewer heads."""
    if seen is None and _suit_c(q, k, v, dropout):  # bitwise equal to the result in a packed batch
        flat_q, flat_k, flat_v = (one.flatten(0, 1) for one in (q, k, v))
        return attended(flat_q, flat_k, flat_v, _rectangle(*q.shape[:2]), scale).view(q.shape)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    share = q.shape[1] // k.shape[1]
    # CUDA has fused kernels for grouped heads only in half precision, and only without a mask.
    is_grouped = share > 1 and (
        not q.is_cuda or (q.element_size() == 2 and q.shape[-1] <= LARGEST_HEAD_DIM and seen is None)
    )  # fmt: skip
    if share > 1 and not is_grouped:
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    out = F.scaled_dot_product_attention(
        q, k, v, seen, dropout_p=dropout, is_causal=seen is None, scale=scale, enable_gqa=is_grouped
    )
    return out.transpose(1, 2)


def _suit_c(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> bool:
    # Under autocast, queries may be float32 while values are in half precision.
    return all(map(cpu.suit, (q, k, v))) and k.shape == v.shape and k.shape[-1] == q.shape[-1] and not dropout


@lru_cache(maxsize=64)
def _rectangle(rows: int, length: int) -> Segments:
    start_B = torch.arange(rows) * length
    segments_B4 = torch.stack(
        (start_B, torch.full_like(start_B, length), *torch.zeros((2, rows), dtype=torch.int64)), 1
    )
    return Segments(segments_B4, 0, length)


class _VarlenAttention:
    """Concatenated segments of any length, in one call of the variable-length flash attention kernel."""

    def __init__(self, packing: Packing, *, with_prefixes: bool) -> None:
        device, prefix_G, suffix_B = packing.position_T.device, packing.prefix_G, packing.suffix_B
        keys_B = packing.before_B + suffix_B
        self._first = 0 if with_prefixes else packing.prefix_tokens
        own = packing.prefix_tokens if with_prefixes else 0
        whole_G = prefix_G[prefix_G > 0] if with_prefixes else prefix_G[:0]
        queries, keys = np.concatenate((whole_G, suffix_B)), np.concatenate((whole_G, keys_B))
        ends = [np.concatenate(([0], np.cumsum(one))).astype(np.int32) for one in (queries, keys)]
        self._query_ends, self._key_ends = (to_device(one, device) for one in ends)
        self._most_queries, self._most_keys = int(queries.max()), int(keys.max())
        self._keys = _SuffixKeys(
            packing, own + np.cumsum(keys_B) - keys_B, int(keys.sum()), with_prefixes=with_prefixes
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float) -> Tensor:
        return varlen_attention(
            q[self._first :], *self._keys.of(k, v), self._query_ends, self._key_ends,
            self._most_queries, self._most_keys, scale, dropout,
        )  # fmt: skip


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, query_ends: Tensor, key_ends: Tensor, most_queries: int, most_keys: int,
    scale: float, dropout: float,
) -> Tensor:  # fmt: skip
    """Causal attention of concatenated segments, aligned at the end: the last query attends to all of their keys."""
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, query_ends, key_ends, most_queries, most_keys, dropout, True, False, scale=scale
    )[0]
    return out


@dataclass
class PackedForward:
    """One forward pass over a packed batch; records the number of attention calls and their narrowest window."""

    packing: Packing
    varlen: bool  # use the variable-length kernel where possible
    calls: int = 0
    narrowest: int | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *,
        scale: float, window: int | None = None, softcap: float | None = None, dropout: float = 0.0,
        suffixes_only: bool = False,
    ) -> Tensor:  # fmt: skip
        """Attention of all tokens, or of the suffixes only; q, k and v are ``[T, heads, dim]``.

        Keys and values may have fewer heads. Raises NotImplementedError for attention that cannot be packed.
        """
        if softcap is not None or (window is not None and window < self.packing.longest):
            raise NotImplementedError("packed batches support neither capped scores nor windows that hide tokens")
        self.calls += 1
        self.narrowest = min((one for one in (window, self.narrowest) if one is not None), default=None)
        packing, dim = self.packing, q.shape[-1]
        if self.varlen and q.is_cuda and q.element_size() == 2 and dim <= LARGEST_HEAD_DIM and dim % 8 == 0:
            return (packing.suffix_segments if suffixes_only else packing.segments).attend(q, k, v, scale, dropout)
        if _suit_c(q, k, v, dropout):
            return attended(q, k, v, packing.cpu_segments[suffixes_only], scale)
        return packing.padded.attend(q, k, v, scale, dropout, suffixes_only)


def current() -> PackedForward | None:
    """The packed forward pass that is running on this thread, if any."""
    found = attention.current()
    return found if isinstance(found, PackedForward) else None


def computing(configs: Sequence[Any], packed: PackedForward) -> AbstractContextManager[None]:
    """During the block, the model of these configurations uses this packed attention, on this thread only."""
    attention.register(NAME, shared_attention)
    return attention.attending(configs, packed, NAME)


@as_called
def shared_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
    """The attention function that transformers calls in a packed forward pass."""
    packed = current()
    if packed is None:
        raise RuntimeError("a trainer is computing an update with this model: run it after the step")
    if asked.mask is not None or not asked.is_causal or len(query) != 1:
        raise NotImplementedError("packed batches support only causal attention without a mask")
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    settings: dict[str, Any] = {"scale": asked.scale, "window": asked.window, "softcap": asked.softcap}
    return packed.attend(q, k, v, **settings, dropout=asked.dropout)[None]
