"""The training functions of `reference`, and attention of packed rows, in C (learn.c): a layer without matrix products.

Tensors are contiguous and float32. Work is split by rows (attention: by kv heads) among as many threads as PyTorch
uses, with at least GRAIN numbers each, as in PyTorch. The number of threads affects only the gradient of a norm's
weight, which is summed from parts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verifiers.kernels.cpu.binding import learn_functions
from verifiers.kernels.cpu.threads import ThreadTeam

GRAIN = 1 << 15  # numbers: PyTorch's own grain size


def suit(x: Tensor) -> bool:
    """Whether these kernels can process this tensor."""
    return x.dtype is torch.float32 and x.device.type == "cpu" and learn_functions() is not None


class _Teams(threading.local):
    """One team per thread that trains, so that two threads that train do not wait for each other."""

    team: ThreadTeam | None = None


_teams = _Teams()


def _split(n: int, numbers: int, work: Callable[[int, int], object]) -> list[tuple[int, int]]:
    """Call ``work(first, end)`` for parts of ``n`` rows in parallel; returns the parts.

    ``numbers`` is the total of floats in all rows.
    """
    parts = max(1, min(int(torch.get_num_threads()), numbers // GRAIN, n))
    if parts == 1:
        work(0, n)
        return [(0, n)]
    if _teams.team is None or _teams.team.parts < parts:
        _teams.team = ThreadTeam(int(torch.get_num_threads()))
    parts = min(parts, _teams.team.parts)
    bounds = [(n * i // parts, n * (i + 1) // parts) for i in range(parts)]
    _teams.team.share([partial(work, first, end) for first, end in bounds])
    return bounds


def _by_rows(function: Any, n: int, numbers: int, *given: Any) -> dict[int, Any]:
    """Call a C function with parts of ``n`` rows in parallel. Returns its results by the first row of each part.

    Its arguments are the number of rows, then ``given``. A ``(tensor, width)`` becomes a pointer to the part's first
    row.
    """
    found = {}

    def work(first: int, end: int) -> None:
        at = (_at(one[0], first * one[1]) if isinstance(one, tuple) else one for one in given)
        found[first] = function(end - first, *at)

    _split(n, numbers, work)
    return found


def norm(x_ND: Tensor, more_ND: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """RMS norm of ``x`` (plus ``more``): the sum, its norm, and the inverse RMS of each row."""
    total_ND = x_ND if more_ND is None else torch.empty_like(x_ND)
    normed_ND, scale_N = torch.empty_like(x_ND), x_ND.new_empty(len(x_ND))
    weight, width = _ready(weight), x_ND.shape[1]
    _by_rows(
        learn_functions().norm, len(x_ND), x_ND.numel(), width, (x_ND, width), (more_ND, width), _at(weight), epsilon,
        (total_ND, width), (normed_ND, width), (scale_N, 1),
    )  # fmt: skip
    return total_ND, normed_ND, scale_N


def norm_back(
    x_ND: Tensor, weight: Tensor, scale_N: Tensor, residual_ND: Tensor | None, grad_ND: Tensor, *, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the input and the weight. Adds ``residual_ND``, the gradient of the residual connection."""
    back_ND, weight, width = torch.empty_like(x_ND), _ready(weight), x_ND.shape[1]
    function, grads = learn_functions().norm_back, {}  # grads: gradients of the weight by the first row of a part

    def work(first: int, end: int) -> None:
        grads[first] = x_ND.new_empty(width) if learns else None
        function(
            end - first, width, _at(x_ND, first * width), _at(weight), _at(scale_N, first),
            _at(residual_ND, first * width), _at(grad_ND, first * width), _at(back_ND, first * width),
            _at(grads[first]),
        )  # fmt: skip

    (first, _), *others = _split(len(x_ND), x_ND.numel(), work)
    grad_weight: Tensor | None = grads[first]
    for part, _ in others:
        grad_weight = grad_weight.add_(grads[part]) if grad_weight is not None else None
    return back_ND, grad_weight


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
    """Rotary embedding of queries and keys ``[B, T, heads, dim]`` by angles ``[B or 1, T, dim]``, or its backward."""
    angles = _ready(cos), _ready(sin)
    return _rotated(q, *angles, back), _rotated(k, *angles, back)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    y, function = torch.empty_like(x), learn_functions().rotate
    batch, length, heads, dim = x.shape
    # If all sequences have the same angles, split the batch between sequences, so that each part begins at angle 0.
    tokens, is_common = batch * length, cos.numel() < batch * length * dim
    piece = length if is_common else 1

    def work(first: int, end: int) -> None:
        n, at, angle = (end - first) * piece, first * piece * heads * dim, 0 if is_common else first * dim
        function(
            n, heads, dim, _at(x, at), _at(y, at), length if is_common else n, _at(cos, angle), _at(sin, angle), back
        )

    _split(tokens // piece, x.numel(), work)
    return y


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of ``gate`` times ``up``."""
    product, n = torch.empty_like(gate), gate.numel()
    _by_rows(learn_functions().gated, n, n, (gate, 1), (up, 1), (product, 1))
    return product


def gated_back(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``gate`` and ``up``, given the gradient of SiLU of ``gate`` times ``up``."""
    back, n = (torch.empty_like(gate), torch.empty_like(up)), gate.numel()
    _by_rows(learn_functions().gated_back, n, n, *((one, 1) for one in (gate, up, grad, *back)))
    return back


def logprobs(logits_NV: Tensor, target_N: Tensor, temperature: float, logprob_N: Tensor, lse_N: Tensor) -> None:
    """Write the logprob of each row's target, and the logsumexp of the row."""
    n, words = logits_NV.shape
    wrong = _by_rows(
        learn_functions().logprobs, n, logits_NV.numel(), words, (logits_NV, words), (target_N, 1), temperature,
        (logprob_N, 1), (lse_N, 1),
    )  # fmt: skip
    for first, row in wrong.items():
        if row >= 0:
            token = int(target_N[first + row])
            raise IndexError(f"cannot train on token {token}: the model's vocabulary has {words} tokens")


def logprobs_back_(logits_NV: Tensor, target_N: Tensor, temperature: float, lse_N: Tensor, grad_N: Tensor) -> None:
    """Replace logits by their gradients, in place, given the gradients of the targets' logprobs."""
    n, words = logits_NV.shape
    _by_rows(
        learn_functions().logprobs_back, n, logits_NV.numel(), words, (logits_NV, words), (target_N, 1), temperature,
        (lse_N, 1), (grad_N, 1),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Consecutive segments of a packed row. Each attends causally to itself, and to its prefix, an earlier range.

    A segment is four numbers: its first token and length, and the first token and length of its prefix.
    """

    segments_S4: Tensor
    first: int  # first token of the first segment
    most_keys: int  # maximum number of keys that a token attends to


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of the segments' tokens ``[T, heads, dim]``, and the softmax statistics that the backward needs."""
    tokens, heads, dim = q.shape
    out = q.new_empty((tokens - segments.first, heads, dim))
    sums = q.new_empty((2, tokens - segments.first, heads))
    _by_groups(learn_functions().attention, segments, scale, q, k, (q, k, v, out, sums))
    return out, sums


def attend_back(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, out: Tensor, sums: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values."""
    back = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    _by_groups(learn_functions().attention_back, segments, scale, q, k, (q, k, v, out, sums, grad, *back))
    return back


def _by_groups(
    function: Any, segments: Segments, scale: float, q: Tensor, k: Tensor, given: tuple[Tensor, ...]
) -> None:
    groups, share, dim = k.shape[1], q.shape[1] // k.shape[1], q.shape[2]
    floats = learn_functions().attention_workspace(segments.most_keys, dim)

    def work(first: int, end: int) -> None:
        workspace = q.new_empty(floats)
        function(
            len(segments.segments_S4), _at(segments.segments_S4), groups, share, dim, scale, first, end,
            *map(_at, given), _at(workspace),
        )  # fmt: skip

    _split(groups, q.numel(), work)


def _at(x: Tensor | None, first: int = 0) -> int | None:
    """A pointer to the element of a tensor with the index ``first``."""
    return None if x is None else int(x.data_ptr()) + first * x.element_size()


def _ready(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float32 and x.is_contiguous() else x.float().contiguous()
