"""Triton: LoRA for several projections of one input in two launches: y += scale · (x · aᵀ) · bᵀ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from verifiers.kernels.cuda.launch import begin, overlap
from verifiers.kernels.cuda.linear import load_terms
from verifiers.kernels.modules import Lora

MOST_AT_ONCE = 3
ROWS, COLUMNS, TERMS = 16, 128, 128  # of a tile; half the columns if a projection's size is not a multiple of COLUMNS
TERMS_OF_A_PART, MOST_PARTS = 1024, 8  # split-K of the first product, which has few programs


@triton.jit(do_not_specialize=["M"])
def _shrink(
    x_ptr, a1_ptr, a2_ptr, a3_ptr, out_ptr, M, K: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr,
    PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    begin(OVERLAPS)
    adapter = tl.program_id(1)
    a_ptr = a1_ptr
    if adapter == 1:
        a_ptr = a2_ptr
    elif adapter == 2:
        a_ptr = a3_ptr
    first = tl.program_id(2) * PART
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    r = tl.arange(0, PADDED_RANK)
    k = first + tl.arange(0, BLOCK_K)
    x_at = x_ptr + m[:, None] * K + k[None, :]
    a_at = a_ptr + r[None, :] * K + k[:, None]
    total = tl.zeros([BLOCK_M, PADDED_RANK], tl.float32)
    for done in range(0, PART, BLOCK_K):
        is_term = k < K - done
        x = load_terms(x_at, m[:, None] < M, is_term[None, :], K, PART)
        total = tl.dot(x, load_terms(a_at, r[None, :] < RANK, is_term[:, None], K, PART), total)
        x_at += BLOCK_K
        a_at += BLOCK_K
    into = tl.program_id(2) * tl.num_programs(1) + adapter
    tl.store(out_ptr + (into * M + m[:, None]) * PADDED_RANK + r[None, :], total, mask=m[:, None] < M)


@triton.jit(do_not_specialize=["M", "y1_row", "y2_row", "y3_row"])
def _expand(
    t_ptr, b1_ptr, b2_ptr, b3_ptr, y1_ptr, y2_ptr, y3_ptr, y1_row, y2_row, y3_row, scale_1, scale_2, scale_3, M,
    N1: tl.constexpr, N2: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr,
    PARTS: tl.constexpr, ADAPTERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    begin(OVERLAPS)
    column = tl.program_id(1) * BLOCK_N
    b_ptr, y_ptr, y_row, scale, adapter, first = b1_ptr, y1_ptr, y1_row, scale_1, 0, 0
    if column >= N1 + N2:
        b_ptr, y_ptr, y_row, scale, adapter, first = b3_ptr, y3_ptr, y3_row, scale_3, 2, N1 + N2
    elif column >= N1:
        b_ptr, y_ptr, y_row, scale, adapter, first = b2_ptr, y2_ptr, y2_row, scale_2, 1, N1
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = column - first + tl.arange(0, BLOCK_N)
    r = tl.arange(0, PADDED_RANK)
    is_row = m[:, None] < M
    t_at = t_ptr + (adapter * M + m[:, None]) * PADDED_RANK + r[None, :]
    t = tl.zeros([BLOCK_M, PADDED_RANK], tl.float32)
    for part in tl.static_range(PARTS):
        t += tl.load(t_at + part * ADAPTERS * M * PADDED_RANK, mask=is_row, other=0.0)
    b = tl.load(b_ptr + n[None, :] * RANK + r[:, None], mask=r[:, None] < RANK, other=0.0)
    at = y_ptr + m[:, None] * y_row + n[None, :]
    total = tl.load(at, mask=is_row, other=0.0).to(tl.float32) + tl.dot(t.to(b.dtype), b) * scale
    tl.store(at, total.to(y_ptr.dtype.element_ty), mask=is_row)


def add_adapted_(ys: Sequence[Tensor], x: Tensor, loras: Sequence[Lora]) -> None:
    """Add each adapter's product with the input ``[rows, width]`` to its result ``[rows, columns]``, in place.

    At most three adapters of equal rank. Columns must be contiguous, and their number a multiple of 64.
    """
    rows, width = x.shape
    rank, n = loras[0].a_RK.shape[0], len(loras)
    padded = max(16, triton.next_power_of_2(rank))
    parts = min(triton.cdiv(width, TERMS_OF_A_PART), MOST_PARTS)
    part = triton.cdiv(width, parts * TERMS) * TERMS
    t = torch.empty((parts, n, rows, padded), dtype=torch.float32, device=x.device)
    down = triton.cdiv(rows, ROWS)
    _shrink[(down, n, parts)](
        x, *_three([one.a_RK for one in loras]), t, rows, K=width, RANK=rank, PADDED_RANK=padded, PART=part,
        BLOCK_M=ROWS, BLOCK_K=TERMS, num_warps=4, num_stages=4, **overlap(x.device),
    )  # fmt: skip
    sizes = [one.b_NR.shape[0] for one in loras]
    columns = COLUMNS if all(size % COLUMNS == 0 for size in sizes) else COLUMNS // 2
    _expand[(down, sum(sizes) // columns)](
        t, *_three([one.b_NR for one in loras]), *_three(ys), *_three([one.stride(0) for one in ys]),
        *_three([one.scale for one in loras]), rows, N1=sizes[0], N2=(*sizes, 0)[1], RANK=rank, PADDED_RANK=padded,
        PARTS=parts, ADAPTERS=n, BLOCK_M=ROWS, BLOCK_N=columns, num_warps=4, **overlap(x.device),
    )  # fmt: skip


def _three(some: Sequence[Any]) -> list[Any]:
    return [*some, *some, *some][:MOST_AT_ONCE]
