"""Triton: sampling without truncation in one pass over the logits; plain operations take eight.

Blocks of a row are summed in parallel. With few rows, summing them in sequence would leave most of the GPU idle.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verifiers.kernels.cuda.launch import begin, overlap

BLOCK_V = 4096


@triton.jit
def _mix(seed, step):
    """A random 64-bit number for each (seed, step), by splitmix64."""
    z = seed.to(tl.uint64) + (step.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=["temperature_row"], do_not_specialize_on_alignment=["temperature_ptr"])
def _sum_blocks(
    logits_ptr, temperature_ptr, sums_ptr, row_stride, temperature_row,
    V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """For each block of a row, its maximum and the sums of exponentials relative to it, raw and with temperature."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    inverse = _inverse(tl.load(temperature_ptr + row * temperature_row))
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
    top = tl.maximum(tl.max(x, 0), -1e38)
    raw = tl.sum(tl.exp(x - top), 0)
    mass = raw
    if inverse != 1.0:
        mass = tl.sum(tl.exp((x - top) * inverse), 0)
    sums = sums_ptr + row * 3 * BLOCKS + block
    tl.store(sums, top)
    tl.store(sums + BLOCKS, raw)
    tl.store(sums + 2 * BLOCKS, mass)


@triton.jit
def _inverse(temperature):
    """1 / temperature; 1 for greedy rows."""
    return tl.where(temperature <= 0.0, 1.0, 1.0 / tl.where(temperature <= 0.0, 1.0, temperature))


@triton.jit(
    do_not_specialize=["temperature_row", "seed_row", "step_row"],
    do_not_specialize_on_alignment=["temperature_ptr", "seed_ptr", "step_ptr"],
)
def _sample(
    logits_ptr, temperature_ptr, seed_ptr, step_ptr, sums_ptr, token_ptr, logprob_ptr, raw_ptr,
    row_stride, temperature_row, seed_row, step_row,
    V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PADDED_BLOCKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * row_stride
    temperature = tl.load(temperature_ptr + row * temperature_row)
    is_greedy = temperature <= 0.0
    inverse = _inverse(temperature)
    v = tl.arange(0, BLOCK)
    b = tl.arange(0, PADDED_BLOCKS)
    sums = sums_ptr + row * 3 * BLOCKS + b
    tops = tl.load(sums, mask=b < BLOCKS, other=-1e38)
    raws = tl.load(sums + BLOCKS, mask=b < BLOCKS, other=0.0)
    masses = tl.load(sums + 2 * BLOCKS, mask=b < BLOCKS, other=0.0)
    top = tl.max(tops, 0)
    raw_sum = tl.sum(raws * tl.exp(tops - top), 0)
    masses = masses * tl.exp((tops - top) * inverse)
    total = tl.sum(masses, 0)
    # One number in [0, 1) selects a block by its mass, then a token within the block.
    mixed = _mix(tl.load(seed_ptr + row * seed_row), tl.load(step_ptr + row * step_row))
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
    share = tl.minimum((target - before) / own, 0.9999998)  # sums differ in order; stay within the block
    found = tl.min(tl.where((reached > share * tl.max(reached, 0)) & (weight > 0.0), v, BLOCK), 0)
    i = tl.where(is_greedy | (found == BLOCK), tl.argmax(x, 0), found)
    chosen = tl.sum(tl.where(v == i, x, 0.0), 0)
    raw = chosen - top - tl.log(raw_sum)
    tl.store(token_ptr + row, tl.minimum(start + i, V - 1).to(tl.int64))
    tl.store(raw_ptr + row, raw)
    tl.store(logprob_ptr + row, tl.where(is_greedy, raw, (chosen - top) * inverse - tl.log(total)))


def sample(logits_BV: Tensor, temperature_B: Tensor, seed_B: Tensor, step_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sampling without truncation. Returns the same as `verifiers.kernels.sampling.sample`, in one pass."""
    batch, vocabulary = logits_BV.shape
    token = torch.empty(batch, dtype=torch.int64, device=logits_BV.device)
    logprob, raw = (torch.empty(batch, dtype=torch.float32, device=logits_BV.device) for _ in range(2))
    blocks = triton.cdiv(vocabulary, BLOCK_V)
    sums = torch.empty((batch, 3, blocks), dtype=torch.float32, device=logits_BV.device)
    options = {"V": vocabulary, "BLOCK": BLOCK_V, "BLOCKS": blocks, "num_warps": 8, **overlap(logits_BV.device)}
    _sum_blocks[(batch, blocks)](
        logits_BV, temperature_B, sums, logits_BV.stride(0), temperature_B.stride(0), **options
    )
    _sample[(batch,)](
        logits_BV, temperature_B, seed_B, step_B, sums, token, logprob, raw,
        logits_BV.stride(0), temperature_B.stride(0), seed_B.stride(0), step_B.stride(0),
        PADDED_BLOCKS=triton.next_power_of_2(blocks), **options,
    )  # fmt: skip
    return token, logprob, raw
