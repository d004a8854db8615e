"""Split-KV attention (flash decoding). A sequence's history (its cached keys and values) is split among several
programs. Each computes a softmax over its part, and the last program to finish merges the parts.

Without splits, a few sequences with long histories would occupy a few multiprocessors and leave the others idle.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

PER_MULTIPROCESSOR = 3  # programs per multiprocessor: enough to balance long and short ones
MOST_SPLITS = 32
_MOST_SPLITS = tl.constexpr(MOST_SPLITS)


def splits_for(programs: int, multiprocessors: int) -> int:
    """Number of splits of each history (a power of two), so that every multiprocessor has several programs.

    >>> [splits_for(rows * heads, 132) for rows, heads in ((1, 2), (12, 2), (32, 2), (128, 2), (256, 2), (1024, 3))]
    [32, 16, 8, 2, 1, 1]
    """
    wanted = PER_MULTIPROCESSOR * multiprocessors / programs
    return int(2 ** min(max(round(math.log2(wanted)), 0), math.log2(MOST_SPLITS)))


def counters(programs: int, device: torch.device) -> Tensor:
    """Counters of the stored parts of each history. They are zero before and after each launch."""
    return torch.zeros(programs, dtype=torch.int32, device=device)


def partial_sums(
    programs: int, splits: int, queries: int, dim: int, out: Tensor, stored: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Workspace for the parts: weighted sums of values, (maximum, sum of weights), and the counters."""
    if splits == 1:
        return out, out, out
    size = (programs, splits, queries)
    one, two = (torch.empty((*size, n), dtype=torch.float32, device=out.device) for n in (dim, 2))
    return one, two, counters(programs, out.device) if stored is None else stored


@triton.jit
def capped(scores, softcap):
    """softcap · tanh(scores / softcap)."""
    return softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)


@triton.jit
def attend_block(q, keys, values, inside, seen, scale, softcap, top, total, out, CAPPED: tl.constexpr):
    """Update an online softmax with a block of keys and values: maximum, sum of weights, weighted sum of values."""
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
def attend_new(q, k, v, scale, softcap, top, total, out, CAPPED: tl.constexpr):
    """Update an online softmax with one key and its value."""
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
    if CAPPED:
        score = capped(score, softcap)
    higher = tl.maximum(top, score)
    shrink, weight = tl.exp(top - higher), tl.exp(score - higher)
    return higher, total * shrink + weight, out * shrink[:, None] + weight[:, None] * v.to(tl.float32)[None, :]


@triton.jit
def span_of(length, split, splits, BLOCK: tl.constexpr):
    """First and end position of a split, and the number of splits that are not empty."""
    span = tl.maximum((length + BLOCK * splits - 1) // (BLOCK * splits), 1) * BLOCK
    parts = tl.maximum((length + span - 1) // span, 1)
    return split * span, tl.minimum((split + 1) * span, length), parts


@triton.jit
def merge_part(
    part_ptr, sum_ptr, stored_ptr, history, split, splits, parts, queries, d, top, total, out, mask,
    QUERIES: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Store a part. The program that stores a history's last part merges all parts in order and returns True first."""
    MOST: tl.constexpr = _MOST_SPLITS
    AT_ONCE: tl.constexpr = 64 // QUERIES if QUERIES < 64 else 1
    first = history.to(tl.int64) * splits * QUERIES
    part = first + split * QUERIES + queries
    tl.store(part_ptr + part[:, None] * PADDED_DIM + d[None, :], out, mask=mask)
    tl.store(sum_ptr + part * 2, top)
    tl.store(sum_ptr + part * 2 + 1, total)
    tl.debug_barrier()  # all threads must have stored before the part is counted
    is_last = tl.atomic_add(stored_ptr + history, 1, sem="acq_rel") == parts - 1
    if is_last:
        tl.store(stored_ptr + history, 0)
        tops, totals = load_sums(sum_ptr + 2 * first, 0, parts, queries, MOST, QUERIES)
        top = tl.max(tops, 0)
        total = tl.sum(totals * tl.exp(tops - top[None, :]), 0)
        out = tl.zeros([QUERIES, PADDED_DIM], tl.float32)
        for begun in range(0, parts, AT_ONCE):  # loads of several parts overlap
            some, _ = load_sums(sum_ptr + 2 * first, begun, parts, queries, AT_ONCE, QUERIES)
            other = begun + tl.arange(0, AT_ONCE)
            inside = (other < parts)[:, None, None] & mask[None, :, :]
            row = (first + other[:, None] * QUERIES + queries[None, :])[:, :, None]
            found = tl.load(
                part_ptr + row * PADDED_DIM + d[None, None, :], mask=inside, other=0.0, cache_modifier=".cg"
            )
            out += tl.sum(found * tl.exp(some - top[None, :])[:, :, None], 0)
    return is_last, total, out


@triton.jit
def load_sums(sum_ptr, begun, parts, queries, PARTS: tl.constexpr, QUERIES: tl.constexpr):
    """Maxima and sums of weights ``[PARTS, QUERIES]`` of some parts. Missing parts have weight 0."""
    other = begun + tl.arange(0, PARTS)[:, None]
    at = sum_ptr + 2 * (other * QUERIES + queries[None, :])
    tops = tl.load(at, mask=other < parts, other=-1e38, cache_modifier=".cg")
    return tops, tl.load(at + 1, mask=other < parts, other=0.0, cache_modifier=".cg")
