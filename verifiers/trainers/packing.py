"""Sequences that begin alike become one row of tokens: what they share is computed once, and nothing is padding.

A sequence is a **head**, all but the last token of its prompt, and a **tail**, all that predicts something that is
trained on. A row has each distinct head once, then every tail. Tokens meet in attention alone: there, a head attends to
itself, and a tail to its head and to itself, by a function that is registered with transformers under a name of its
own. So any decoder that asks that registry for its attention can be run this way, its forward being its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verifiers.kernels.attention import implemented_by
from verifiers.kernels.autograd import attended
from verifiers.kernels.cpu import learning as cpu
from verifiers.kernels.cpu.learning import Segments
from verifiers.kernels.devices import to_device
from verifiers.trainers.token_moves import Keys, Padded

NAME = "verifiers_shared_prompts"
WIDEST = 256  # heads that fused attention takes


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Where the tokens of a row are: the lengths of heads (G) and tails (B), and which head each tail has."""

    head_G: tuple[int, ...]
    tail_B: tuple[int, ...]
    of_head_B: tuple[int, ...]
    position_T: Tensor

    def at(self, position_T: Tensor) -> Packing:
        """The same, where these positions are."""
        return replace(self, position_T=position_T)

    @property
    def tokens_in_heads(self) -> int:
        return sum(self.head_G)

    @cached_property
    def longest(self) -> int:
        return max(self.head_G[g] + tail for g, tail in zip(self.of_head_B, self.tail_B, strict=True))

    @cached_property
    def runs(self) -> _Runs:
        return _Runs(self, has_heads=True)

    @cached_property
    def tail_runs(self) -> _Runs:
        return _Runs(self, has_heads=False)

    @cached_property
    def compiled_runs(self) -> tuple[Segments, Segments]:
        """All tokens in runs, and those of the tails alone."""
        head_G, tail_B = np.array(self.head_G, np.int64), np.array(self.tail_B, np.int64)
        lengths = np.concatenate((head_G, tail_B))
        starts = np.cumsum(lengths) - lengths
        of_head_B = np.array(self.of_head_B, np.int64)
        is_none = np.zeros_like(head_G)
        before = np.concatenate((is_none, starts[of_head_B])), np.concatenate((is_none, head_G[of_head_B]))
        runs = np.stack((starts, lengths, *before), 1)
        most_keys = int((lengths + before[1]).max())
        whole, tails = (torch.from_numpy(np.ascontiguousarray(one)) for one in (runs[lengths > 0], runs[len(head_G) :]))
        return Segments(whole, 0, most_keys), Segments(tails, self.tokens_in_heads, most_keys)

    @cached_property
    def rectangles(self) -> _Rectangles:
        return _Rectangles(self)


# --- attention --------------------------------------------------------------------------------------------------------


