"""Tokens in one order become tokens in another, and back: end to end, side by side, with the keys they attend to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from verifiers.kernels.devices import to_device

if TYPE_CHECKING:
    from verifiers.trainers.packing import Packing


class Padded:
    """Runs of tokens, side by side in a rectangle and back."""

    def __init__(self, lengths: Any, device: torch.device) -> None:
        self._shape = (len(lengths), int(lengths.max()))
        self._is_full = bool((lengths == self._shape[1]).all())
        if self._is_full:
            return
        rows = np.repeat(np.arange(len(lengths)), lengths)
        places = rows * self._shape[1] + ranges(0 * lengths, lengths)
        tokens = np.zeros(self._shape[0] * self._shape[1], np.int64)  # padding repeats a token, and has no gradient
        tokens[places] = np.arange(len(places))
        self._places, self._tokens = to_device(places, device), to_device(tokens, device)

    def side_by_side(self, x: Tensor) -> Tensor:
        if not self._is_full:
            x = _Moved.apply(x, self._tokens, self._places)
        return x.unflatten(0, self._shape)

    def end_to_end(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        return x if self._is_full else chosen(x, self._places)


class _Moved(Function):  # type: ignore[misc]  # torch is not typed here
    """Rows in another order, some of them repeated as padding; ``back`` is where each is, once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad.index_select(0, *ctx.saved_tensors), None, None


def chosen(x: Tensor, rows: Tensor) -> Tensor:
    """Some rows of ``x``, none of them twice."""
    found: Tensor = _Chosen.apply(x, rows)
    return found


class _Chosen(Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad.new_zeros(ctx.shape).index_copy_(0, *ctx.saved_tensors, grad), None


class Keys:
    """The keys (or values) that tails attend to: copies of their heads', and their own.

    On the way back, what the copies of a head got is added up in a fixed order, so that runs can be repeated.
    """

    def __init__(self, packing: Packing, start_B: Any, size: int, *, has_heads: bool = False) -> None:
        head_G, tail_B = np.array(packing.head_G, np.int64), np.array(packing.tail_B, np.int64)
        of_head_B = np.array(packing.of_head_B, np.int64)
        before_B, split = head_G[of_head_B], packing.tokens_in_heads
        from_heads = ranges((np.cumsum(head_G) - head_G)[of_head_B], before_B)
        to_heads, to_tails = ranges(start_B, before_B), ranges(start_B + before_B, tail_B)
        tokens = np.zeros(size, np.int64)
        copies = np.full((split, int(np.bincount(of_head_B).max()) + has_heads), -1)
        if has_heads:
            tokens[:split] = copies[:, -1] = np.arange(split)
        tokens[to_heads], tokens[to_tails] = from_heads, split + np.arange(len(to_tails))
        copies[from_heads, np.repeat(_ranks(of_head_B), before_B)] = to_heads
        device = packing.position_T.device
        is_copy = None if (copies >= 0).all() else to_device((copies >= 0)[..., None, None], device)
        self._tokens, self._tails, self._copies = (
            to_device(one, device) for one in (tokens, to_tails, np.maximum(copies, 0))
        )
        self._is_copy = is_copy

    def of(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = _Copied.apply(k, v, self._tokens, self._tails, self._copies, self._is_copy)
        return keys, values


class _Copied(Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, tokens: Tensor, tails: Tensor, copies: Tensor, is_copy: Tensor | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(tails, copies, is_copy)
        return k.index_select(0, tokens), v.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        return *(_gathered(grad, *saved) for grad in grads), None, None, None, None


def _gathered(grad: Tensor, tails: Tensor, copies: Tensor, is_copy: Tensor | None) -> Tensor:
    split, most = copies.shape
    out = grad.new_empty((split + len(tails), *grad.shape[1:]))
    torch.index_select(grad, 0, tails, out=out[split:])
    if split:
        parts = grad.index_select(0, copies.view(-1)).view(split, most, *grad.shape[1:])
        torch.sum(parts if is_copy is None else parts.mul_(is_copy), 1, out=out[:split])
    return out


def ranges(starts: Any, lengths: Any) -> Any:
    """The numbers of several ranges, one after the other.

    >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    return np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())


def _ranks(kinds: Any) -> Any:
    """The how-manieth of its kind each one is.

    >>> _ranks(np.array([4, 7, 4, 4])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(kinds, kind="stable")
    ranks = np.empty_like(order)
    ranks[order] = ranges(0 * np.unique(kinds), np.unique(kinds, return_counts=True)[1])
    return ranks
