"""A history split among several programs, each with a softmax of its own part; what they found is merged.

A few sequences with long histories would keep a few multiprocessors busy for long, and leave the others idle.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

PER_MULTIPROCESSOR = 4  # programs: enough for the ends of long and short ones to even out
LEVELS = (1, 4, 32)  # a kernel is compiled for each


def splits_for(programs: int, multiprocessors: int) -> int:
    """Parts of each history, so that every multiprocessor has several programs.

    >>> [splits_for(rows * heads, 132) for rows, heads in ((1, 2), (128, 2), (256, 3), (1024, 3))]
    [32, 4, 1, 1]
    """
    wanted = -(-PER_MULTIPROCESSOR * multiprocessors // programs)
    return next((level for level in LEVELS if level >= wanted), LEVELS[-1])


@cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def partial_sums(programs: int, splits: int, queries: int, dim: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """Where programs put what they found: sums of values, and the highest score with the sum of weights."""
    if splits == 1:
        return out, out
    size = (programs, splits, queries)
    one, two = (torch.empty((*size, n), dtype=torch.float32, device=out.device) for n in (dim, 2))
    return one, two


@triton.jit
def capped(scores, softcap):
    """softcap · tanh(scores / softcap)."""
    return softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)


@triton.jit
def attend_block(q, keys, values, inside, seen, scale, softcap, top, total, out, CAPPED: tl.constexpr):
    """Go on with a softmax by a block of keys and values: its highest score, its sum of weights, and that of values."""
    k = tl.load(keys, mask=inside, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee").to(tl.float32) * scale
    if CAPPED:
        scores = capped(scores, softcap)
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp(top - higher)
    weights = tl.exp(scores - higher[:, None])
    v = tl.load(values, mask=inside, other=0.0)
    out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee").to(tl.float32)
    return higher, total * shrink + tl.sum(weights, 1), out


@triton.jit
def store_part(part_ptr, sum_ptr, part, d, top, total, out, mask, PADDED_DIM: tl.constexpr):
    """Put what a program found of its part where `merge` reads it."""
    tl.store(part_ptr + part[:, None] * PADDED_DIM + d[None, :], out, mask=mask)
    tl.store(sum_ptr + part * 2, top)
    tl.store(sum_ptr + part * 2 + 1, total)


@triton.jit(do_not_specialize_on_alignment=["first_ptr", "count_ptr"])
def _merge(
    out_ptr, part_ptr, sum_ptr, first_ptr, count_ptr, out_token,
    IS_LISTED: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    group = tl.program_id(1)
    first_token, count = block, 1
    if IS_LISTED:
        first_token, count = tl.load(first_ptr + block), tl.load(count_ptr + block)
    if count == 0:
        return
    m = tl.arange(0, QUERIES)
    d = tl.arange(0, PADDED_DIM)
    first = (block * tl.num_programs(1) + group).to(tl.int64) * SPLITS * QUERIES + m
    token, head = m // HEADS, group * HEADS + m % HEADS
    is_out = (token < count)[:, None] & (d < DIM)[None, :]
    top = tl.full([QUERIES], -1e38, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, PADDED_DIM], tl.float32)
    for split in range(SPLITS):
        part = first + split * QUERIES
        other = tl.load(sum_ptr + part * 2)
        more = tl.load(sum_ptr + part * 2 + 1)
        higher = tl.maximum(top, other)
        shrink, share = tl.exp(top - higher), tl.exp(other - higher)
        total = total * shrink + more * share
        # A part without any keys left its sums unwritten.
        at = part_ptr + part[:, None] * PADDED_DIM + d[None, :]
        found = tl.load(at, mask=is_out & (more != 0.0)[:, None], other=0.0)
        out = out * shrink[:, None] + found * share[:, None]
        top = higher
    out_at = out_ptr + (first_token + token)[:, None].to(tl.int64) * out_token + head[:, None] * DIM + d[None, :]
    tl.store(out_at, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_out)


def merge(
    out: Tensor, parts: Tensor, sums: Tensor, *, groups: int, share: int, dim: int, out_token: int,
    listed: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Into ``out``: program i has the queries of token i, or of the tokens ``listed`` (the first, and how many)."""
    programs, splits, queries, padded = parts.shape
    first, count = (out, out) if listed is None else listed
    _merge[(programs // groups, groups)](
        out, parts, sums, first, count, out_token,
        IS_LISTED=listed is not None, HEADS=share, QUERIES=queries, DIM=dim, PADDED_DIM=padded, SPLITS=splits,
        num_warps=4,
    )  # fmt: skip
