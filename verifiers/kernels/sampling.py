"""Sample tokens from logits: a batch of rows, each with its own temperature, truncation and random numbers.

Random numbers depend only on (seed, position), so a request draws the same numbers in any batch. A token is the inverse
of the cumulative distribution at one uniform number. Nothing here synchronises with the device.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verifiers.kernels.cpu.binding import CSampling, decode_functions

_BISECTIONS = 31  # enough for probabilities: they are at most 1.0, whose bit pattern is below 2**30
_LIKELIEST = 2048  # tokens that `_floor_among_likeliest` sorts
NO_LIMIT = 1 << 30  # more tokens than any vocabulary has
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


@dataclass(slots=True)
class SamplingColumns:
    """How each of B rows is sampled. A ``top_k`` of 0 means no limit. ``step_B`` counts the tokens sampled so far."""

    temperature_B: Tensor
    top_p_B: Tensor
    top_k_B: Tensor
    min_p_B: Tensor
    seed_B: Tensor
    step_B: Tensor

    def in_c(self) -> CSampling:
        """Pointers to these columns, which must be contiguous and outlive the C call."""
        given = (self.temperature_B, self.top_p_B, self.min_p_B, self.top_k_B, self.seed_B, self.step_B)
        return CSampling(*(one.data_ptr() for one in given))

    def each(self, change: Callable[[Tensor], Tensor]) -> SamplingColumns:
        return SamplingColumns(*(change(getattr(self, name)) for name in self.__slots__))


def uniforms(seed_B: Tensor, step_B: Tensor) -> Tensor:
    """One number in [0, 1) for each (seed, step), by splitmix64. 64-bit arithmetic wraps the same on every device.

    >>> a = uniforms(torch.tensor([7, 7]), torch.tensor([0, 1])); bool(a[0] != a[1])
    True
    """
    z = seed_B + (step_B + 1) * _GOLDEN
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    z = z ^ _shift(z, 31)
    return _shift(z, 40).to(torch.float32) * 2.0**-24


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: shifts in zeros, not the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def sample(
    logits_BV: Tensor, columns: SamplingColumns, *, truncates: bool, is_plain: bool = False
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Token ids, their logprobs under the sampling distribution, and their logprobs under the raw distribution.

    Without ``truncates``, the columns of top-p, top-k and min-p are ignored, on any device. A temperature of 0 takes
    the likeliest token and reports its raw logprob. ``is_plain`` means that every temperature is 1 and nothing is
    truncated, so both logprobs are the same.
    """
    logits_BV = logits_BV.float()
    if logits_BV.device.type == "cpu" and decode_functions() is not None:
        return _drawn_in_c(logits_BV.contiguous(), columns if truncates else _untruncated(columns))
    if is_plain:
        probs_BV = torch.softmax(logits_BV, -1)
        token_B, mass_B = _draw(probs_BV, columns)
        raw_B = probs_BV.gather(1, token_B[:, None])[:, 0].log()
        return token_B, raw_B - mass_B.log(), raw_B
    raw_lse_B = torch.logsumexp(logits_BV, -1)
    is_greedy_B = columns.temperature_B <= 0
    scale_B = torch.where(is_greedy_B, torch.ones_like(columns.temperature_B), columns.temperature_B)
    scaled_BV = logits_BV / scale_B[:, None]
    probs_BV = torch.softmax(scaled_BV, -1)
    if truncates:
        probs_BV = truncate(probs_BV, columns)
    drawn_B, mass_B = _draw(probs_BV, columns)
    token_B = torch.where(is_greedy_B, logits_BV.argmax(-1), drawn_B)
    raw_B = logits_BV.gather(1, token_B[:, None])[:, 0] - raw_lse_B
    chosen_B = probs_BV.gather(1, token_B[:, None])[:, 0]
    return token_B, torch.where(is_greedy_B, raw_B, chosen_B.log() - mass_B.log()), raw_B


def log_softmax(logits_NV: Tensor) -> Tensor:
    """In float32. PyTorch's own sums sequentially on the CPU, with an error of 1e-5 over a large vocabulary."""
    logits_NV = logits_NV.float()
    return logits_NV - torch.logsumexp(logits_NV, -1, keepdim=True)


def _untruncated(columns: SamplingColumns) -> SamplingColumns:
    ones_B = torch.ones_like(columns.top_p_B)
    return replace(columns, top_p_B=ones_B, top_k_B=torch.zeros_like(columns.top_k_B), min_p_B=torch.zeros_like(ones_B))


