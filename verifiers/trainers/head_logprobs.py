"""Hidden states and a head become the logprob of each target, with a chunk of logits alive at a time, and a way back.

One sweep over the logits gives the logprobs, another turns them into their own gradients, in place: by kernels of our
own, or plain operations.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from verifiers.kernels.autograd import kernels_for

CHUNK_BYTES = {"cuda": 2 << 30}  # logits alive at once
CHUNK_BYTES_ELSEWHERE = 1 << 30


def picked(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor, temperature: float = 1.0
) -> Tensor:
    """The logprob of each target under softmax(hidden · weightᵀ + bias), whose logits are held a chunk at a time."""
    result: Tensor = _Picked.apply(hidden_ND, weight_VD, bias_V, target_N, temperature, torch.is_grad_enabled())
    return result


class _Picked(Function):  # type: ignore[misc]  # torch is not typed here
    """Logits are computed again on the way back, but for the last chunk's: they are there, and are the first needed."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor, temperature: float,
        keeps: bool,
    ) -> Tensor:  # fmt: skip
        n = len(hidden_ND)
        logprob_N, mass_N = (torch.empty(n, dtype=torch.float32, device=hidden_ND.device) for _ in range(2))
        most_bytes = CHUNK_BYTES.get(hidden_ND.device.type, CHUNK_BYTES_ELSEWHERE)
        chunks = chunks_of(n, weight_VD.shape[0] * weight_VD.element_size(), most_bytes)
        last_NV = None
        for part in chunks:
            last_NV = functional.linear(hidden_ND[part], weight_VD, bias_V)
            kernels_for(last_NV).pick(last_NV, target_N[part], temperature, logprob_N[part], mass_N[part])
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
            kernels_for(grad_NV).pick_back_(grad_NV, target_N[part], ctx.temperature, mass_N[part], grad_N[part])
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


def chunks_of(n: int, bytes_each: int, most_bytes: int) -> list[slice]:
    """``n`` rows in parts of about the same size, none of which takes more than so many bytes.

    >>> chunks_of(10, 25, 100)
    [slice(0, 4, None), slice(4, 8, None), slice(8, 10, None)]
    """
    most = max(1, most_bytes // bytes_each)
    step = max(1, math.ceil(n / math.ceil(n / most))) if n else 1
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]
