"""All kernels in plain PyTorch: the reference for tests, and the fallback where there is no kernel.

The functions for training (norm, rotate, gated, logprobs, each with its backward) have the same signatures in
`cpu.learning` and `cuda.learning`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CACHED_NUMBERS = 1 << 18  # 1 MiB of float32

# --- inference --------------------------------------------------------------------------------------------------------


def rms_norm(module: Any, epsilon: float, x: Tensor) -> Tensor:
    """A module's RMS norm in one operation; transformers uses six."""
    return F.rms_norm(x, module.weight.shape, module.weight, epsilon)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: rotate each pair (i, i + dim/2) of ``[B, heads, T, dim]`` by the angle of its position."""
    half = x.shape[-1] // 2
    partner = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos[:, None] + partner * sin[:, None]


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, past: int, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Causal attention of queries ``[B, heads, T, dim]`` from position ``past`` on, over keys from position 0 on."""
    n, total = q.shape[2], k.shape[2]
    needs_window = window is not None and total > window
    if not past and not needs_window and softcap is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    position_q = torch.arange(past, past + n, device=q.device)[:, None]
    position_k = torch.arange(total, device=q.device)[None]
    seen = position_k <= position_q
    if needs_window:
        seen &= position_k > position_q - window
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * (scale / softcap)) * softcap
    return torch.matmul(torch.softmax(scores.masked_fill(~seen, float("-inf")), -1), v)


# --- training ---------------------------------------------------------------------------------------------------------


def norm(x_ND: Tensor, more_ND: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """RMS norm of ``x`` (plus ``more``): the sum, its norm, and the inverse RMS of each row."""
    total_ND = x_ND if more_ND is None else x_ND + more_ND
    scale_N = torch.linalg.vector_norm(total_ND, dim=-1).square_().div_(total_ND.shape[-1]).add_(epsilon).rsqrt_()
    return total_ND, (total_ND * scale_N[:, None]).mul_(weight), scale_N


def norm_back(
    x_ND: Tensor, weight: Tensor, scale_N: Tensor, residual_ND: Tensor | None, grad_ND: Tensor, *, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the input and the weight. Adds ``residual_ND``, the gradient of the residual connection."""
    unit_ND = x_ND * scale_N[:, None]
    product_ND = grad_ND * unit_ND
    grad_weight = product_ND.sum(0) if learns else None
    share_N = (product_ND @ weight).div_(-x_ND.shape[-1])
    out_ND = torch.mul(grad_ND, weight, out=product_ND).addcmul_(unit_ND, share_N[:, None])
    if residual_ND is None:
        return out_ND.mul_(scale_N[:, None]), grad_weight
    return torch.addcmul(residual_ND, out_ND, scale_N[:, None]), grad_weight


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
    """Rotary embedding of queries and keys ``[B, T, heads, dim]`` by angles ``[B or 1, T, dim]``, or its backward."""
    half = sin.shape[-1] // 2
    first, second = sin[..., :half], sin[..., half:]
    signed = torch.cat((second, -first) if back else (-first, second), -1)[:, :, None]
    return _rotated(q, cos[:, :, None], signed), _rotated(k, cos[:, :, None], signed)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of ``gate`` times ``up``."""
    return F.silu(gate).mul_(up)


def gated_back(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``gate`` and ``up``, given the gradient of SiLU of ``gate`` times ``up``."""
    return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def logprobs(logits_NV: Tensor, target_N: Tensor, temperature: float, logprob_N: Tensor, lse_N: Tensor) -> None:
    """Write the logprob of each row's target, and the logsumexp of the row."""
    rows = int(max(1, CACHED_NUMBERS // logits_NV.shape[1]))  # rows that stay in the CPU's cache between passes
    for part_NV, part_N in zip(logits_NV.split(rows), lse_N.split(rows), strict=True):
        torch.logsumexp(part_NV if temperature == 1.0 else part_NV / temperature, -1, out=part_N)
    chosen_N = logits_NV.gather(1, target_N[:, None])[:, 0]
    torch.sub(chosen_N.div_(temperature), lse_N, out=logprob_N)


def logprobs_back_(logits_NV: Tensor, target_N: Tensor, temperature: float, lse_N: Tensor, grad_N: Tensor) -> None:
    """Replace logits by their gradients, in place, given the gradients of the targets' logprobs."""
    grad_N1 = (grad_N / temperature)[:, None]
    if temperature != 1.0:
        logits_NV.div_(temperature)
    logits_NV.sub_(lse_N[:, None]).exp_().mul_(-grad_N1)
    logits_NV.scatter_add_(1, target_N[:, None], grad_N1)
