"""Autograd functions over the kernels: norms, rotary embedding, gating, and fused parts of a layer.

The kernels are Triton on a GPU, C on a CPU in float32, and the reference elsewhere. For its backward pass, a function
saves its inputs, but never what the same kernel can recompute. A fused part of a layer is one node of the autograd
graph instead of a dozen. Each node costs the host as much as a kernel launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from verifiers.kernels import reference
from verifiers.kernels.cpu import learning as cpu
from verifiers.kernels.cpu.build import why_none
from verifiers.kernels.cpu.learning import Segments
from verifiers.kernels.cpu.matmul import add_matmul, linear, matmul, uses_onednn, weight_gradient
from verifiers.kernels.modules import Lora, is_plain_linear, lora_of
from verifiers.kernels.norms import HeadNorms

NO_NORMS = (None, None, 0.0, 0.0)  # fields of `HeadNorms` for a layer without them


def kernels_for(x: Tensor) -> Any:
    """The kernels of the device that a tensor is on."""
    if not x.is_cuda:
        return cpu if cpu.suit(x) else reference
    from verifiers.kernels.cuda import learning

    return learning


def describe(model: Any) -> str:
    """Which kernels a model is trained with, and why faster ones cannot be used.

    >>> describe(torch.nn.Linear(2, 2).double())
    'in PyTorch (not in C: weights that are not float32)'
    """
    weight = next(model.parameters())
    if weight.is_cuda:
        return "by Triton kernels"
    if cpu.suit(weight):
        return "in C"
    if weight.device.type != "cpu":
        return f"in PyTorch (no kernels for {weight.device.type})"
    why = "weights that are not float32" if weight.dtype is not torch.float32 else why_none()
    return f"in PyTorch (not in C: {why})"


def add_norm(x_ND: Tensor, more_ND: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The sum of ``x`` and ``more`` (if given), and the RMS norm of the sum."""
    total, normed = _AddNorm.apply(x_ND, more_ND, weight, epsilon)
    return total, normed


def normed(module: Any, epsilon: float, x: Tensor) -> Tensor:
    """A module's RMS norm in one kernel: ours or PyTorch's."""
    if not cpu.suit(x):
        return reference.rms_norm(module, epsilon, x)
    result: Tensor = add_norm(x.reshape(-1, x.shape[-1]), None, module.weight, epsilon)[1]
    return result.view(x.shape)


def rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotary embedding of queries and keys ``[B, T, heads, dim]``, with angles ``[B or 1, T, dim]``.

    With ``norms``, each head is normed first.
    """
    q, k = _Rotated.apply(q, k, cos.contiguous(), sin.contiguous(), *(norms or NO_NORMS))
    return q, k


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of ``gate`` times ``up``."""
    result: Tensor = _Gated.apply(gate, up)
    return result


def projected(x: Tensor, linears: Sequence[Any]) -> tuple[Tensor, ...]:
    """Several projections of one input. The backward accumulates the input's gradient within the matrix products."""
    found: tuple[Tensor, ...]
    if are_plain(x, linears):
        if len(linears) == 1 and (x.is_cuda or not uses_onednn()):
            return (linears[0](x),)
        found = _Projected.apply(x, *_weights(linears))
        return found
    loras = [one for one in map(lora_of, linears) if one is not None]
    if len(loras) < len(linears) or not are_plain(x, [one.base for one in loras]) or _differ(x, loras):
        return tuple(one(x) for one in linears)
    matrices = [one for lora in loras for one in (lora.a_RK, lora.b_NR)]
    found = _Adapted.apply(x, [one.scale for one in loras], *_weights([one.base for one in loras]), *matrices)
    return found


def _differ(x: Tensor, loras: Sequence[Lora]) -> bool:
    """Whether any of these adapters computes in another dtype than its layer."""
    return any(not (one.a_RK.dtype is one.b_NR.dtype is one.base.weight.dtype is x.dtype) for one in loras)


