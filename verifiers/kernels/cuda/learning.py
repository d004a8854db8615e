"""Triton kernels for training, forward and backward: a layer without its matrix products, and logprobs from logits.

A profile showed the need for them: elementwise operations that read and wrote the same activations repeatedly took two
thirds of a training step. Each kernel reads its inputs once, computes in float32, and rounds where the sampler's
operations round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verifiers.kernels.cuda.decode import gated as gated  # kernels that sampling needs too
from verifiers.kernels.cuda.decode import rotate_pair

BLOCK_V = 4096
BLOCK_GATED = 1024
TILE_ROTATED = 1024  # (token, pair) elements of one head that a program rotates at a time
TILE_NORMED = 2048  # elements that a program norms at a time
PARTS = 1024  # maximum programs of a norm's backward; each sums a partial gradient of the weight


# --- logprobs of given tokens -----------------------------------------------------------------------------------------


@triton.jit
def _pick(
    logits_ptr, target_ptr, logprob_ptr, mass_ptr, inverse, row_stride, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * row_stride
    v = tl.arange(0, BLOCK)
    top = -1e38
    total = 0.0
    for start in range(0, V, BLOCK):
        x = tl.load(logits + start + v, mask=start + v < V, other=float("-inf")).to(tl.float32) * inverse
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    mass = top + tl.log(total)
    chosen = tl.load(logits + tl.load(target_ptr + row)).to(tl.float32) * inverse
    tl.store(logprob_ptr + row, chosen - mass)
    tl.store(mass_ptr + row, mass)


def logprobs(logits_NV: Tensor, target_N: Tensor, temperature: float, logprob_N: Tensor, lse_N: Tensor) -> None:
    """Write the logprob of each row's target, and the logsumexp of the row, in one pass over the logits."""
    rows, vocabulary = logits_NV.shape
    _pick[(rows,)](
        logits_NV, target_N, logprob_N, lse_N, 1.0 / temperature, logits_NV.stride(0),
        V=vocabulary, BLOCK=BLOCK_V, num_warps=8,
    )  # fmt: skip


@triton.jit
def _pick_back(
    logits_ptr, target_ptr, mass_ptr, grad_ptr, inverse, row_stride, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits_ptr + row * row_stride + v
    x = tl.load(at, mask=v < V, other=float("-inf")).to(tl.float32)
    share = tl.exp(x * inverse - tl.load(mass_ptr + row))
    hit = tl.where(v == tl.load(target_ptr + row), 1.0, 0.0)
    grad = tl.load(grad_ptr + row) * inverse * (hit - share)
    tl.store(at, grad.to(logits_ptr.dtype.element_ty), mask=v < V)


def logprobs_back_(logits_NV: Tensor, target_N: Tensor, temperature: float, lse_N: Tensor, grad_N: Tensor) -> None:
    """Replace logits by their gradients, in place, given the gradients of the targets' logprobs."""
    rows, vocabulary = logits_NV.shape
    _pick_back[(rows, triton.cdiv(vocabulary, BLOCK_V))](
        logits_NV, target_N, lse_N, grad_N, 1.0 / temperature, logits_NV.stride(0),
        V=vocabulary, BLOCK=BLOCK_V, num_warps=8,
    )  # fmt: skip


# --- norms ------------------------------------------------------------------------------------------------------------


@triton.jit
def _norm(
    x_ptr, more_ptr, weight_ptr, sum_ptr, out_ptr, scale_ptr, rows, epsilon,
    ADDS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK)
    at = row[:, None] * D + d[None, :]
    inside = (row[:, None] < rows) & (d[None, :] < D)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if ADDS:
        x = (x.to(tl.float32) + tl.load(more_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + at, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + epsilon)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x * scale[:, None] * weight[None, :]).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale, mask=row < rows)


