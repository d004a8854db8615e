"""Kernels for CUDA: attention of one new token a row, rotary embedding, gating, and sampling in one sweep.

They exist because a benchmark showed the need: attention that reads only the positions a row has filled needs neither
masks nor a captured graph for each length, the rotary embedding by plain operations is ten launches a layer, and
sampling by plain operations sweeps the logits eight times. They round where plain operations round.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

__all__ = ["OutOfResources", "attend", "block_of", "gated", "project", "project_gated", "rotate_", "sample", "warm_up"]

BLOCK_S, WARPS, STAGES = 64, 4, 3
SHARED_BYTES = 160 << 10  # what a block of threads may hold of keys and values on every card we aim at
BLOCK_V = 4096
BLOCK_GATED = 1024


@triton.jit
def _turn(x, partner, cos, sin):
    """x·cos + partner·sin, both products rounded to the type of x before they are added."""
    one = (x.to(tl.float32) * cos.to(tl.float32)).to(x.dtype)
    two = (partner.to(tl.float32) * sin.to(tl.float32)).to(x.dtype)
    return (one.to(tl.float32) + two.to(tl.float32)).to(x.dtype)


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, out_ptr, length_ptr, scale, softcap,
    q_row, q_head, k_row, k_head, v_row, v_head, cos_row, sin_row, cache_row, cache_head,
    ROTATES: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    n = tl.load(length_ptr + row)
    d = tl.arange(0, PADDED_DIM)
    in_dim = d < DIM
    k_new = tl.load(k_ptr + row * k_row + group * k_head + d, mask=in_dim, other=0.0)
    v_new = tl.load(v_ptr + row * v_row + group * v_head + d, mask=in_dim, other=0.0)
    head = tl.arange(0, PADDED_HEADS)
    is_head = head < HEADS
    is_q = is_head[:, None] & in_dim[None, :]
    q_heads = q_ptr + row * q_row + (group * HEADS + head[:, None]) * q_head
    q = tl.load(q_heads + d[None, :], mask=is_q, other=0.0)
    if ROTATES:
        partner = tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)
        sign = tl.where(d < DIM // 2, -1.0, 1.0)
        cos = tl.load(cos_ptr + row * cos_row + d, mask=in_dim, other=0.0)
        sin = tl.load(sin_ptr + row * sin_row + d, mask=in_dim, other=0.0).to(tl.float32) * sign
        k_partner = tl.load(k_ptr + row * k_row + group * k_head + partner, mask=in_dim, other=0.0)
        q_partner = tl.load(q_heads + partner[None, :], mask=is_q, other=0.0)
        k_new = _turn(k_new, k_partner, cos, sin)
        q = _turn(q, q_partner, cos[None, :], sin[None, :])
    keys = keys_ptr + row * cache_row + group * cache_head
    values = values_ptr + row * cache_row + group * cache_head
    tl.store(keys + n * DIM + d, k_new, mask=in_dim)
    tl.store(values + n * DIM + d, v_new, mask=in_dim)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(n + 1 - WINDOW, 0)
    score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
    if CAPPED:
        score = softcap * (2.0 / (1.0 + tl.exp(-2.0 * score / softcap)) - 1.0)
    top = score
    total = tl.full([PADDED_HEADS], 1.0, tl.float32)
    out = tl.zeros([PADDED_HEADS, PADDED_DIM], tl.float32) + v_new.to(tl.float32)[None, :]
    for start in range((first // BLOCK) * BLOCK, n, BLOCK):
        s = start + tl.arange(0, BLOCK)
        seen = (s < n) & (s >= first)
        at = s[:, None] * DIM + d[None, :]
        k = tl.load(keys + at, mask=seen[:, None] & in_dim[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee").to(tl.float32) * scale
        if CAPPED:
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp(top - higher)
        weights = tl.exp(scores - higher[:, None])
        v = tl.load(values + at, mask=seen[:, None] & in_dim[None, :], other=0.0)
        out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee").to(tl.float32)
        total = total * shrink + tl.sum(weights, 1)
        top = higher
    out = out / total[:, None]
    out_at = out_ptr + (row * tl.num_programs(1) * HEADS + group * HEADS + head[:, None]) * DIM + d[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=is_q)


def block_of(row_bytes: int) -> tuple[int, int]:
    """Positions at a time and loads in flight, so that keys and values of wide heads fit too.

    >>> block_of(128), block_of(1024)
    ((64, 3), (64, 1))
    """
    for block, stages in ((BLOCK_S, STAGES), (BLOCK_S, 2), (BLOCK_S, 1), (BLOCK_S // 2, 1)):
        if 2 * block * row_bytes * stages <= SHARED_BYTES:
            return block, stages
    return 16, 1


def attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, length: Tensor,
    *, scale: float, window: int | None, softcap: float | None, rotary: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Write the new keys and values behind each row's, and attend to all of them; ``[B, heads, 1, dim]``.

    With ``rotary`` (cosines and sines, ``[B, 1, dim]``) queries and keys are rotated first.
    """
    batch, heads, _, dim = q.shape
    groups = keys.shape[1]
    out = torch.empty((batch, heads, 1, dim), dtype=q.dtype, device=q.device)
    share = heads // groups
    padded = max(16, triton.next_power_of_2(dim))
    block, stages = block_of(padded * keys.element_size())
    cos, sin = (x.expand(batch, -1, -1) for x in rotary) if rotary is not None else (q, q)
    _attend[(batch, groups)](
        q, k, v, cos, sin, keys, values, out, length, scale, softcap or 1.0,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        cos.stride(0), sin.stride(0), keys.stride(0), keys.stride(1),
        ROTATES=rotary is not None, WINDOW=window or 0, CAPPED=softcap is not None,
        HEADS=share, PADDED_HEADS=max(16, triton.next_power_of_2(share)),
        DIM=dim, PADDED_DIM=padded, BLOCK=block, num_warps=WARPS, num_stages=stages,
    )  # fmt: skip
    return out


