"""Triton: prefill of new tokens through block tables. Stores keys and values, and attends to them causally."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verifiers.kernels.cuda.decode import block_of
from verifiers.kernels.cuda.splits import attend_block, merge_part, partial_sums, span_of

QUERIES = 64  # queries per program: tokens × query heads of one kv head


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["row_ptr", "position_ptr"])
def _store(
    k_ptr, v_ptr, keys_ptr, values_ptr, table_ptr, row_ptr, position_ptr, k_head, k_token, v_head, v_token,
    table_row, cache_block, cache_head, PAGE: tl.constexpr,
    GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + token)
    position = tl.load(position_ptr + token)
    page = tl.load(table_ptr + row * table_row + position // PAGE).to(tl.int64)
    group = tl.arange(0, PADDED_GROUPS)[:, None]
    d = tl.arange(0, PADDED_DIM)[None, :]
    inside = (group < GROUPS) & (d < DIM)
    at = page * cache_block + group * cache_head + position % PAGE * DIM + d
    tl.store(keys_ptr + at, tl.load(k_ptr + token * k_token + group * k_head + d, mask=inside), mask=inside)
    tl.store(values_ptr + at, tl.load(v_ptr + token * v_token + group * v_head + d, mask=inside), mask=inside)


def store(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, tables: Tensor, row_T: Tensor, position_T: Tensor
) -> None:
    """Write keys and values ``[1, groups, T, dim]`` to blocks of the cache, through rows of ``tables``."""
    _, groups, tokens, dim = k.shape
    _store[(tokens,)](
        k, v, keys, values, tables, row_T, position_T, k.stride(1), k.stride(2), v.stride(1), v.stride(2),
        tables.stride(0), keys.stride(0), keys.stride(1), PAGE=keys.shape[2],
        GROUPS=groups, PADDED_GROUPS=triton.next_power_of_2(groups),
        DIM=dim, PADDED_DIM=triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["blocks", "table_row"])
def _extend(
    q_ptr, keys_ptr, values_ptr, out_ptr, part_ptr, sum_ptr, stored_ptr, block_ptr, scale, softcap, blocks,
    q_head, q_token, out_token, table_ptr, table_row, cache_block, cache_head, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """One program handles some tokens of one prompt, the query heads of one kv head, and one split of the history."""
    block = tl.program_id(0)
    group = tl.program_id(1)
    split = tl.program_id(2)
    first_token = tl.load(block_ptr + block)
    count = tl.load(block_ptr + blocks + block)
    row = tl.load(block_ptr + 2 * blocks + block)
    position = tl.load(block_ptr + 3 * blocks + block)
    end = position + count
    first, stop, parts = span_of(end, split, tl.num_programs(2), BLOCK)
    if (count == 0) | (split >= parts):
        return
    m = tl.arange(0, QUERIES)
    d = tl.arange(0, PADDED_DIM)
    token, head = m // HEADS, group * HEADS + m % HEADS
    in_dim = d < DIM
    is_q = (token < count)[:, None] & in_dim[None, :]
    q_at = q_ptr + (first_token + token)[:, None].to(tl.int64) * q_token + head[:, None] * q_head + d[None, :]
    q = tl.load(q_at, mask=is_q, other=0.0)
    last = position + token
    top = tl.full([QUERIES], -1e38, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, PADDED_DIM], tl.float32)
    table = table_ptr + row * table_row
    keys, values = keys_ptr + group * cache_head, values_ptr + group * cache_head
    if WINDOW > 0:
        first = tl.maximum(first, tl.maximum(position + 1 - WINDOW, 0) // BLOCK * BLOCK)
    column = first + tl.arange(0, BLOCK)
    page = tl.load(table + column // PAGE, mask=column < end, other=0)
    for start in range(first, stop, BLOCK):
        s = start + tl.arange(0, BLOCK)
        at = (page.to(tl.int64) * cache_block + s % PAGE * DIM)[:, None] + d[None, :]
        page = tl.load(table + (s + BLOCK) // PAGE, mask=s + BLOCK < end, other=0)  # prefetched, as in `decode`
        inside = (s < end)[:, None] & in_dim[None, :]
        seen = s[None, :] <= last[:, None]
        if WINDOW > 0:
            seen = seen & (s[None, :] > last[:, None] - WINDOW)
        top, total, out = attend_block(
            q, keys + at, values + at, inside, seen, scale, softcap, top, total, out, CAPPED
        )  # fmt: skip
    is_done = True
    if IS_SPLIT:
        history = block * tl.num_programs(1) + group
        is_done, total, out = merge_part(
            part_ptr, sum_ptr, stored_ptr, history, split, tl.num_programs(2), parts, m, d, top, total, out, is_q,
            QUERIES, PADDED_DIM,
        )  # fmt: skip
    if is_done:
        out_at = out_ptr + (first_token + token)[:, None].to(tl.int64) * out_token + head[:, None] * DIM + d[None, :]
        tl.store(out_at, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_q)


def extend(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, blocks: Tensor,
    *, scale: float, window: int | None, softcap: float | None, splits: int = 1, stored: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of queries ``[1, heads, T, dim]`` whose own keys and values are already in the cache.

    ``blocks`` has the tokens of each program: first token, count, row of ``tables``, position. Other tokens get zeros.
    """
    _, heads, tokens, dim = q.shape
    groups, page = keys.shape[1:3]
    share = heads // groups
    queries, padded = queries_at_once(share), max(16, triton.next_power_of_2(dim))
    out = torch.zeros((1, tokens, heads, dim), dtype=q.dtype, device=q.device)
    parts = partial_sums(blocks.shape[1] * groups, splits, queries, padded, out, stored)
    _extend[(blocks.shape[1], groups, splits)](
        q, keys, values, out, *parts, blocks, scale, softcap or 1.0, blocks.shape[1],
        q.stride(1), q.stride(2), out.stride(1), tables, tables.stride(0), keys.stride(0), keys.stride(1), PAGE=page,
        WINDOW=window or 0, CAPPED=softcap is not None, HEADS=share, QUERIES=queries,
        DIM=dim, PADDED_DIM=padded, IS_SPLIT=splits > 1, num_warps=4,
        **block_of(padded * keys.element_size(), is_split=False),
    )  # fmt: skip
    return out.transpose(1, 2)


def queries_at_once(share: int) -> int:
    """Queries per program of `extend`: tokens × the ``share`` query heads of a kv head."""
    return max(QUERIES, int(triton.next_power_of_2(share)))
