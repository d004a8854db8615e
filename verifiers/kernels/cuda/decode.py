"""Triton: attention of one new token a sequence, norms of heads, rotary embedding, gating.

They exist because a benchmark showed the need: attention that reads only the positions a sequence has filled, through
its block table, needs neither masks nor a captured graph for each length, and the rotary embedding by plain operations
is ten launches a layer. They round where plain operations round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verifiers.kernels.cuda.splits import attend_block, capped, merge, partial_sums, store_part
from verifiers.kernels.norms import HeadNorms

BLOCK_S, WARPS, STAGES = 64, 4, 2
SHARED_BYTES = 160 << 10  # what a block of threads may hold of keys and values on every card we aim at
BLOCK_GATED = 1024


@triton.jit
def rotate_pair(x, partner, cos, sin):
    """x·cos + partner·sin, both products rounded to the type of x before they are added."""
    one = (x.to(tl.float32) * cos.to(tl.float32)).to(x.dtype)
    two = (partner.to(tl.float32) * sin.to(tl.float32)).to(x.dtype)
    return (one.to(tl.float32) + two.to(tl.float32)).to(x.dtype)


@triton.jit
def _inverse_rms(squares, epsilon, DIM: tl.constexpr):
    """One over the root mean square, from the sum of squares."""
    return tl.rsqrt(squares / DIM + epsilon)


@triton.jit
def _normed(x, scale, weight):
    return (x.to(tl.float32) * scale * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _squares(x):
    return x.to(tl.float32) * x.to(tl.float32)


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, q_epsilon, k_epsilon,
    keys_ptr, values_ptr, out_ptr, length_ptr, scale, softcap,
    q_row, q_head, k_row, k_head, v_row, v_head, cos_row, sin_row,
    table_ptr, part_ptr, sum_ptr, table_row, cache_block, cache_head, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    NORMS: tl.constexpr, ROTATES: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    split = tl.program_id(2)
    n = tl.load(length_ptr + row)
    span = (n + BLOCK * SPLITS - 1) // (BLOCK * SPLITS) * BLOCK
    begin, stop = split * span, tl.minimum((split + 1) * span, n)
    head = tl.arange(0, PADDED_HEADS)
    part = ((row * tl.num_programs(1) + group) * SPLITS + split) * PADDED_HEADS + head
    if SPLITS > 1:  # noqa: SIM102 (this one is decided by the compiler)
        if (split > 0) & (begin >= n):
            tl.store(sum_ptr + part * 2, tl.full([PADDED_HEADS], -1e38, tl.float32))
            tl.store(sum_ptr + part * 2 + 1, tl.zeros([PADDED_HEADS], tl.float32))
            return
    d = tl.arange(0, PADDED_DIM)
    in_dim = d < DIM
    k_new = tl.load(k_ptr + row * k_row + group * k_head + d, mask=in_dim, other=0.0)
    v_new = tl.load(v_ptr + row * v_row + group * v_head + d, mask=in_dim, other=0.0)
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
        if NORMS:
            k_scale = _inverse_rms(tl.sum(_squares(k_new), 0), k_epsilon, DIM)
            q_scale = _inverse_rms(tl.sum(_squares(q), 1), q_epsilon, DIM)[:, None]
            k_new = _normed(k_new, k_scale, tl.load(k_norm_ptr + d, mask=in_dim, other=0.0))
            k_partner = _normed(k_partner, k_scale, tl.load(k_norm_ptr + partner, mask=in_dim, other=0.0))
            q = _normed(q, q_scale, tl.load(q_norm_ptr + d, mask=in_dim, other=0.0)[None, :])
            q_partner = _normed(q_partner, q_scale, tl.load(q_norm_ptr + partner, mask=in_dim, other=0.0)[None, :])
        k_new = rotate_pair(k_new, k_partner, cos, sin)
        q = rotate_pair(q, q_partner, cos[None, :], sin[None, :])
    table = table_ptr + row * table_row
    keys, values = keys_ptr + group * cache_head, values_ptr + group * cache_head
    top = tl.full([PADDED_HEADS], -1e38, tl.float32)
    total = tl.zeros([PADDED_HEADS], tl.float32)
    out = tl.zeros([PADDED_HEADS, PADDED_DIM], tl.float32)
    if split == 0:  # its part are the first positions and the new one
        at = tl.load(table + n // PAGE).to(tl.int64) * cache_block + n % PAGE * DIM + d
        tl.store(keys + at, k_new, mask=in_dim)
        tl.store(values + at, v_new, mask=in_dim)
        top = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
        if CAPPED:
            top = capped(top, softcap)
        total = total + 1.0
        out = out + v_new.to(tl.float32)[None, :]
    first = 0
    if WINDOW > 0:
        first = tl.maximum(n + 1 - WINDOW, 0)
        begin = tl.maximum(begin, first // BLOCK * BLOCK)
    for start in range(begin, stop, BLOCK):
        s = start + tl.arange(0, BLOCK)
        seen = (s < n) & (s >= first)
        page = tl.load(table + s // PAGE, mask=seen, other=0).to(tl.int64)
        at = (page * cache_block + s % PAGE * DIM)[:, None] + d[None, :]
        top, total, out = attend_block(
            q, keys + at, values + at, seen[:, None] & in_dim[None, :], seen[None, :], scale, softcap, top, total, out,
            CAPPED,
        )  # fmt: skip
    if SPLITS == 1:
        out_at = out_ptr + (row * tl.num_programs(1) * HEADS + group * HEADS + head[:, None]) * DIM + d[None, :]
        tl.store(out_at, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_q)
    else:
        store_part(part_ptr, sum_ptr, part, d, top, total, out, is_q, PADDED_DIM)


def block_of(row_bytes: int) -> tuple[int, int]:
    """Positions at a time and loads in flight, so that keys and values of wide heads fit too.

    >>> block_of(128), block_of(1024)
    ((64, 2), (64, 1))
    """
    for block, stages in ((BLOCK_S, STAGES), (BLOCK_S, 1), (BLOCK_S // 2, 1)):
        if 2 * block * row_bytes * stages <= SHARED_BYTES:
            return block, stages
    return 16, 1


def attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, tables: Tensor, length: Tensor, splits: int = 1,
    *, scale: float, window: int | None, softcap: float | None, rotary: tuple[Tensor, Tensor] | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:  # fmt: skip
    """Write the new keys and values behind each sequence's, and attend to all of them; ``[B, heads, 1, dim]``.

    ``keys`` and ``values`` are blocks ``[blocks, kv_heads, page, dim]``, ``tables`` names those of each sequence.

    With ``rotary`` (cosines and sines, ``[B, 1, dim]``) queries and keys are rotated first, and before that normed.
    """
    batch, heads, _, dim = q.shape
    groups, page = keys.shape[1:3]
    out = torch.empty((batch, heads, 1, dim), dtype=q.dtype, device=q.device)
    share = heads // groups
    padded = max(16, triton.next_power_of_2(dim))
    block, stages = block_of(padded * keys.element_size())
    queries = max(16, triton.next_power_of_2(share))
    parts, sums = partial_sums(batch * groups, splits, queries, padded, out)
    cos, sin = (x.expand(batch, -1, -1) for x in rotary) if rotary is not None else (q, q)
    _attend[(batch, groups, splits)](
        q, k, v, cos, sin, *(norms or (q, k, 0.0, 0.0)), keys, values, out, length, scale, softcap or 1.0,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        cos.stride(0), sin.stride(0), tables, parts, sums, tables.stride(0), keys.stride(0), keys.stride(1),
        PAGE=page, SPLITS=splits,
        NORMS=norms is not None, ROTATES=rotary is not None, WINDOW=window or 0, CAPPED=softcap is not None,
        HEADS=share, PADDED_HEADS=queries,
        DIM=dim, PADDED_DIM=padded, BLOCK=block, num_warps=WARPS, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        merge(out, parts, sums, groups=groups, share=share, dim=dim, out_token=out.stride(0))
    return out


@triton.jit
def _rotate_heads(
    x_ptr, stride_head, cos_1, cos_2, sin_1, sin_2, norm_ptr, epsilon,
    NORMS: tl.constexpr, HEADS: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, PADDED)[:, None]
    i = tl.arange(0, PADDED_HALF)[None, :]
    at = x_ptr + head * stride_head + i
    inside = (head < HEADS) & (i < HALF)
    one = tl.load(at, mask=inside, other=0.0)
    two = tl.load(at + HALF, mask=inside, other=0.0)
    if NORMS:
        scale = _inverse_rms(tl.sum(_squares(one) + _squares(two), 1), epsilon, 2 * HALF)[:, None]
        one = _normed(one, scale, tl.load(norm_ptr + i, mask=i < HALF, other=0.0))
        two = _normed(two, scale, tl.load(norm_ptr + HALF + i, mask=i < HALF, other=0.0))
    tl.store(at, rotate_pair(one, two, cos_1, -sin_1), mask=inside)
    tl.store(at + HALF, rotate_pair(two, one, cos_2, sin_2), mask=inside)


@triton.jit
def _rotate(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_row, q_head, q_token, k_row, k_head, k_token,
    cos_row, cos_token, sin_row, sin_token, q_norm_ptr, k_norm_ptr, q_epsilon, k_epsilon,
    NORMS: tl.constexpr, Q_HEADS: tl.constexpr, Q_PADDED: tl.constexpr, K_HEADS: tl.constexpr, K_PADDED: tl.constexpr,
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
    _rotate_heads(
        q, q_head, cos_1, cos_2, sin_1, sin_2, q_norm_ptr, q_epsilon, NORMS, Q_HEADS, Q_PADDED, HALF, PADDED_HALF
    )
    _rotate_heads(
        k, k_head, cos_1, cos_2, sin_1, sin_2, k_norm_ptr, k_epsilon, NORMS, K_HEADS, K_PADDED, HALF, PADDED_HALF
    )


def rotate_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None) -> None:
    """Rotary embedding of queries and keys ``[B, heads, T, dim]``, in place, by angles ``[B or 1, T, dim]``.

    With ``norms`` each head is normed before.
    """
    batch, heads, tokens, dim = q.shape
    half = dim // 2
    cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
    _rotate[(tokens, batch)](
        q, k, cos, sin, *q.stride()[:3], *k.stride()[:3], *cos.stride()[:2], *sin.stride()[:2],
        *(norms or (q, k, 0.0, 0.0)), NORMS=norms is not None, Q_HEADS=heads, Q_PADDED=triton.next_power_of_2(heads),
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
