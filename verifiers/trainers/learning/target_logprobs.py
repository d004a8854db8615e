"""Computes the logprob of each target from hidden states and an lm_head, one chunk of logits at a time.

`fused_logprobs` computes the logprobs in one pass over a chunk of logits; a second pass overwrites the logits with
their gradients. `chunked_logprobs` supports any head, any distribution, and entropies; it recomputes chunks in the
backward pass.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from verifiers.engine.sequence import NO_TOP_K
from verifiers.kernels.autograd import kernels_for
from verifiers.kernels.cpu.matmul import linear, matmul, weight_gradient
from verifiers.kernels.sampling import SamplingColumns, truncate
from verifiers.trainers.memory.plan import CHUNK_BYTES, CHUNK_BYTES_ELSEWHERE
from verifiers.trainers.sampling import Distribution

FREE_LOGITS = 1 << 24  # up to this number (64 MiB in float32), logits are kept for the backward pass, not recomputed
NARROWED_COPIES = 4  # copies of the logits for a bias, a truncation or an entropy: probabilities, sorted, masked


def chunks_of(n: int, bytes_each: int, device: torch.device, rows: int | None = None) -> list[slice]:
    """Slices of ``n`` positions: of ``rows`` each, or about equally large with at most `CHUNK_BYTES` of logits."""
    most = max(1, CHUNK_BYTES.get(device.type, CHUNK_BYTES_ELSEWHERE) // bytes_each)
    step = rows or max(1, math.ceil(n / math.ceil(n / most))) if n else 1
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


class Scored(NamedTuple):
    """The logprob of each target and, on request, the entropy (in nats) of the distribution it was sampled from."""

    logprob_N: Tensor
    entropy_N: Tensor | None = None
    recomputes: bool = False  # whether the backward pass runs the head again


def chunked_logprobs(
    head: Any, hidden_ND: Tensor, target_N: Tensor, drawn_from: Distribution, *, with_entropy: bool = False,
    rows: int | None = None,
) -> Scored:  # fmt: skip
    """`score_logits` of the head's logits, with only one chunk (of ``rows`` rows) in memory at a time."""

    def score(hidden_ND: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor | None]:
        return score_logits(head(hidden_ND), target_N, drawn_from, with_entropy=with_entropy)[:2]

    n, vocabulary = len(hidden_ND), getattr(head, "out_features", None) or head.weight.shape[0]
    copies = 1 if drawn_from.is_tempered and not with_entropy else NARROWED_COPIES
    if rows is None and n * vocabulary * copies <= FREE_LOGITS:
        return Scored(*score(hidden_ND, target_N))
    parts = []
    for part in chunks_of(n, vocabulary * copies * 4, hidden_ND.device, rows):
        given = hidden_ND[part], target_N[part]
        parts.append(checkpoint(score, *given, use_reentrant=False) if torch.is_grad_enabled() else score(*given))
    logprobs, entropies = zip(*parts, strict=True)
    return Scored(torch.cat(logprobs), torch.cat(entropies) if with_entropy else None, recomputes=True)


def score_logits(
    logits_NV: Tensor, target_N: Tensor, drawn_from: Distribution, *, with_entropy: bool = False
) -> Scored:
    """Logprobs under the distribution of the sampler (bias, temperature, truncation), computed as in the sampler.

    The target is never truncated, even if the current policy would truncate it. Without truncation there may be several
    targets at each position (target_NK).
    """
    scaled_NV = logits_NV.float()
    if drawn_from.logit_bias:
        tokens, values = zip(*drawn_from.logit_bias, strict=True)
        bias = torch.tensor(values, device=logits_NV.device)
        scaled_NV = scaled_NV.index_add(
            1, torch.tensor(tokens, device=logits_NV.device), bias.expand(len(logits_NV), -1)
        )
    if drawn_from.temperature != 1.0:
        scaled_NV = scaled_NV / drawn_from.temperature
    if drawn_from.truncates:
        scaled_NV = scaled_NV.masked_fill(_left_out(scaled_NV.detach(), target_N, drawn_from), -torch.inf)
    if target_N.ndim > 1:
        logprob_N = scaled_NV.gather(1, target_N) - scaled_NV.logsumexp(1, keepdim=True)
    elif scaled_NV.device.type == "cpu":
        logprob_N = _TargetLogprobs.apply(scaled_NV.contiguous(), target_N)
    else:
        logprob_N = -functional.cross_entropy(scaled_NV, target_N, reduction="none")
    return Scored(logprob_N, _entropy(scaled_NV) if with_entropy else None)


