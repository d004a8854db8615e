"""What lies between the multiplications of a layer that learns, by learn.c: as `reference`, and attention too.

Tensors are contiguous and in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verifiers.kernels.cpu.binding import learn_functions

FEW_THREADS = 2  # of PyTorch's: with more of them, its operations overtake functions that run on one


def suit(x: Tensor) -> bool:
    """Are these the kernels for such a tensor?"""
    is_known = x.dtype is torch.float32 and x.device.type == "cpu"
    return is_known and torch.get_num_threads() <= FEW_THREADS and learn_functions() is not None


def unsuited() -> str:
    """Why float32 on a CPU is not computed here."""
    return "no C compiler" if learn_functions() is None else f"more than {FEW_THREADS} threads"


def norm(x_ND: Tensor, more_ND: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """RMS norm of ``x`` (plus ``more``): the sum, its norm, and by how much each row was scaled."""
    total_ND = x_ND if more_ND is None else torch.empty_like(x_ND)
    normed_ND, scale_N = torch.empty_like(x_ND), x_ND.new_empty(len(x_ND))
    weight = _ready(weight)
    learn_functions().norm(
        *x_ND.shape, x_ND.data_ptr(), _at(more_ND), weight.data_ptr(), epsilon,
        total_ND.data_ptr(), normed_ND.data_ptr(), scale_N.data_ptr(),
    )  # fmt: skip
    return total_ND, normed_ND, scale_N


def norm_back(
    x_ND: Tensor, weight: Tensor, scale_N: Tensor, past_ND: Tensor | None, grad_ND: Tensor, *, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of what was normed and of the weight; ``past`` is the gradient that goes past the norm."""
    back_ND, grad_weight = torch.empty_like(x_ND), x_ND.new_empty(x_ND.shape[1]) if learns else None
    weight = _ready(weight)
    learn_functions().norm_back(
        *x_ND.shape, x_ND.data_ptr(), weight.data_ptr(), scale_N.data_ptr(), _at(past_ND), grad_ND.data_ptr(),
        back_ND.data_ptr(), _at(grad_weight),
    )  # fmt: skip
    return back_ND, grad_weight


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
    """Rotary embedding of queries and keys ``[B, T, heads, dim]``, by angles ``[B or 1, T, dim]``; or its transpose."""
    turned = torch.empty_like(q), torch.empty_like(k)
    cos, sin = _ready(cos), _ready(sin)
    for x, y in zip((q, k), turned, strict=True):
        heads, dim = x.shape[2:]
        learn_functions().rotate(
            x.shape[0] * x.shape[1], heads, dim, x.data_ptr(), y.data_ptr(),
            cos.numel() // dim, cos.data_ptr(), sin.data_ptr(), back,
        )  # fmt: skip
    return turned


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of ``gate`` times ``up``."""
    product = torch.empty_like(gate)
    learn_functions().gated(gate.numel(), gate.data_ptr(), up.data_ptr(), product.data_ptr())
    return product


def gated_back(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``gate`` and ``up``, given that of SiLU of ``gate`` times ``up``."""
    back = torch.empty_like(gate), torch.empty_like(up)
    learn_functions().gated_back(
        gate.numel(), gate.data_ptr(), up.data_ptr(), grad.data_ptr(), back[0].data_ptr(), back[1].data_ptr()
    )
    return back


def pick(logits_NV: Tensor, target_N: Tensor, temperature: float, logprob_N: Tensor, mass_N: Tensor) -> None:
    """Write each target's logprob, and the logarithm of the mass of its row."""
    n, words = logits_NV.shape
    wrong = learn_functions().pick(
        n, words, logits_NV.data_ptr(), target_N.data_ptr(), temperature, logprob_N.data_ptr(), mass_N.data_ptr()
    )
    if wrong >= 0:
        raise IndexError(f"token {int(target_N[wrong])} is trained on, but the model has {words} tokens only")


def pick_back_(logits_NV: Tensor, target_N: Tensor, temperature: float, mass_N: Tensor, grad_N: Tensor) -> None:
    """Turn logits into their gradients, in place, given those of the targets' logprobs."""
    learn_functions().pick_back(
        *logits_NV.shape, logits_NV.data_ptr(), target_N.data_ptr(), temperature, mass_N.data_ptr(), grad_N.data_ptr()
    )


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Segments of a packed row, end to end: each attends to an earlier range of tokens and, causally, to itself.

    A segment is four numbers: its first token and how many it has, the first token of that range and how many it has.
    """

    segments_S4: Tensor
    first: int  # token of the first segment
    most_keys: int  # that a token attends to


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of all tokens that are in segments ``[T, heads, dim]``; and what the way back needs of their scores."""
    tokens, heads, dim = q.shape
    out = q.new_empty((tokens - segments.first, heads, dim))
    sums = q.new_empty((2, tokens - segments.first, heads))
    room = q.new_empty(learn_functions().attention_room(segments.most_keys, dim))
    learn_functions().attention(
        len(segments.segments_S4), segments.segments_S4.data_ptr(), k.shape[1], heads // k.shape[1], dim, scale,
        *(one.data_ptr() for one in (q, k, v, out, sums, room)),
    )  # fmt: skip
    return out, sums


def attend_back(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, out: Tensor, sums: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values."""
    back = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    room = q.new_empty(learn_functions().attention_room(segments.most_keys, q.shape[-1]))
    learn_functions().attention_back(
        len(segments.segments_S4), segments.segments_S4.data_ptr(), k.shape[1], q.shape[1] // k.shape[1], q.shape[2],
        scale,
        *(one.data_ptr() for one in (q, k, v, out, sums, grad, *back, room)),
    )  # fmt: skip
    return back


def _at(x: Tensor | None) -> int | None:
    return None if x is None else int(x.data_ptr())


def _ready(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float32 and x.is_contiguous() else x.float().contiguous()
