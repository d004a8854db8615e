"""Layouts of concatenated tokens: index ranges, and the keys of prefixes copied to the suffixes that attend to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from verifiers.kernels.devices import to_device

if TYPE_CHECKING:
    from verifiers.trainers.learning.packing import Packing


class SuffixKeys:
    """The keys (or values) that each suffix attends to: copies of those of its prefix, then its own.

    In the backward pass the gradients of a prefix's copies are summed in a fixed order: the result is reproducible.
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
    """``arange(start, start + length)`` of each start and length, concatenated.

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