def norm(x_ND: Tensor, more_ND: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """RMS norm of ``x`` (plus ``more``): the sum, its norm, and the inverse RMS of each row."""
    rows, width = x_ND.shape
    total = x_ND if more_ND is None else torch.empty_like(x_ND)
    out = torch.empty_like(x_ND)
    scale = torch.empty(rows, dtype=torch.float32, device=x_ND.device)
    tile = _norm_tile(width)
    _norm[(triton.cdiv(rows, tile["ROWS"]),)](
        x_ND, x_ND if more_ND is None else more_ND, weight, total, out, scale, rows, epsilon,
        ADDS=more_ND is not None, D=width, **tile,
    )  # fmt: skip
    return total, out, scale


@triton.jit
def _norm_back(
    x_ptr, weight_ptr, scale_ptr, past_ptr, grad_ptr, out_ptr, parts_ptr, rows,
    ADDS: tl.constexpr, LEARNS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    part = tl.zeros([ROWS, BLOCK], tl.float32)
    step = tl.num_programs(0) * ROWS
    for first in range(tl.program_id(0) * ROWS, rows, step):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        at = row[:, None] * D + d[None, :]
        inside = (row[:, None] < rows) & (d[None, :] < D)
        scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if LEARNS:
            part += x * grad
        grad = grad * weight[None, :]
        out = (grad - x * (tl.sum(x * grad, 1) / D)[:, None]) * scale[:, None]
        if ADDS:
            out += tl.load(past_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)
    if LEARNS:
        tl.store(parts_ptr + tl.program_id(0) * D + d, tl.sum(part, 0), mask=d < D)


def norm_back(
    x_ND: Tensor, weight: Tensor, scale_N: Tensor, residual_ND: Tensor | None, grad_ND: Tensor, *, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the input and the weight. Adds ``residual_ND``, the gradient of the residual connection."""
    rows, width = x_ND.shape
    out = torch.empty_like(x_ND)
    tile = _norm_tile(width)
    programs = min(PARTS, triton.cdiv(rows, tile["ROWS"]))
    parts = torch.empty((programs, width), dtype=torch.float32, device=x_ND.device) if learns else out
    _norm_back[(programs,)](
        x_ND, weight, scale_N, grad_ND if residual_ND is None else residual_ND, grad_ND, out, parts, rows,
        ADDS=residual_ND is not None, LEARNS=learns, D=width, **tile,
    )  # fmt: skip
    return out, parts.sum(0).to(weight.dtype) if learns else None


def _norm_tile(width: int) -> dict[str, int]:
    """Tile size in rows and columns. Narrow rows are grouped, so that tiles have about the same size.

    >>> _norm_tile(576)
    {'BLOCK': 1024, 'ROWS': 2, 'num_warps': 4}
    """
    block = triton.next_power_of_2(width)
    rows = max(1, TILE_NORMED // block)
    return {"BLOCK": block, "ROWS": rows, "num_warps": min(16, max(4, rows * block // 512))}


# --- rotary embedding -------------------------------------------------------------------------------------------------


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, token, tokens, cos_1, cos_2, sin_1, sin_2,
    HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, PADDED_HALF)
    inside = (token[:, None] < tokens) & (i[None, :] < HALF)
    for head in range(HEADS):
        at = (token[:, None] * HEADS + head) * (2 * HALF) + i[None, :]
        one = tl.load(x_ptr + at, mask=inside, other=0.0)
        two = tl.load(x_ptr + at + HALF, mask=inside, other=0.0)
        tl.store(out_ptr + at, rotate_pair(one, two, cos_1, sin_1), mask=inside)
        tl.store(out_ptr + at + HALF, rotate_pair(two, one, cos_2, sin_2), mask=inside)


@triton.jit
def _rotate(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, tokens, angles,
    BACK: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    HALF: tl.constexpr, PADDED_HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, PADDED_HALF)
    inside = (token[:, None] < tokens) & (i[None, :] < HALF)
    at = (token % angles)[:, None] * (2 * HALF) + i[None, :]
    cos_1 = tl.load(cos_ptr + at, mask=inside, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_1 = -tl.load(sin_ptr + at, mask=inside, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if BACK:  # the transposed rotation
        sin_1, sin_2 = sin_2, sin_1
    _rotate_heads(q_ptr, q_out_ptr, token, tokens, cos_1, cos_2, sin_1, sin_2, Q_HEADS, HALF, PADDED_HALF)
    _rotate_heads(k_ptr, k_out_ptr, token, tokens, cos_1, cos_2, sin_1, sin_2, K_HEADS, HALF, PADDED_HALF)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
    """Rotary embedding of queries and keys ``[B, T, heads, dim]`` by angles ``[B or 1, T, dim]``, or its backward."""
    batch, length, heads, dim = q.shape
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    tokens, half = batch * length, dim // 2
    padded = triton.next_power_of_2(half)
    block = max(1, TILE_ROTATED // padded)
    _rotate[(triton.cdiv(tokens, block),)](
        q, k, cos, sin, q_out, k_out, tokens, cos.shape[0] * length, BACK=back, Q_HEADS=heads, K_HEADS=k.shape[2],
        HALF=half, PADDED_HALF=padded, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return q_out, k_out


# --- gating -----------------------------------------------------------------------------------------------------------


@triton.jit
def _gated_back(gate_ptr, up_ptr, grad_ptr, gate_grad_ptr, up_grad_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-x))
    kind = gate_grad_ptr.dtype.element_ty
    tl.store(gate_grad_ptr + at, (grad * up * share * (1.0 + x * (1.0 - share))).to(kind), mask=inside)
    tl.store(up_grad_ptr + at, (grad * x * share).to(kind), mask=inside)


def gated_back(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``gate`` and ``up``, given the gradient of SiLU of ``gate`` times ``up``."""
    gate_grad, up_grad = torch.empty_like(gate), torch.empty_like(up)
    n = gate.numel()
    _gated_back[(triton.cdiv(n, BLOCK_GATED),)](gate, up, grad, gate_grad, up_grad, n, BLOCK=BLOCK_GATED, num_warps=4)
    return gate_grad, up_grad
