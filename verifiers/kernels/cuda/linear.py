"""Triton: several projections of one input in one launch; a projection plus residual and norm in two launches.

`projections` decides when these are faster than cuBLAS.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from verifiers.kernels.cuda.launch import begin, multiprocessors, overlap, shared_memory

__all__ = ["OutOfResources", "project", "project_gated"]

TILE = 64  # rows, columns and depth of a tile; matrix sizes are multiples of it
MOST_STAGES = 5
MOST_SPLITS = 5  # of the depth of a product; more take longer to add up
DEEP = 4096  # from this depth on, tiles are twice as deep
KEPT_FREE = 8  # 1/8 of the shared memory is left free


@triton.jit
def _dot(x, w, total, SWAPS: tl.constexpr):
    """Accumulate a product. SWAPS puts few rows on the right, as a tensor core's left operand has at least 64 rows."""
    return tl.dot(tl.trans(w), tl.trans(x), total) if SWAPS else tl.dot(x, w, total)


@triton.jit
def load_terms(at, inside, is_term, K: tl.constexpr, PART: tl.constexpr):
    """Load a block of a matrix. The depth is masked only if K is not a multiple of PART."""
    return tl.load(at, mask=inside, other=0.0) if K % PART == 0 else tl.load(at, mask=inside & is_term, other=0.0)


@triton.jit
def _zeros(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAPS: tl.constexpr):
    return tl.zeros([BLOCK_N, BLOCK_M], tl.float32) if SWAPS else tl.zeros([BLOCK_M, BLOCK_N], tl.float32)