class _TargetLogprobs(Function):  # type: ignore[misc]  # torch is not typed here
    """Logprobs of targets on a CPU. Those of PyTorch are 1e-5 too high for a large vocabulary: it sums probabilities
    in float32 one after the other, which loses unlikely tokens."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor) -> Tensor:
        logprob_N, mass_N = (logits_NV.new_empty(len(logits_NV)) for _ in range(2))
        kernels_for(logits_NV).logprobs(logits_NV, target_N, 1.0, logprob_N, mass_N)
        ctx.save_for_backward(logits_NV, target_N, mass_N)
        return logprob_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Any, ...]:
        logits_NV, target_N, mass_N = ctx.saved_tensors
        grad_NV = logits_NV.clone()
        kernels_for(grad_NV).logprobs_back_(grad_NV, target_N, 1.0, mass_N, grad_N.contiguous())
        return grad_NV, None


def _entropy(scaled_NV: Tensor) -> Tensor:
    logprob_NV = functional.log_softmax(scaled_NV, -1)
    probability_NV = logprob_NV.exp()
    return -(probability_NV * logprob_NV.masked_fill(logprob_NV == -torch.inf, 0.0)).sum(-1)


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not typed here
def _left_out(scaled_NV: Tensor, target_N: Tensor, drawn_from: Distribution) -> Tensor:
    """Which tokens are truncated (never the target); without a gradient."""

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


def fused_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor, temperature: float = 1.0,
    rows: int | None = None,
) -> Tensor:  # fmt: skip
    """The logprob of each target under softmax(hidden · weightᵀ + bias), with one chunk of logits in memory."""
    chunks = chunks_of(len(hidden_ND), weight_VD.shape[0] * weight_VD.element_size(), hidden_ND.device, rows)
    result: Tensor = _FusedLogprobs.apply(
        hidden_ND, weight_VD, bias_V, target_N, temperature, chunks, torch.is_grad_enabled()
    )
    return result


class _FusedLogprobs(Function):  # type: ignore[misc]  # torch is not typed here
    """The backward pass recomputes the logits, except those of the last chunk, which it needs first."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor, temperature: float,
        chunks: list[slice], keeps: bool,
    ) -> Tensor:  # fmt: skip
        n = len(hidden_ND)
        logprob_N, mass_N = (torch.empty(n, dtype=torch.float32, device=hidden_ND.device) for _ in range(2))
        last_NV = None
        for part in chunks:
            last_NV = linear(hidden_ND[part], weight_VD, bias_V)
            kernels_for(last_NV).logprobs(last_NV, target_N[part], temperature, logprob_N[part], mass_N[part])
        if keeps:
            ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, mass_N)
            ctx.temperature, ctx.chunks, ctx.last_NV = temperature, chunks, last_NV
        return logprob_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Any, ...]:
        hidden_ND, weight_VD, bias_V, target_N, mass_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_N = grad_N.contiguous()
        grad_hidden = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        for part in reversed(ctx.chunks):
            grad_NV, ctx.last_NV = ctx.last_NV, None
            if grad_NV is None:
                grad_NV = linear(hidden_ND[part], weight_VD, bias_V)
            kernels_for(grad_NV).logprobs_back_(grad_NV, target_N[part], ctx.temperature, mass_N[part], grad_N[part])
            if grad_hidden is not None:
                matmul(grad_NV, weight_VD, out=grad_hidden[part])
            if needs_weight:
                grad_weight = _added(grad_weight, weight_gradient(grad_NV, hidden_ND[part]))
            if needs_bias:
                grad_bias = _added(grad_bias, grad_NV.sum(0))
        whole = (None if one is None else one.to(weight_VD.dtype) for one in (grad_weight, grad_bias))
        return grad_hidden, *whole, None, None, None, None


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    """Add a chunk to the total, in float32."""
    return part if total is None else total.float().add_(part)