@triton.jit
def _rotate_heads(
    x_ptr, stride_head, cos_1, cos_2, sin_1, sin_2, HEADS: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, PADDED)[:, None]
    i = tl.arange(0, PADDED_HALF)[None, :]
    at = x_ptr + head * stride_head + i
    inside = (head < HEADS) & (i < HALF)
    one = tl.load(at, mask=inside, other=0.0)
    two = tl.load(at + HALF, mask=inside, other=0.0)
    tl.store(at, _turn(one, two, cos_1, -sin_1), mask=inside)
    tl.store(at + HALF, _turn(two, one, cos_2, sin_2), mask=inside)


@triton.jit
def _rotate(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_row, q_head, q_token, k_row, k_head, k_token,
    cos_row, cos_token, sin_row, sin_token,
    Q_HEADS: tl.constexpr, Q_PADDED: tl.constexpr, K_HEADS: tl.constexpr, K_PADDED: tl.constexpr,
    HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, PADDED_HALF)[None, :]
    cos = cos_ptr + row * cos_row + token * cos_token + i
    sin = sin_ptr + row * sin_row + token * sin_token + i
    cos_1, cos_2 = tl.load(cos, mask=i < HALF, other=0.0), tl.load(cos + HALF, mask=i < HALF, other=0.0)
    sin_1, sin_2 = tl.load(sin, mask=i < HALF, other=0.0), tl.load(sin + HALF, mask=i < HALF, other=0.0)
    q = q_ptr + row * q_row + token * q_token
    k = k_ptr + row * k_row + token * k_token
    _rotate_heads(q, q_head, cos_1, cos_2, sin_1, sin_2, Q_HEADS, Q_PADDED, HALF, PADDED_HALF)
    _rotate_heads(k, k_head, cos_1, cos_2, sin_1, sin_2, K_HEADS, K_PADDED, HALF, PADDED_HALF)


