"""Two kernels for decoding on CUDA: attention of one new token a row, and sampling in one sweep over the logits.

Both exist because a benchmark showed the need: attention that reads only the positions a row has filled needs neither
masks nor a captured graph for each length, and sampling by plain operations sweeps the logits eight times.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_S, WARPS, STAGES = 64, 4, 3
SHARED_BYTES = 160 << 10  # what a block of threads may hold of keys and values on every card we aim at
BLOCK_V = 2048


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, out_ptr, length_ptr, scale, softcap,
    q_row, q_head, k_row, k_head, v_row, v_head, cache_row, cache_head,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    n = tl.load(length_ptr + row)
    d = tl.arange(0, PADDED_DIM)
    in_dim = d < DIM
    k_new = tl.load(k_ptr + row * k_row + group * k_head + d, mask=in_dim, other=0.0)
    v_new = tl.load(v_ptr + row * v_row + group * v_head + d, mask=in_dim, other=0.0)
    keys = keys_ptr + row * cache_row + group * cache_head
    values = values_ptr + row * cache_row + group * cache_head
    tl.store(keys + n * DIM + d, k_new, mask=in_dim)
    tl.store(values + n * DIM + d, v_new, mask=in_dim)
    head = tl.arange(0, PADDED_HEADS)
    is_head = head < HEADS
    q_at = q_ptr + row * q_row + (group * HEADS + head[:, None]) * q_head + d[None, :]
    q = tl.load(q_at, mask=is_head[:, None] & in_dim[None, :], other=0.0)
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
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=is_head[:, None] & in_dim[None, :])


def _block(row_bytes: int) -> tuple[int, int]:
    """Positions at a time and loads in flight, so that keys and values of wide heads fit too.

    >>> _block(128), _block(1024)
    ((64, 3), (64, 1))
    """
    for block, stages in ((BLOCK_S, STAGES), (BLOCK_S, 2), (BLOCK_S, 1), (BLOCK_S // 2, 1)):
        if 2 * block * row_bytes * stages <= SHARED_BYTES:
            return block, stages
    return 16, 1


def attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, length: Tensor,
    *, scale: float, window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Write the new keys and values behind each row's, and attend to all of them; ``[B, heads, 1, dim]``."""
    batch, heads, _, dim = q.shape
    groups = keys.shape[1]
    out = torch.empty((batch, heads, 1, dim), dtype=q.dtype, device=q.device)
    share = heads // groups
    padded = max(16, triton.next_power_of_2(dim))
    block, stages = _block(padded * keys.element_size())
    _attend[(batch, groups)](
        q, k, v, keys, values, out, length, scale, softcap or 1.0,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), keys.stride(0), keys.stride(1),
        WINDOW=window or 0, CAPPED=softcap is not None,
        HEADS=share, PADDED_HEADS=max(16, triton.next_power_of_2(share)),
        DIM=dim, PADDED_DIM=padded, BLOCK=block, num_warps=WARPS, num_stages=stages,
    )  # fmt: skip
    return out


@triton.jit
def _mix(seed, step):
    """One seed for each (seed, step): splitmix64."""
    z = seed.to(tl.uint64) + (step.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _uniform(low, high, i):
    """A number in (0, 1) for each i: three rounds of multiply and shift over a 64-bit seed."""
    h = (i ^ low) * 0x9E3779B1
    h = ((h ^ (h >> 15)) + high) * 0x85EBCA77
    h = (h ^ (h >> 13)) * 0xC2B2AE3D
    h = h ^ (h >> 16)
    return ((h >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08


@triton.jit
def _sample(
    logits_ptr, temperature_ptr, seed_ptr, step_ptr, token_ptr, logprob_ptr, raw_ptr,
    row_stride, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    is_greedy = temperature <= 0.0
    inverse = tl.where(is_greedy, 1.0, 1.0 / tl.where(is_greedy, 1.0, temperature))
    mixed = _mix(tl.load(seed_ptr + row), tl.load(step_ptr + row))
    low, high = mixed.to(tl.uint32), (mixed >> 32).to(tl.uint32)
    v = tl.arange(0, BLOCK)
    top = float("-inf")
    raw_sum = 0.0
    tempered_sum = 0.0
    best = -1.0
    token = 0
    chosen = 0.0
    for start in range(0, V, BLOCK):
        at = start + v
        x = tl.load(logits_ptr + row * row_stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        weight = tl.exp(x - higher)
        raw_sum = raw_sum * tl.exp(top - higher) + tl.sum(weight, 0)
        shrink = tl.exp((top - higher) * inverse)
        if inverse != 1.0:
            weight = tl.exp((x - higher) * inverse)
        tempered_sum = tempered_sum * shrink + tl.sum(weight, 0)
        top = higher
        # A race of exponential clocks, each as fast as its token is likely: the first to ring is the sample.
        if not is_greedy:
            weight = weight / -tl.log(_uniform(low, high, at.to(tl.uint32)))
        best = best * shrink
        block_best = tl.max(weight, 0)
        i = tl.argmax(weight, 0)
        is_better = block_best > best
        best = tl.where(is_better, block_best, best)
        token = tl.where(is_better, start + i, token)
        chosen = tl.where(is_better, tl.sum(tl.where(v == i, x, 0.0), 0), chosen)
    raw = chosen - top - tl.log(raw_sum)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(raw_ptr + row, raw)
    tl.store(logprob_ptr + row, tl.where(is_greedy, raw, (chosen - top) * inverse - tl.log(tempered_sum)))


def sample(logits_BV: Tensor, temperature_B: Tensor, seed_B: Tensor, step_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Untruncated sampling: what `verifiers.engine.sampling.sample` returns, in one sweep."""
    batch, vocabulary = logits_BV.shape
    token = torch.empty(batch, dtype=torch.int64, device=logits_BV.device)
    logprob, raw = (torch.empty(batch, dtype=torch.float32, device=logits_BV.device) for _ in range(2))
    _sample[(batch,)](
        logits_BV, temperature_B, seed_B, step_B, token, logprob, raw, logits_BV.stride(0),
        V=vocabulary, BLOCK=BLOCK_V, num_warps=4,
    )  # fmt: skip
    return token, logprob, raw


def warm_up(device: Any) -> None:
    """Compile for this device before anything is captured or timed."""
    x = torch.zeros((1, 16), device=device)
    zeros = torch.zeros(1, dtype=torch.int64, device=device)
    sample(x, torch.ones(1, device=device), zeros, zeros)
