"""Kernels for CUDA: several new tokens of each row are stored in it, and attend to what it holds up to themselves.

A few tokens over a long history would keep a few multiprocessors busy for long: the history is split among several, and
what they found is merged.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verifiers.kernels.cuda.decode import block_of

QUERIES = 64  # tokens times heads that share a key, at a time
SPLITS = 8


@triton.jit
def _store(
    k_ptr, v_ptr, keys_ptr, values_ptr, row_ptr, position_ptr, k_head, k_token, v_head, v_token, cache_row, cache_head,
    GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + token)
    position = tl.load(position_ptr + token)
    group = tl.arange(0, PADDED_GROUPS)[:, None]
    d = tl.arange(0, PADDED_DIM)[None, :]
    inside = (group < GROUPS) & (d < DIM)
    at = row * cache_row + group * cache_head + position * DIM + d
    tl.store(keys_ptr + at, tl.load(k_ptr + token * k_token + group * k_head + d, mask=inside), mask=inside)
    tl.store(values_ptr + at, tl.load(v_ptr + token * v_token + group * v_head + d, mask=inside), mask=inside)


def store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, row_T: Tensor, position_T: Tensor) -> None:
    """Write keys and values ``[1, groups, T, dim]`` to rows of the cache."""
    _, groups, tokens, dim = k.shape
    _store[(tokens,)](
        k, v, keys, values, row_T, position_T, k.stride(1), k.stride(2), v.stride(1), v.stride(2),
        keys.stride(0), keys.stride(1), GROUPS=groups, PADDED_GROUPS=triton.next_power_of_2(groups),
        DIM=dim, PADDED_DIM=triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip


@triton.jit
def _extend(
    q_ptr, keys_ptr, values_ptr, out_ptr, part_ptr, sum_ptr, block_ptr, scale, softcap, blocks,
    q_head, q_token, cache_row, cache_head, out_token,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Some tokens of one prompt, the heads of one group, and a part of what their row holds."""
    block = tl.program_id(0)
    group = tl.program_id(1)
    split = tl.program_id(2)
    first_token = tl.load(block_ptr + block)
    count = tl.load(block_ptr + blocks + block)
    row = tl.load(block_ptr + 2 * blocks + block)
    position = tl.load(block_ptr + 3 * blocks + block)
    if count == 0:
        return
    m = tl.arange(0, QUERIES)
    d = tl.arange(0, PADDED_DIM)
    token, head = m // HEADS, group * HEADS + m % HEADS
    in_dim = d < DIM
    is_q = (token < count)[:, None] & in_dim[None, :]
    q_at = q_ptr + (first_token + token)[:, None] * q_token + head[:, None] * q_head + d[None, :]
    q = tl.load(q_at, mask=is_q, other=0.0)
    last = position + token
    top = tl.full([QUERIES], -1e38, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, PADDED_DIM], tl.float32)
    keys = keys_ptr + row * cache_row + group * cache_head
    values = values_ptr + row * cache_row + group * cache_head
    end = position + count
    span = (end + BLOCK * SPLITS - 1) // (BLOCK * SPLITS) * BLOCK
    begin, stop = split * span, tl.minimum((split + 1) * span, end)
    if WINDOW > 0:
        begin = tl.maximum(begin, tl.maximum(position + 1 - WINDOW, 0) // BLOCK * BLOCK)
    for start in range(begin, stop, BLOCK):
        s = start + tl.arange(0, BLOCK)
        at = s[:, None] * DIM + d[None, :]
        inside = (s < end)[:, None] & in_dim[None, :]
        k = tl.load(keys + at, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee").to(tl.float32) * scale
        if CAPPED:
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
        seen = s[None, :] <= last[:, None]
        if WINDOW > 0:
            seen = seen & (s[None, :] > last[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp(top - higher)
        weights = tl.exp(scores - higher[:, None])
        v = tl.load(values + at, mask=inside, other=0.0)
        out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee").to(tl.float32)
        total = total * shrink + tl.sum(weights, 1)
        top = higher
    if SPLITS == 1:
        out_at = out_ptr + (first_token + token)[:, None] * out_token + head[:, None] * DIM + d[None, :]
        tl.store(out_at, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_q)
    else:
        part = ((block * tl.num_programs(1) + group) * SPLITS + split).to(tl.int64) * QUERIES + m
        tl.store(part_ptr + part[:, None] * PADDED_DIM + d[None, :], out)
        tl.store(sum_ptr + part * 2, top)
        tl.store(sum_ptr + part * 2 + 1, total)


@triton.jit
def _merge(
    out_ptr, part_ptr, sum_ptr, block_ptr, blocks, out_token,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    group = tl.program_id(1)
    first_token = tl.load(block_ptr + block)
    count = tl.load(block_ptr + blocks + block)
    if count == 0:
        return
    m = tl.arange(0, QUERIES)
    d = tl.arange(0, PADDED_DIM)
    first = (block * tl.num_programs(1) + group).to(tl.int64) * SPLITS * QUERIES + m
    top = tl.full([QUERIES], -1e38, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, PADDED_DIM], tl.float32)
    for split in range(SPLITS):
        part = first + split * QUERIES
        other = tl.load(sum_ptr + part * 2)
        higher = tl.maximum(top, other)
        shrink, share = tl.exp(top - higher), tl.exp(other - higher)
        total = total * shrink + tl.load(sum_ptr + part * 2 + 1) * share
        out = out * shrink[:, None] + tl.load(part_ptr + part[:, None] * PADDED_DIM + d[None, :]) * share[:, None]
        top = higher
    token, head = m // HEADS, group * HEADS + m % HEADS
    out_at = out_ptr + (first_token + token)[:, None] * out_token + head[:, None] * DIM + d[None, :]
    is_out = (token < count)[:, None] & (d < DIM)[None, :]
    tl.store(out_at, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_out)


def extend(
    q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor,
    *, scale: float, window: int | None, softcap: float | None, splits: int = 1,
) -> Tensor:  # fmt: skip
    """Attention of queries ``[1, heads, T, dim]`` whose own keys and values are in their rows already.

    ``blocks`` are the tokens that are attended for together (see `blocks_of`); those of no block get zeros.
    """
    _, heads, tokens, dim = q.shape
    groups = keys.shape[1]
    share = heads // groups
    queries, padded = queries_at_once(share), max(16, triton.next_power_of_2(dim))
    out = torch.zeros((1, tokens, heads, dim), dtype=q.dtype, device=q.device)
    parts = sums = out
    if splits > 1:
        size = (blocks.shape[1], groups, splits, queries)
        parts, sums = (torch.empty((*size, n), dtype=torch.float32, device=q.device) for n in (padded, 2))
    block, stages = block_of(padded * keys.element_size())
    _extend[(blocks.shape[1], groups, splits)](
        q, keys, values, out, parts, sums, blocks, scale, softcap or 1.0, blocks.shape[1],
        q.stride(1), q.stride(2), keys.stride(0), keys.stride(1), out.stride(1),
        WINDOW=window or 0, CAPPED=softcap is not None, HEADS=share, QUERIES=queries,
        DIM=dim, PADDED_DIM=padded, BLOCK=block, SPLITS=splits, num_warps=4, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        _merge[(blocks.shape[1], groups)](
            out, parts, sums, blocks, blocks.shape[1], out.stride(1),
            HEADS=share, QUERIES=queries, DIM=dim, PADDED_DIM=padded, SPLITS=splits, num_warps=4,
        )  # fmt: skip
    return out.transpose(1, 2)


def queries_at_once(share: int) -> int:
    """Queries that `extend` takes in one block: tokens times the heads that share a key."""
    return max(QUERIES, int(triton.next_power_of_2(share)))