def _drawn_in_c(logits_BV: Tensor, columns: SamplingColumns) -> tuple[Tensor, Tensor, Tensor]:
    n, vocabulary = logits_BV.shape
    token_B = torch.empty(n, dtype=torch.int64)
    logprob_B, raw_B = torch.empty(2, n)
    workspace = torch.empty(decode_functions().draw_workspace(vocabulary))
    columns = columns.each(Tensor.contiguous)
    outputs = (one.data_ptr() for one in (token_B, logprob_B, raw_B, workspace))
    decode_functions().draw(n, vocabulary, logits_BV.data_ptr(), byref(columns.in_c()), *outputs)
    return token_B, logprob_B, raw_B


def _draw(probs_BV: Tensor, columns: SamplingColumns) -> tuple[Tensor, Tensor]:
    """Draw a token of each row; returns it and the sum of the row's probabilities, which need not be 1."""
    cdf_BV = probs_BV.cumsum(-1)
    mass_B = cdf_BV[:, -1]
    # Stay below the total despite rounding, because the last token may have probability 0.
    below_B = torch.nextafter(mass_B, torch.zeros_like(mass_B))
    target_B = torch.minimum(uniforms(columns.seed_B, columns.step_B) * mass_B, below_B)
    token_B = torch.searchsorted(cdf_BV, target_B[:, None], right=True)[:, 0]
    return token_B.clamp_(max=probs_BV.shape[1] - 1), mass_B  # a row with NaN is clamped here; its logprob is NaN


def truncate(probs_BV: Tensor, columns: SamplingColumns) -> Tensor:
    """Zero the tokens that top-k, top-p and min-p exclude. Tokens that tie with the last one kept are kept too."""
    columns = replace(columns, top_k_B=torch.where(columns.top_k_B > 0, columns.top_k_B, NO_LIMIT))
    find_floor = _floor_among_likeliest if probs_BV.device.type == "cpu" else _floor_by_bisection
    floor_B = torch.maximum(find_floor(probs_BV, columns), columns.min_p_B * probs_BV.amax(-1))
    return torch.where(probs_BV >= floor_B[:, None], probs_BV, torch.zeros_like(probs_BV))


def _floor_by_bisection(probs_BV: Tensor, columns: SamplingColumns) -> Tensor:
    """The lowest probability that top-k and top-p keep, found in a fixed number of passes instead of a sort.

    Bisects the bit patterns of the floats, which have the same order as the floats, so the result is exact.
    """
    top_B = probs_BV.amax(-1)
    low_B = torch.zeros_like(top_B, dtype=torch.int32)
    high_B = top_B.view(torch.int32) + 1
    share_B = torch.where(columns.top_p_B < 1, columns.top_p_B, torch.inf)  # else a sum may round to 1 too early
    for _ in range(_BISECTIONS):
        middle_B = low_B + (high_B - low_B) // 2
        kept_BV = probs_BV >= middle_B.view(torch.float32)[:, None]
        enough_B = ((probs_BV * kept_BV).sum(-1) >= share_B) | (kept_BV.sum(-1) >= columns.top_k_B)
        low_B = torch.where(enough_B, middle_B, low_B)
        high_B = torch.where(enough_B, high_B, middle_B)
    return low_B.view(torch.float32)


def _floor_among_likeliest(probs_BV: Tensor, columns: SamplingColumns) -> Tensor:
    """Like `_floor_by_bisection`, but from the likeliest tokens: ten times faster on a CPU. Bisects other rows."""
    vocabulary = probs_BV.shape[1]
    likeliest_BN = probs_BV.topk(min(_LIKELIEST, vocabulary)).values
    count_N = torch.arange(1, likeliest_BN.shape[1] + 1)
    has_share_B = columns.top_p_B < 1
    enough_BN = (likeliest_BN.cumsum(-1) >= columns.top_p_B[:, None]) & has_share_B[:, None]
    enough_BN |= count_N >= columns.top_k_B[:, None]
    found_B = enough_BN.any(-1)
    last_B = likeliest_BN.gather(1, enough_BN.int().argmax(-1, keepdim=True))[:, 0]
    floor_B = torch.where(found_B, last_B, torch.zeros_like(last_B))
    is_bounded_B = has_share_B | (columns.top_k_B < vocabulary)
    min_p_decides_B = columns.min_p_B * likeliest_BN[:, 0] > likeliest_BN[:, -1]
    rest_B = (is_bounded_B & ~found_B & ~min_p_decides_B).nonzero()[:, 0]
    if len(rest_B) and len(count_N) < vocabulary:
        floor_B[rest_B] = _floor_by_bisection(probs_BV[rest_B], columns.each(lambda one: one[rest_B]))
    return floor_B