def are_plain(x: Tensor, linears: Sequence[Any]) -> bool:
    """Whether these are plain linear layers and autocast is off."""
    return not torch.is_autocast_enabled(x.device.type) and all(map(is_plain_linear, linears))


def projected_heads(
    x: Tensor, weight: Tensor, epsilon: float, linears: Sequence[Any], head_dim: int, rotary: tuple[Tensor, Tensor],
    norms: HeadNorms | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """RMS norm, QKV projections and rotary embedding. Returns ``x`` and queries, keys, values ``[B, T, heads, dim]``.

    With ``norms``, each head of queries and keys is normed before it is rotated. The layers must be plain. Use the
    returned ``x`` for the residual connection, so that its gradient is added in the norm's backward.
    """
    cos, sin = (one.contiguous() for one in rotary)
    x, q, k, v = _ProjectedHeads.apply(x, weight, epsilon, head_dim, cos, sin, *(norms or NO_NORMS), *_weights(linears))
    return x, q, k, v


def fed_forward(
    x: Tensor, more: Tensor, weight: Tensor, epsilon: float, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """The sum of ``x`` and ``more``, plus the gated feed-forward (SiLU, no biases) of the sum's RMS norm."""
    result: Tensor = _FedForward.apply(x, more, weight, epsilon, gate, up, down)
    return result


def attended(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    """Attention of packed rows ``[T, heads, dim]`` in C (see `Segments`): the outputs of the segments' tokens."""
    result: Tensor = _Attended.apply(q, k, v, segments, scale)
    return result


def _weights(linears: Sequence[Any]) -> list[Tensor | None]:
    return [one for layer in linears for one in (layer.weight, layer.bias)]


def _linears(x: Tensor, weights: Sequence[Any]) -> list[Tensor]:
    """Linear layers of one input. ``weights`` alternates weights and biases."""
    return [linear(x, weight, bias) for weight, bias in zip(weights[::2], weights[1::2], strict=True)]


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


class _AddNorm(Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, more_ND: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        x_ND = x_ND.contiguous()
        total_ND, normed_ND, scale_N = kernels_for(x_ND).norm(
            x_ND, None if more_ND is None else more_ND.contiguous(), weight, epsilon
        )
        ctx.save_for_backward(total_ND, weight, scale_N)
        ctx.set_materialize_grads(False)
        ctx.adds = more_ND is not None
        return total_ND, normed_ND

    @staticmethod
    def backward(ctx: Any, residual_ND: Tensor | None, grad_ND: Tensor | None) -> tuple[Any, ...]:
        if grad_ND is None:  # the norm is unused
            return residual_ND, residual_ND if ctx.adds else None, None, None
        total_ND, weight, scale_N = ctx.saved_tensors
        residual_ND = None if residual_ND is None else residual_ND.contiguous()
        grad_ND, grad_weight = kernels_for(total_ND).norm_back(
            total_ND, weight, scale_N, residual_ND, grad_ND.contiguous(), learns=ctx.needs_input_grad[2]
        )
        return grad_ND, grad_ND if ctx.adds else None, grad_weight, None


def _rotate(kernels: Any, both: Sequence[Tensor], cos: Tensor, sin: Tensor, norms: Any) -> tuple[Any, list[Any]]:
    """Norm (if there are norms) and rotate queries and keys. Returns them and the tensors that the backward needs."""
    q, k, q_epsilon, k_epsilon = norms
    if q is None:
        return kernels.rotate(*both, cos, sin), []
    normed, saved = [], []
    for x, weight, epsilon in zip(both, (q, k), (q_epsilon, k_epsilon), strict=True):
        _, one, scale_N = kernels.norm(_flat(x), None, weight, epsilon)
        normed.append(one.view(x.shape))
        saved += [x, weight, scale_N]
    return kernels.rotate(*normed, cos, sin), saved


def _rotate_back(
    kernels: Any, grads: Sequence[Tensor], cos: Tensor, sin: Tensor, saved: Sequence[Tensor], learns: Sequence[bool]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Gradients of queries and keys, and of their norms' weights."""
    back = kernels.rotate(*(one.contiguous() for one in grads), cos, sin, back=True)
    if not saved:
        return list(back), [None, None]
    found, weights = [], []
    for grad, x, weight, scale_N, is_learned in zip(back, saved[::3], saved[1::3], saved[2::3], learns, strict=True):
        one, grad_weight = kernels.norm_back(_flat(x), weight, scale_N, None, _flat(grad), learns=is_learned)
        found.append(one.view(x.shape))
        weights.append(grad_weight)
    return found, weights


class _Rotated(Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *norms: Any) -> tuple[Tensor, Tensor]:
        rotated: tuple[Tensor, Tensor]
        rotated, saved = _rotate(kernels_for(q), (q.contiguous(), k.contiguous()), cos, sin, norms)
        ctx.save_for_backward(cos, sin, *saved)
        return rotated

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor) -> tuple[Any, ...]:
        cos, sin, *saved = ctx.saved_tensors
        back, norms = _rotate_back(kernels_for(q), (q, k), cos, sin, saved, ctx.needs_input_grad[4:6])
        return *back, None, None, *norms, None, None


class _Gated(Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        result: Tensor = kernels_for(gate).gated(gate, up)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        back: tuple[Tensor, Tensor] = kernels_for(gate).gated_back(gate, up, grad.contiguous())
        return back


class _Projected(Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor | None) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights[::2])
        return tuple(_linears(x, weights))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        total, found = _projected_back(_flat(x), weights, grads, ctx.needs_input_grad[1:], ctx.needs_input_grad[0])
        return None if total is None else total.view(x.shape), *found


def _projected_back(
    x_ND: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool], needs_x: bool
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradient of several layers' common input, and those of their weights and biases, alternating."""
    total: Tensor | None = None
    found: list[Tensor | None] = []
    for i, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
        grad_NE = _flat(grad)
        found += [
            weight_gradient(grad_NE, x_ND) if needs[2 * i] else None,
            grad_NE.sum(0) if needs[2 * i + 1] else None,
        ]
        if needs_x:
            total = matmul(grad_NE, weight) if total is None else add_matmul(total, grad_NE, weight, in_place=True)
    return total, found


class _Adapted(Function):  # type: ignore[misc]  # torch is not typed here
    """Linear layers of one input with LoRA: y + scale · (x · aᵀ) · bᵀ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: Sequence[float], *given: Any) -> tuple[Tensor, ...]:
        n, x_NK = len(scales), _flat(x)
        weights, a, b = given[: 2 * n], given[2 * n :: 2], given[2 * n + 1 :: 2]
        a_RK, ranks = torch.cat(a), [len(one) for one in a]
        t_NR = x_NK @ a_RK.t()
        ys = _linears(x, weights)
        for y, t, one, scale in zip(ys, t_NR.split(ranks, 1), b, scales, strict=True):
            y.view(-1, y.shape[-1]).addmm_(t, one.t(), alpha=scale)
        ctx.save_for_backward(x, a_RK, t_NR, *weights[::2], *b)
        ctx.scales, ctx.ranks = scales, ranks
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, a_RK, t_NR, *more = ctx.saved_tensors
        n, x_NK = len(ctx.scales), _flat(x)
        weights, b, needs = more[:n], more[n:], ctx.needs_input_grad
        total, found = _projected_back(x_NK, weights, grads, needs[2 : 2 * n + 2], needs[0])
        flat = [_flat(one) for one in grads]
        back_NR = torch.cat([grad @ one * scale for grad, one, scale in zip(flat, b, ctx.scales, strict=True)], 1)
        if total is not None:
            total.addmm_(back_NR, a_RK)
        grad_a = (back_NR.t() @ x_NK).split(ctx.ranks)
        parts = zip(flat, t_NR.split(ctx.ranks, 1), ctx.scales, strict=True)
        grad_b = [grad.t() @ t * scale for grad, t, scale in parts]
        matrices = [one for pair in zip(grad_a, grad_b, strict=True) for one in pair]
        return None if total is None else total.view(x.shape), None, *found, *matrices


class _ProjectedHeads(Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor, epsilon: float, head_dim: int, cos: Tensor, sin: Tensor,
        q_norm: Tensor | None, k_norm: Tensor | None, q_epsilon: float, k_epsilon: float, *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        kernels, x_ND = kernels_for(x), _flat(x)
        _, normed_ND, scale_N = kernels.norm(x_ND, None, norm, epsilon)
        shape = (*x.shape[:-1], -1, head_dim)
        q, k, v = (one.view(shape) for one in _linears(normed_ND, weights))
        rotated, saved = _rotate(kernels, (q, k), cos, sin, (q_norm, k_norm, q_epsilon, k_epsilon))
        ctx.save_for_backward(x_ND, normed_ND, scale_N, norm, cos, sin, *weights[::2], *saved)
        return x, *rotated, v

    @staticmethod
    def backward(ctx: Any, residual: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        x_ND, normed_ND, scale_N, norm, cos, sin, *more = ctx.saved_tensors
        kernels, weights, saved = kernels_for(x_ND), more[:3], more[3:]
        (q, k), head_norms = _rotate_back(kernels, (q, k), cos, sin, saved, ctx.needs_input_grad[6:8])
        grads = [one.flatten(-2) for one in (q, k, v)]
        total_ND, found = _projected_back(normed_ND, weights, grads, ctx.needs_input_grad[10:], needs_x=True)
        total_ND, grad_norm = kernels.norm_back(
            x_ND, norm, scale_N, _flat(residual), total_ND, learns=ctx.needs_input_grad[1]
        )
        return total_ND.view(residual.shape), grad_norm, None, None, None, None, *head_norms, None, None, *found


class _FedForward(Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, more: Tensor, norm: Tensor, epsilon: float, gate: Tensor, up: Tensor, down: Tensor
    ) -> Tensor:
        kernels = kernels_for(x)
        total_ND, normed_ND, scale_N = kernels.norm(_flat(x), _flat(more), norm, epsilon)
        gate_NE, up_NE = linear(normed_ND, gate), linear(normed_ND, up)
        product_NE = kernels.gated(gate_NE, up_NE)
        ctx.save_for_backward(total_ND, normed_ND, scale_N, gate_NE, up_NE, product_NE, norm, gate, up, down)
        return add_matmul(total_ND, product_NE, down.t()).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        total_ND, normed_ND, scale_N, gate_NE, up_NE, product_NE, norm, gate, up, down = ctx.saved_tensors
        kernels, grad_ND = kernels_for(grad), _flat(grad)
        _, _, learns_norm, _, *learns = ctx.needs_input_grad
        both = kernels.gated_back(gate_NE, up_NE, matmul(grad_ND, down))
        needs = (learns[0], False, learns[1], False)
        back_ND, (grad_gate, _, grad_up, _) = _projected_back(normed_ND, (gate, up), both, needs, needs_x=True)
        grad_down = weight_gradient(grad_ND, product_NE) if learns[2] else None
        back_ND, grad_norm = kernels.norm_back(total_ND, norm, scale_N, grad_ND, back_ND, learns=learns_norm)
        back = back_ND.view(grad.shape)
        return back, back, grad_norm, None, grad_gate, grad_up, grad_down


class _Attended(Function):  # type: ignore[misc]  # torch is not typed here
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, sums = cpu.attend(q, k, v, segments, scale)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        back = cpu.attend_back(q, k, v, ctx.segments, ctx.scale, out, sums, grad.contiguous())
        return *back, None, None
