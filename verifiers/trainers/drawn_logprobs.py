"""Logits become the logprob of each target under what it was drawn from: biased, tempered, truncated."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from verifiers.engine.sequence import NO_TOP_K
from verifiers.kernels.sampling import SamplingColumns, truncate
from verifiers.trainers.sampling import Distribution


def drawn_logprobs(logits_NV: Tensor, target_N: Tensor, drawn_from: Distribution) -> Tensor:
    """As the sampler computes them. What it drew is kept even where the policy has moved and would now leave it out."""
    if drawn_from.logit_bias:
        tokens, values = zip(*drawn_from.logit_bias, strict=True)
        bias = torch.tensor(values, device=logits_NV.device, dtype=logits_NV.dtype)
        logits_NV = logits_NV.index_add(
            1, torch.tensor(tokens, device=logits_NV.device), bias.expand(len(logits_NV), -1)
        )
    scaled_NV = logits_NV.float()
    if drawn_from.temperature != 1.0:
        scaled_NV = scaled_NV / drawn_from.temperature
    if drawn_from.truncates:
        scaled_NV = scaled_NV.masked_fill(_left_out(scaled_NV.detach(), target_N, drawn_from), -torch.inf)
    return -functional.cross_entropy(scaled_NV, target_N, reduction="none")


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not typed here
def _left_out(scaled_NV: Tensor, target_N: Tensor, drawn_from: Distribution) -> Tensor:
    """Which tokens are not drawn, the target never among them; it has no gradient."""

    def each(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((len(scaled_NV),), value, dtype=dtype, device=scaled_NV.device)

    zero_N = each(0, torch.int64)
    columns = SamplingColumns(
        temperature_B=each(1.0, torch.float32),
        top_p_B=each(drawn_from.top_p, torch.float32),
        top_k_B=each(drawn_from.top_k or NO_TOP_K, torch.int64),
        min_p_B=each(drawn_from.min_p, torch.float32),
        seed_B=zero_N,
        step_B=zero_N,
    )
    left_out_NV = truncate(torch.softmax(scaled_NV, -1), columns) == 0
    return left_out_NV.scatter_(1, target_N[:, None], False)