@triton.jit
def _sum_products(
    x_ptr, w_ptr, m, n, M, first, stop, K: tl.constexpr, SWAPS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of the product of rows m of one matrix and rows n of another, over the terms ``[first, stop)``."""
    k = first + tl.arange(0, BLOCK_K)
    x_at = x_ptr + m[:, None] * K + k[None, :]
    w_at = w_ptr + n[None, :] * K + k[:, None]
    total = _zeros(BLOCK_M, BLOCK_N, SWAPS)
    for done in range(first, stop, BLOCK_K):
        is_term = k < K - done + first
        x = load_terms(x_at, m[:, None] < M, is_term[None, :], K, BLOCK_K)
        total = _dot(x, load_terms(w_at, True, is_term[:, None], K, BLOCK_K), total, SWAPS)
        x_at += BLOCK_K
        w_at += BLOCK_K
    return tl.trans(total) if SWAPS else total


@triton.jit(do_not_specialize=["M"])
def _project(
    x_ptr, w1_ptr, w2_ptr, w3_ptr, b1_ptr, b2_ptr, b3_ptr, out_ptr, M,
    N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, SWAPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    begin(OVERLAPS)
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N
    w_ptr, b_ptr, first = w1_ptr, b1_ptr, 0
    if column >= N1 + N2:
        w_ptr, b_ptr, first = w3_ptr, b3_ptr, N1 + N2
    elif column >= N1:
        w_ptr, b_ptr, first = w2_ptr, b2_ptr, N1
    n = column - first + tl.arange(0, BLOCK_N)
    total = _sum_products(x_ptr, w_ptr, m, n, M, 0, K, K, SWAPS, BLOCK_M, BLOCK_N, BLOCK_K)
    if HAS_BIAS:
        total += tl.load(b_ptr + n).to(tl.float32)[None, :]
    at = out_ptr + m[:, None] * (N1 + N2 + N3) + first + n[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=m[:, None] < M)


@triton.jit(do_not_specialize=["M"])
def _project_gated(
    x_ptr, gate_ptr, up_ptr, out_ptr, M, N: tl.constexpr, K: tl.constexpr, SWAPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    begin(OVERLAPS)
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + m[:, None] * K + k[None, :]
    w_at = n[None, :] * K + k[:, None]
    gate = _zeros(BLOCK_M, BLOCK_N, SWAPS)
    up = _zeros(BLOCK_M, BLOCK_N, SWAPS)
    for done in range(0, K, BLOCK_K):
        is_term = k < K - done
        x = load_terms(x_at, m[:, None] < M, is_term[None, :], K, BLOCK_K)
        gate = _dot(x, load_terms(gate_ptr + w_at, True, is_term[:, None], K, BLOCK_K), gate, SWAPS)
        up = _dot(x, load_terms(up_ptr + w_at, True, is_term[:, None], K, BLOCK_K), up, SWAPS)
        x_at += BLOCK_K
        w_at += BLOCK_K
    if SWAPS:
        gate, up = tl.trans(gate), tl.trans(up)
    kind = out_ptr.dtype.element_ty
    gate = gate.to(kind).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    at = out_ptr + m[:, None] * N + n[None, :]
    tl.store(at, (opened * up.to(kind).to(tl.float32)).to(kind), mask=m[:, None] < M)


@triton.jit(do_not_specialize=["M"])
def _project_part(
    x_ptr, w_ptr, part_ptr, M, span, N: tl.constexpr, K: tl.constexpr, SWAPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The partial product over ``span`` terms of the depth, in float32."""
    begin(OVERLAPS)
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    first = split * span
    stop = tl.minimum(first + span, K)
    total = _sum_products(x_ptr, w_ptr, m, n, M, first, stop, K, SWAPS, BLOCK_M, BLOCK_N, BLOCK_K)
    tl.store(part_ptr + (split * M + m)[:, None] * N + n[None, :], total, mask=m[:, None] < M)


@triton.jit(do_not_specialize=["M", "splits"])
def _add_norm(
    hidden_ptr, part_ptr, weight_ptr, out_ptr, normed_ptr, epsilon, M, splits,
    N: tl.constexpr, PADDED: tl.constexpr, MOST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """For one row, add the parts of a projection to the hidden states and compute their RMS norm."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, PADDED)
    split = tl.arange(0, MOST)[:, None]
    at = part_ptr + (split * M + row) * N + n[None, :]
    parts = tl.load(at, mask=(split < splits) & (n < N)[None, :], other=0.0)
    hidden = tl.load(hidden_ptr + row * N + n, mask=n < N, other=0.0)
    weight = tl.load(weight_ptr + n, mask=n < N, other=0.0)
    kind = out_ptr.dtype.element_ty
    hidden = (hidden.to(tl.float32) + tl.sum(parts, 0)).to(kind)
    tl.store(out_ptr + row * N + n, hidden, mask=n < N)
    hidden = hidden.to(tl.float32)
    scale = tl.rsqrt(tl.sum(hidden * hidden, 0) / N + epsilon)
    tl.store(normed_ptr + row * N + n, (hidden * scale * weight.to(tl.float32)).to(kind), mask=n < N)


def _tiles(rows: int, columns: int, products: int, device: torch.device) -> dict[str, Any]:
    """Tile sizes for ``products`` at once, small enough that every multiprocessor has a program. The programs are
    memory-bound, so they use as many pipeline stages as the shared memory allows for all resident programs."""
    block_m = min(TILE, max(16, triton.next_power_of_2(rows)))
    down, many, shared = triton.cdiv(rows, block_m), multiprocessors(device), shared_memory(device)
    is_few = block_m == TILE and down * columns // (TILE // 2) <= many
    block_n = TILE // 2 if is_few else TILE
    resident = triton.cdiv(down * columns // block_n, many)
    room = shared * (KEPT_FREE - 1) // KEPT_FREE // resident // (2 * (block_m + products * block_n))
    block_k = 2 * TILE if products == resident == 1 and room >= 3 * 2 * TILE else TILE
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "SWAPS": block_m < TILE,
        "num_warps": 4,
        "num_stages": max(3, min(MOST_STAGES, room // block_k)),
    }


def project(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    """Up to three projections of one input in one launch. Sizes must be multiples of 64."""
    flat = x.reshape(-1, x.shape[-1])
    sizes = [weight.shape[0] for weight in weights]
    n_1, n_2, n_3 = (*sizes, 0, 0)[:3]
    out = torch.empty((flat.shape[0], sum(sizes)), dtype=x.dtype, device=x.device)
    has_bias = biases[0] is not None
    given = [*weights, *weights][:3] + ([*biases, *biases][:3] if has_bias else [flat] * 3)
    tiles = _tiles(flat.shape[0], sum(sizes), 1, x.device)
    grid = (triton.cdiv(flat.shape[0], tiles["BLOCK_M"]), sum(sizes) // tiles["BLOCK_N"])
    _project[grid](
        flat, *given, out, flat.shape[0], N1=n_1, N2=n_2, N3=n_3, K=flat.shape[1], HAS_BIAS=has_bias, **tiles,
        **overlap(x.device),
    )  # fmt: skip
    return [part.view(*x.shape[:-1], -1) for part in out.split(sizes, 1)]


def project_gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of one projection times another, in one launch. Sizes must be multiples of 64."""
    flat = x.reshape(-1, x.shape[-1])
    rows, size = flat.shape[0], gate.shape[0]
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    tiles = _tiles(rows, size, 2, x.device)
    grid = (triton.cdiv(rows, tiles["BLOCK_M"]), size // tiles["BLOCK_N"])
    _project_gated[grid](flat, gate, up, out, rows, N=size, K=flat.shape[1], **tiles, **overlap(x.device))
    return out.view(*x.shape[:-1], size)


def _split_tiles(rows: int, columns: int, depth: int, device: torch.device) -> tuple[dict[str, Any], int]:
    """Tile sizes for one projection, and into how many parts its depth is split so that few rows fill the GPU."""
    block_m, many = min(TILE, max(16, triton.next_power_of_2(rows))), multiprocessors(device)
    tiles = triton.cdiv(rows, block_m) * (columns // TILE)
    block_n = TILE // 2 if block_m == TILE and 6 * tiles <= many else TILE
    block_k = 2 * TILE if depth >= DEEP and depth % (2 * TILE) == 0 else TILE
    splits = min(MOST_SPLITS, many // (tiles * TILE // block_n), depth // (2 * block_k))
    options = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "SWAPS": block_m < TILE, "num_warps": 4}
    return options | {"num_stages": 4 if block_k > TILE else MOST_STAGES}, splits


def is_splittable(rows: int, weight: Tensor) -> bool:
    """Whether `add_projected_and_norm` splits the depth, because a projection alone leaves multiprocessors idle."""
    return _split_tiles(rows, *weight.shape, weight.device)[1] > 1


def add_projected_and_norm(
    hidden: Tensor, x: Tensor, weight: Tensor, norm: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """``hidden`` plus a projection, and the RMS norm of the sum, in two launches. Sizes must be multiples of 64."""
    rows, (size, depth) = x.shape[0], weight.shape
    tiles, splits = _split_tiles(rows, size, depth, x.device)
    span = triton.cdiv(depth // tiles["BLOCK_K"], max(splits, 1)) * tiles["BLOCK_K"]
    splits = triton.cdiv(depth, span)
    parts = torch.empty((splits, rows, size), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, tiles["BLOCK_M"]), size // tiles["BLOCK_N"], splits)
    _project_part[grid](x, weight, parts, rows, span, N=size, K=depth, **tiles, **overlap(x.device))
    total, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    padded, most = triton.next_power_of_2(size), triton.next_power_of_2(MOST_SPLITS)
    _add_norm[(rows,)](
        hidden, parts, norm, total, normed, epsilon, rows, splits, N=size, PADDED=padded, MOST=most,
        num_warps=min(16, max(4, padded // 512)), **overlap(x.device),  # at most 128 numbers per thread
    )  # fmt: skip
    return total, normed