def rotate_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of queries and keys ``[B, heads, T, dim]``, in place, by angles ``[B or 1, T, dim]``."""
    batch, heads, tokens, dim = q.shape
    half = dim // 2
    cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
    _rotate[(tokens, batch)](
        q, k, cos, sin, *q.stride()[:3], *k.stride()[:3], *cos.stride()[:2], *sin.stride()[:2],
        Q_HEADS=heads, Q_PADDED=triton.next_power_of_2(heads),
        K_HEADS=k.shape[1], K_PADDED=triton.next_power_of_2(k.shape[1]),
        HALF=half, PADDED_HALF=triton.next_power_of_2(half), num_warps=4,
    )  # fmt: skip


@triton.jit
def _gated(gate_ptr, up_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + at, mask=at < n, other=0.0)
    up = tl.load(up_ptr + at, mask=at < n, other=0.0)
    x = gate.to(tl.float32)
    opened = (x / (1.0 + tl.exp(-x))).to(gate.dtype)
    tl.store(out_ptr + at, (opened.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=at < n)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of ``gate`` times ``up``, in one sweep."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    n = gate.numel()
    _gated[(triton.cdiv(n, BLOCK_GATED),)](gate, up, out, n, BLOCK=BLOCK_GATED, num_warps=4)
    return out


# --- projections ------------------------------------------------------------------------------------------------------


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
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
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
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
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


def _tiles(rows: int) -> dict[str, int]:
    """Rows at a time, so that small batches do not multiply air and large ones keep every multiprocessor busy.

    >>> _tiles(8)["BLOCK_M"], _tiles(1024)["BLOCK_M"]
    (16, 128)
    """
    block = 128 if rows > 512 else min(64, max(16, triton.next_power_of_2(rows)))
    return {"BLOCK_M": block, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}


def project(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    """Up to three projections of one input in one launch; sizes are multiples of 64."""
    flat = x.reshape(-1, x.shape[-1])
    sizes = [weight.shape[0] for weight in weights]
    n_1, n_2, n_3 = (*sizes, 0, 0)[:3]
    out = torch.empty((flat.shape[0], sum(sizes)), dtype=x.dtype, device=x.device)
    has_bias = biases[0] is not None
    given = [*weights, *weights][:3] + ([*biases, *biases][:3] if has_bias else [flat] * 3)
    tiles = _tiles(flat.shape[0])
    grid = (triton.cdiv(flat.shape[0], tiles["BLOCK_M"]), sum(sizes) // tiles["BLOCK_N"])
    _project[grid](
        flat, *given, out, flat.shape[0], N1=n_1, N2=n_2, N3=n_3, K=flat.shape[1], HAS_BIAS=has_bias, **tiles
    )
    return [part.view(*x.shape[:-1], -1) for part in out.split(sizes, 1)]


def project_gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of one projection times another, in one launch; sizes are multiples of 64."""
    flat = x.reshape(-1, x.shape[-1])
    rows, size = flat.shape[0], gate.shape[0]
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    tiles = _tiles(rows)
    grid = (triton.cdiv(rows, tiles["BLOCK_M"]), size // tiles["BLOCK_N"])
    _project_gated[grid](flat, gate, up, out, rows, N=size, K=flat.shape[1], **tiles)
    return out.view(*x.shape[:-1], size)


# --- sampling ---------------------------------------------------------------------------------------------------------


@triton.jit
def _mix(seed, step):
    """One seed for each (seed, step): splitmix64."""
    z = seed.to(tl.uint64) + (step.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _sample(
    logits_ptr, temperature_ptr, seed_ptr, step_ptr, token_ptr, logprob_ptr, raw_ptr, row_stride,
    V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PADDED_BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * row_stride
    temperature = tl.load(temperature_ptr + row)
    is_greedy = temperature <= 0.0
    inverse = tl.where(is_greedy, 1.0, 1.0 / tl.where(is_greedy, 1.0, temperature))
    v = tl.arange(0, BLOCK)
    b = tl.arange(0, PADDED_BLOCKS)
    # Of each block the highest logit, and the sums beside it: raw and tempered.
    tops = tl.full([PADDED_BLOCKS], -1e38, tl.float32)
    raws = tl.zeros([PADDED_BLOCKS], tl.float32)
    masses = tl.zeros([PADDED_BLOCKS], tl.float32)
    for block in range(BLOCKS):
        at = block * BLOCK + v
        x = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
        top = tl.maximum(tl.max(x, 0), -1e38)
        raw = tl.sum(tl.exp(x - top), 0)
        mass = raw
        if inverse != 1.0:
            mass = tl.sum(tl.exp((x - top) * inverse), 0)
        tops = tl.where(b == block, top, tops)
        raws = tl.where(b == block, raw, raws)
        masses = tl.where(b == block, mass, masses)
    top = tl.max(tops, 0)
    raw_sum = tl.sum(raws * tl.exp(tops - top), 0)
    masses = masses * tl.exp((tops - top) * inverse)
    total = tl.sum(masses, 0)
    # One number in [0, 1) picks a block by its mass, then a token within it by its own.
    mixed = _mix(tl.load(seed_ptr + row), tl.load(step_ptr + row))
    target = (mixed >> 40).to(tl.float32) * 5.9604644775390625e-08 * total
    block = tl.minimum(tl.sum((tl.cumsum(masses, 0) <= target).to(tl.int32), 0), BLOCKS - 1)
    if is_greedy:
        block = tl.minimum(tl.min(tl.where(tops == top, b, PADDED_BLOCKS), 0), BLOCKS - 1)
    before = tl.sum(tl.where(b < block, masses, 0.0), 0)
    own = tl.sum(tl.where(b == block, masses, 0.0), 0)
    start = block * BLOCK
    x = tl.load(logits + start + v, mask=start + v < V, other=float("-inf")).to(tl.float32)
    weight = tl.exp((x - tl.sum(tl.where(b == block, tops, 0.0), 0)) * inverse)
    reached = tl.cumsum(weight, 0)
    share = tl.minimum((target - before) / own, 0.9999998)  # sums in another order: stay within the block
    found = tl.min(tl.where((reached > share * tl.max(reached, 0)) & (weight > 0.0), v, BLOCK), 0)
    i = tl.where(is_greedy | (found == BLOCK), tl.argmax(x, 0), found)
    chosen = tl.sum(tl.where(v == i, x, 0.0), 0)
    raw = chosen - top - tl.log(raw_sum)
    tl.store(token_ptr + row, tl.minimum(start + i, V - 1).to(tl.int64))
    tl.store(raw_ptr + row, raw)
    tl.store(logprob_ptr + row, tl.where(is_greedy, raw, (chosen - top) * inverse - tl.log(total)))


def sample(logits_BV: Tensor, temperature_B: Tensor, seed_B: Tensor, step_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Untruncated sampling: what `verifiers.engine.sampler.sample` returns, in one sweep."""
    batch, vocabulary = logits_BV.shape
    token = torch.empty(batch, dtype=torch.int64, device=logits_BV.device)
    logprob, raw = (torch.empty(batch, dtype=torch.float32, device=logits_BV.device) for _ in range(2))
    blocks = triton.cdiv(vocabulary, BLOCK_V)
    _sample[(batch,)](
        logits_BV, temperature_B, seed_B, step_B, token, logprob, raw, logits_BV.stride(0),
        V=vocabulary, BLOCK=BLOCK_V, BLOCKS=blocks, PADDED_BLOCKS=triton.next_power_of_2(blocks), num_warps=8,
    )  # fmt: skip
    return token, logprob, raw


def warm_up(device: Any) -> None:
    """Compile for this device before anything is captured or timed."""
    x = torch.zeros((1, 16), device=device)
    zeros = torch.zeros(1, dtype=torch.int64, device=device)
    sample(x, torch.ones(1, device=device), zeros, zeros)
