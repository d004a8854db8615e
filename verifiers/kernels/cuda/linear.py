"""Triton: several projections of one input in one launch; `projections` decides when that is faster."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from verifiers.kernels.cuda.launch import begin, multiprocessors, overlap, shared_memory

__all__ = ["OutOfResources", "project", "project_gated"]

TILE = 64  # rows, columns and terms of a sum at a time: the sizes of matrices are multiples of it


@triton.jit
def _dot_rows(
    x_ptr, w_ptr, m, n, M, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + m[:, None] * K + k[None, :]
    w_at = w_ptr + n[None, :] * K + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(K // BLOCK_K):
        total = tl.dot(tl.load(x_at, mask=m[:, None] < M, other=0.0), tl.load(w_at), total)
        x_at += BLOCK_K
        w_at += BLOCK_K
    return total


@triton.jit(do_not_specialize=["M"])
def _project(
    x_ptr, w1_ptr, w2_ptr, w3_ptr, b1_ptr, b2_ptr, b3_ptr, out_ptr, M,
    N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    begin(OVERLAPS)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N
    w_ptr, b_ptr, first = w1_ptr, b1_ptr, 0
    if column >= N1 + N2:
        w_ptr, b_ptr, first = w3_ptr, b3_ptr, N1 + N2
    elif column >= N1:
        w_ptr, b_ptr, first = w2_ptr, b2_ptr, N1
    n = column - first + tl.arange(0, BLOCK_N)
    total = _dot_rows(x_ptr, w_ptr, m.to(tl.int64), n, M, K, BLOCK_M, BLOCK_N, BLOCK_K)
    if HAS_BIAS:
        total += tl.load(b_ptr + n).to(tl.float32)[None, :]
    at = out_ptr + m.to(tl.int64)[:, None] * (N1 + N2 + N3) + first + n[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=m[:, None] < M)


@triton.jit(do_not_specialize=["M"])
def _project_gated(
    x_ptr, gate_ptr, up_ptr, out_ptr, M, N: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    begin(OVERLAPS)
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + m[:, None] * K + k[None, :]
    w_at = n[None, :] * K + k[:, None]
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(K // BLOCK_K):
        x = tl.load(x_at, mask=m[:, None] < M, other=0.0)
        gate = tl.dot(x, tl.load(gate_ptr + w_at), gate)
        up = tl.dot(x, tl.load(up_ptr + w_at), up)
        x_at += BLOCK_K
        w_at += BLOCK_K
    kind = out_ptr.dtype.element_ty
    gate = gate.to(kind).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    at = out_ptr + m[:, None] * N + n[None, :]
    tl.store(at, (opened * up.to(kind).to(tl.float32)).to(kind), mask=m[:, None] < M)


def _tiles(rows: int, columns: int, products: int, device: torch.device) -> dict[str, int]:
    """Tiles of 64 × 64, for ``products`` at once; half as wide where a small batch would keep few multiprocessors
    busy. Loads run as far ahead as the shared memory allows, where that keeps no program from being resident."""
    programs = triton.cdiv(rows, TILE) * columns // TILE
    fit = shared_memory(device) // ((1 + products) * TILE * TILE * 2)
    is_resident = rows > TILE and programs <= multiprocessors(device) * 2 // products
    return {
        "BLOCK_M": TILE,
        "BLOCK_N": TILE if rows > TILE else TILE // 2,
        "BLOCK_K": TILE,
        "num_warps": 4,
        "num_stages": max(3, min(6, fit)) if is_resident else 3,
    }


def project(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    """Up to three projections of one input in one launch; sizes are multiples of 64."""
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
    """SiLU of one projection times another, in one launch; sizes are multiples of 64."""
    flat = x.reshape(-1, x.shape[-1])
    rows, size = flat.shape[0], gate.shape[0]
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    tiles = _tiles(rows, size, 2, x.device)
    grid = (triton.cdiv(rows, tiles["BLOCK_M"]), size // tiles["BLOCK_N"])
    _project_gated[grid](flat, gate, up, out, rows, N=size, K=flat.shape[1], **tiles, **overlap(x.device))
    return out.view(*x.shape[:-1], size)