class _Rectangles:
    """Heads side by side, then tails side by side, each with the keys of its head before its own."""

    def __init__(self, packing: Packing) -> None:
        device = packing.position_T.device
        head_G, tail_B = np.array(packing.head_G, np.int64), np.array(packing.tail_B, np.int64)
        before_B = head_G[np.array(packing.of_head_B, np.int64)]
        self._split = packing.tokens_in_heads
        self._heads, self._tails = (Padded(one, device) for one in (head_G, tail_B))
        self._width = packing.longest
        self._keys = Keys(packing, np.arange(len(tail_B)) * self._width, len(tail_B) * self._width)
        is_even = len(set(before_B.tolist())) == 1
        position_BC = torch.from_numpy((before_B[:1] if is_even else before_B)[:, None] + np.arange(tail_B.max()))
        seen = torch.arange(self._width) <= position_BC[:, None, :, None]
        self._seen = seen.to(device).expand(len(tail_B), 1, -1, -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float, tails_only: bool) -> Tensor:
        keys, values = (one.unflatten(0, (-1, self._width)) for one in self._keys.of(k, v))
        tails = dense_attention(self._tails.side_by_side(q[self._split :]), keys, values, scale, dropout, self._seen)
        tails = self._tails.end_to_end(tails)
        if tails_only or not self._split:
            return tails
        q, k, v = (self._heads.side_by_side(one[: self._split]) for one in (q, k, v))
        heads = dense_attention(q, k, v, scale, dropout)
        return torch.cat((self._heads.end_to_end(heads), tails))


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float = 0.0, seen: Tensor | None = None
) -> Tensor:
    """Attention of ``[B, T, heads, dim]``, causal or to what is seen; keys and values may have fewer heads."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    share = q.shape[1] // k.shape[1]
    # A card has fused kernels for groups of heads in half precision only, and none that take a mask besides.
    is_grouped = share > 1 and (
        not q.is_cuda or (q.element_size() == 2 and q.shape[-1] <= WIDEST and seen is None)
    )  # fmt: skip
    if share > 1 and not is_grouped:
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    out = F.scaled_dot_product_attention(
        q, k, v, seen, dropout_p=dropout, is_causal=seen is None, scale=scale, enable_gqa=is_grouped
    )
    return out.transpose(1, 2)


class _Runs:
    """Sequences of all lengths end to end, each attending to its last keys as many as it can see: one kernel."""

    def __init__(self, packing: Packing, *, has_heads: bool) -> None:
        device = packing.position_T.device
        head_G, tail_B = np.array(packing.head_G, np.int64), np.array(packing.tail_B, np.int64)
        keys_B = head_G[np.array(packing.of_head_B, np.int64)] + tail_B
        self._first = 0 if has_heads else packing.tokens_in_heads
        own = packing.tokens_in_heads if has_heads else 0
        whole_G = head_G[head_G > 0] if has_heads else head_G[:0]
        queries, keys = np.concatenate((whole_G, tail_B)), np.concatenate((whole_G, keys_B))
        ends = [np.concatenate(([0], np.cumsum(one))).astype(np.int32) for one in (queries, keys)]
        self._query_ends, self._key_ends = (to_device(one, device) for one in ends)
        self._most_queries, self._most_keys = int(queries.max()), int(keys.max())
        self._keys = Keys(packing, own + np.cumsum(keys_B) - keys_B, int(keys.sum()), has_heads=has_heads)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float) -> Tensor:
        return run_attention(
            q[self._first :], *self._keys.of(k, v), self._query_ends, self._key_ends,
            self._most_queries, self._most_keys, scale, dropout,
        )  # fmt: skip


def run_attention(
    q: Tensor, k: Tensor, v: Tensor, query_ends: Tensor, key_ends: Tensor, most_queries: int, most_keys: int,
    scale: float, dropout: float,
) -> Tensor:  # fmt: skip
    """Attention of runs that lie end to end, in which the last query sees the last key, the one before one less, …"""
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, query_ends, key_ends, most_queries, most_keys, dropout, True, False, scale=scale
    )[0]
    return out


# --- the door into transformers ---------------------------------------------------------------------------------------


@dataclass
class Row:
    """A packed row that is being computed, and what its layers asked for."""

    packing: Packing
    in_runs: bool  # sequences of all lengths are attended to in one go, without rectangles, by those who can
    calls: int = 0
    narrowest: int | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *,
        scale: float, window: int | None = None, softcap: float | None = None, dropout: float = 0.0,
        tails_only: bool = False,
    ) -> Tensor:  # fmt: skip
        """Attention of all tokens, or of those of the tails; all are given: ``[T, heads, dim]``.

        Keys and values may have fewer heads. What it cannot do it says by an error.
        """
        if softcap is not None or (window is not None and window < self.packing.longest):
            raise NotImplementedError("packed rows have no capped scores, and no windows shorter than their sequences")
        self.calls += 1
        self.narrowest = min((one for one in (window, self.narrowest) if one is not None), default=None)
        packing, dim = self.packing, q.shape[-1]
        if self.in_runs and q.is_cuda and q.element_size() == 2 and dim <= WIDEST and dim % 8 == 0:
            return (packing.tail_runs if tails_only else packing.runs).attend(q, k, v, scale, dropout)
        # Autocast may leave queries in float32 beside values in half precision.
        if all(map(cpu.suit, (q, k, v))) and k.shape == v.shape and k.shape[-1] == dim and not dropout:
            return attended(q, k, v, packing.compiled_runs[tails_only], scale)
        return packing.rectangles.attend(q, k, v, scale, dropout, tails_only)


class _Current(threading.local):
    row: Row | None = None


_current = _Current()


def current() -> Row | None:
    """The packed row that is being computed on this thread, if one is."""
    return _current.row


@contextmanager
def computing(configs: Sequence[Any], row: Row) -> Iterator[None]:
    """While this lasts, the model that these configurations belong to computes a packed row, on this thread."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, shared_attention)
    with implemented_by(NAME, configs):
        _current.row = row
        try:
            yield
        finally:
            _current.row = None


def shared_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls while a packed row is computed."""
    row = _current.row
    if row is None:
        raise RuntimeError("a trainer learns with this model just now: run it once the step is over")
    is_causal = kwargs.get("is_causal", getattr(module, "is_causal", True))
    if attention_mask is not None or kwargs.get("s_aux") is not None or is_causal is False or len(query) != 1:
        raise NotImplementedError("packed rows have causal attention, without masks and sinks")
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = row.attend(q, k, v, scale=scale, window=sliding_window, softcap=softcap, dropout=dropout)
    return out[None], None
