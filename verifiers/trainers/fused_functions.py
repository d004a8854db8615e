"""Kernels become functions that autograd can go back through: norms, rotary embedding, gating, logprobs of a head.

All of them want tensors on a card. What a function keeps for its way back is what it was given, never what it can
compute again in the same sweep.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from verifiers.engine.kernels import gated as gated_kernel
from verifiers.trainers import training_kernels as kernels

CHUNK_BYTES = 2 << 30  # logits alive at once


def add_norm(x_ND: Tensor, more_ND: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """``x`` plus ``more`` (if there is more), and the RMS norm of that."""
    total, normed = _AddNorm.apply(x_ND, more_ND, weight, epsilon)
    return total, normed


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of queries and keys ``[B, T, heads, dim]``, by angles ``[B or 1, T, dim]``."""
    q, k = _Rotated.apply(q, k, cos.contiguous(), sin.contiguous())
    return q, k


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of ``gate`` times ``up``."""
    result: Tensor = _Gated.apply(gate, up)
    return result


def picked(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor, temperature: float = 1.0
) -> Tensor:
    """The logprob of each target under softmax(hidden · weightᵀ + bias), whose logits are held a chunk at a time."""
    result: Tensor = _Picked.apply(hidden_ND, weight_VD, bias_V, target_N, temperature, torch.is_grad_enabled())
    return result


class _AddNorm(Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, more_ND: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        x_ND = x_ND.contiguous()
        total_ND, normed_ND, scale_N = kernels.norm(
            x_ND, None if more_ND is None else more_ND.contiguous(), weight, epsilon
        )
        ctx.save_for_backward(total_ND, weight, scale_N)
        ctx.set_materialize_grads(False)
        ctx.adds = more_ND is not None
        return total_ND, normed_ND

    @staticmethod
    def backward(ctx: Any, past_ND: Tensor | None, grad_ND: Tensor | None) -> tuple[Any, ...]:
        if grad_ND is None:  # nobody used the norm
            return past_ND, past_ND if ctx.adds else None, None, None
        total_ND, weight, scale_N = ctx.saved_tensors
        past_ND = None if past_ND is None else past_ND.contiguous()
        grad_ND, grad_weight = kernels.norm_back(
            total_ND, weight, scale_N, past_ND, grad_ND.contiguous(), learns=ctx.needs_input_grad[2]
        )
        return grad_ND, grad_ND if ctx.adds else None, grad_weight, None


class _Rotated(Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return kernels.rotate(q.contiguous(), k.contiguous(), cos, sin)

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor) -> tuple[Any, ...]:
        return *kernels.rotate(q.contiguous(), k.contiguous(), *ctx.saved_tensors, back=True), None, None


class _Gated(Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return gated_kernel(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        return kernels.gated_back(gate, up, grad.contiguous())


class _Picked(Function):  # type: ignore[misc]  # torch is not typed here
    """Logits are computed again on the way back, but for the last chunk's: they are there, and are the first needed."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor, temperature: float,
        keeps: bool,
    ) -> Tensor:  # fmt: skip
        n = len(hidden_ND)
        logprob_N, mass_N = (torch.empty(n, dtype=torch.float32, device=hidden_ND.device) for _ in range(2))
        chunks = chunks_of(n, weight_VD.shape[0] * weight_VD.element_size())
        last_NV = None
        for part in chunks:
            last_NV = functional.linear(hidden_ND[part], weight_VD, bias_V)
            kernels.pick(last_NV, target_N[part], temperature, logprob_N[part], mass_N[part])
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
        weight_parts, bias_parts = _Sum(), _Sum()
        for part in reversed(ctx.chunks):
            grad_NV, ctx.last_NV = ctx.last_NV, None
            if grad_NV is None:
                grad_NV = functional.linear(hidden_ND[part], weight_VD, bias_V)
            kernels.pick_back_(grad_NV, target_N[part], ctx.temperature, mass_N[part], grad_N[part])
            if grad_hidden is not None:
                torch.mm(grad_NV, weight_VD, out=grad_hidden[part])
            if needs_weight:
                weight_parts.add(grad_NV.t() @ hidden_ND[part])
            if needs_bias:
                bias_parts.add(grad_NV.sum(0))
        return grad_hidden, weight_parts.total, bias_parts.total, None, None, None


class _Sum:
    """Tensors added up in float32, and given back in the type they came in."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._dtype = torch.float32

    def add(self, part: Tensor) -> None:
        self._dtype = part.dtype
        self._sum = part if self._sum is None else self._sum.float().add_(part)

    @property
    def total(self) -> Tensor | None:
        return None if self._sum is None else self._sum.to(self._dtype)


def chunks_of(n: int, bytes_each: int) -> list[slice]:
    """``n`` rows in parts of about the same size, none of which takes more than the bytes that may be alive at once.

    >>> chunks_of(10, CHUNK_BYTES // 4)
    [slice(0, 4, None), slice(4, 8, None), slice(8, 10, None)]
    """
    most = max(1, CHUNK_BYTES // bytes_each)
    step = max(1, math.ceil(n / math.ceil(n / most))) if n else 1
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]
