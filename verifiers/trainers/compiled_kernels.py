"""What our kernels for CUDA do, by compiled functions: for learning on a CPU, in one sweep each, and attention too.

Tensors are contiguous and in float32.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verifiers.engine.compiled import library

SOURCE = Path(__file__).with_name("learn.c")
FEW_THREADS = 2  # of PyTorch's: with more of them, its operations overtake functions that run on one

_WHOLE, _NUMBER, _AT = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_ARGUMENTS: dict[str, list[Any]] = {
    "norm": [_WHOLE, _WHOLE, _AT, _AT, _AT, _NUMBER, _AT, _AT, _AT],
    "norm_back": [_WHOLE, _WHOLE, *[_AT] * 7],
    "rotate": [_WHOLE, _WHOLE, _WHOLE, _AT, _AT, _WHOLE, _AT, _AT, ctypes.c_int],
    "gated": [_WHOLE, *[_AT] * 3],
    "gated_back": [_WHOLE, *[_AT] * 5],
    "pick": [_WHOLE, _WHOLE, _AT, _AT, _NUMBER, _AT, _AT],
    "pick_back": [_WHOLE, _WHOLE, _AT, _AT, _NUMBER, _AT, _AT],
    "attention_room": [_WHOLE, _WHOLE],
    "attention": [_WHOLE, _AT, _WHOLE, _WHOLE, _WHOLE, _NUMBER, *[_AT] * 6],
    "attention_back": [_WHOLE, _AT, _WHOLE, _WHOLE, _WHOLE, _NUMBER, *[_AT] * 10],
}


@cache
def functions() -> Any:
    """The compiled functions; None where there is no compiler."""
    found = library(SOURCE)
    if found is not None:
        for name, arguments in _ARGUMENTS.items():
            getattr(found, name).argtypes = arguments
            getattr(found, name).restype = _WHOLE if name in ("pick", "attention_room") else None
    return found


def suit(x: Tensor) -> bool:
    """Are these the kernels for such a tensor?"""
    is_known = x.dtype is torch.float32 and x.device.type == "cpu"
    return is_known and torch.get_num_threads() <= FEW_THREADS and functions() is not None


def norm(x_ND: Tensor, more_ND: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """RMS norm of ``x`` (plus ``more``): the sum, its norm, and by how much each row was scaled."""
    total_ND = x_ND if more_ND is None else torch.empty_like(x_ND)
    normed_ND, scale_N = torch.empty_like(x_ND), x_ND.new_empty(len(x_ND))
    weight = _ready(weight)
    functions().norm(
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
    functions().norm_back(
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
        functions().rotate(
            x.shape[0] * x.shape[1], heads, dim, x.data_ptr(), y.data_ptr(),
            cos.numel() // dim, cos.data_ptr(), sin.data_ptr(), back,
        )  # fmt: skip
    return turned


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of ``gate`` times ``up``."""
    product = torch.empty_like(gate)
    functions().gated(gate.numel(), gate.data_ptr(), up.data_ptr(), product.data_ptr())
    return product


def gated_back(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``gate`` and ``up``, given that of SiLU of ``gate`` times ``up``."""
    back = torch.empty_like(gate), torch.empty_like(up)
    functions().gated_back(
        gate.numel(), gate.data_ptr(), up.data_ptr(), grad.data_ptr(), back[0].data_ptr(), back[1].data_ptr()
    )
    return back


def pick(logits_NV: Tensor, target_N: Tensor, temperature: float, logprob_N: Tensor, mass_N: Tensor) -> None:
    """Write each target's logprob, and the logarithm of the mass of its row."""
    n, words = logits_NV.shape
    wrong = functions().pick(
        n, words, logits_NV.data_ptr(), target_N.data_ptr(), temperature, logprob_N.data_ptr(), mass_N.data_ptr()
    )
    if wrong >= 0:
        raise IndexError(f"token {int(target_N[wrong])} is trained on, but the model has {words} tokens only")


def pick_back_(logits_NV: Tensor, target_N: Tensor, temperature: float, mass_N: Tensor, grad_N: Tensor) -> None:
    """Turn logits into their gradients, in place, given those of the targets' logprobs."""
    functions().pick_back(
        *logits_NV.shape, logits_NV.data_ptr(), target_N.data_ptr(), temperature, mass_N.data_ptr(), grad_N.data_ptr()
    )


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of tokens, end to end up to the last: those of each, and those before it, wherever these are.

    A run is four numbers: its first token, how many there are, the first of those that it sees before, and how many.
    """

    runs_R4: Tensor
    first: int  # token of the first run
    most_keys: int  # that a token sees


def attend(q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of all tokens that are in runs ``[T, heads, dim]``; and what the way back needs of their scores."""
    tokens, heads, dim = q.shape
    out = q.new_empty((tokens - runs.first, heads, dim))
    sums = q.new_empty((2, tokens - runs.first, heads))
    room = q.new_empty(functions().attention_room(runs.most_keys, dim))
    functions().attention(
        len(runs.runs_R4), runs.runs_R4.data_ptr(), k.shape[1], heads // k.shape[1], dim, scale,
        *(one.data_ptr() for one in (q, k, v, out, sums, room)),
    )  # fmt: skip
    return out, sums


def attend_back(
    q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float, out: Tensor, sums: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values."""
    back = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    room = q.new_empty(functions().attention_room(runs.most_keys, q.shape[-1]))
    functions().attention_back(
        len(runs.runs_R4), runs.runs_R4.data_ptr(), k.shape[1], q.shape[1] // k.shape[1], q.shape[2], scale,
        *(one.data_ptr() for one in (q, k, v, out, sums, grad, *back, room)),
    )  # fmt: skip
    return back


def _at(x: Tensor | None) -> int | None:
    return None if x is None else int(x.data_ptr())


def _ready(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float32 and x.is_contiguous() else x.float().contiguous()
