"""Several projections of one input in one CUDA launch, if timing shows that this is faster than cuBLAS.

In a decode step of a small model, the matrices are so small that a launch takes as long as the product. Weights are
read in place, not concatenated.

The choice is not based on sizes, because cuBLAS selects its kernel and split-K by rows, sizes, GPU and version, so no
rule would hold for all of them. Both variants are timed once per set of sizes and number of rows, during the warm-up of
a step's CUDA graph. Their results agree up to rounding. Sizes that were not timed run as plain projections.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from verifiers.kernels.cpu import matmul
from verifiers.kernels.modules import Lora, has_hooks, is_hooked, is_plain_linear, lora_of

T = TypeVar("T")

MOST_ROWS = 2048  # with more rows, a product takes much longer than a launch
MOST_RANK = 128  # of adapters
TILE = 64  # the kernels need sizes that are multiples of this
REPEATS = 20
MARGIN = 0.97  # our kernel must take less than this share of the time of plain projections
OWN_FAULTS = "thread_local"  # capture mode in which other threads (a trainer's, for example) cannot break a capture

_choices: dict[tuple[Any, ...], bool] = {}


def project(x: Tensor, linears: Sequence[Any]) -> list[Tensor]:
    """Apply each of these linear layers to the input."""

    adapted = _adapted(x, linears)
    if adapted:
        ys = project(x, [one.base if one is not None else linear for one, linear in zip(adapted, linears, strict=True)])
        pairs = [(y, one) for y, one in zip(ys, adapted, strict=True) if one is not None]
        _add_adapted_([y for y, _ in pairs], x, [one for _, one in pairs])
        return ys

    def plain() -> list[Tensor]:
        return [_project_one(one, x) for one in linears]

    def together() -> list[Tensor]:
        from verifiers.kernels.cuda import linear

        return linear.project(x, [one.weight for one in linears], [one.bias for one in linears])

    has_bias = [getattr(one, "bias", None) is not None for one in linears]
    if not _is_known(x, linears) or any(has_bias) != all(has_bias):
        return plain()
    return _faster(("project", *has_bias), x, linears, plain, together)


def project_gated(x: Tensor, gate: Any, up: Any, gated: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """SiLU of one projection times another. ``gated`` combines two results."""
    if _adapted(x, (gate, up)):
        return gated(*project(x, (gate, up)))

    def plain() -> Tensor:
        return gated(_project_one(gate, x), _project_one(up, x))

    def together() -> Tensor:
        from verifiers.kernels.cuda import linear

        return linear.project_gated(x, gate.weight, up.weight)

    if not _is_known(x, (gate, up)) or gate.bias is not None or up.bias is not None:
        return plain()
    return _faster(("gated",), x, (gate, up), plain, together)


def add_projected(total: Tensor, linear: Any, x: Tensor) -> Tensor:
    """Add a projection to ``total`` in place, within the matrix product (addmm) if the layer is plain."""
    if not total.is_contiguous():
        return total.add_(linear(x))
    if adapted := _adapted(x, (linear,)):
        (one,) = adapted
        total = add_projected(total, one.base, x)
        _add_adapted_([total], x, [one])
        return total
    if not is_plain_linear(linear) or linear.bias is not None:
        return total.add_(linear(x))
    if x.is_cuda or _has_few_rows(x):
        return total.addmm_(x, linear.weight.t())
    return matmul.add_matmul(total, x, linear.weight.t(), in_place=True)


def add_projected_and_norm(hidden: Tensor, linear: Any, x: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """Hidden states plus a projection, and the norm of the sum. May overwrite the hidden states."""

    def plain() -> tuple[Tensor, Tensor]:
        total = add_projected(hidden, linear, x)
        return total, norm(total)

    def together() -> tuple[Tensor, Tensor]:
        from verifiers.kernels.cuda import linear as kernels

        assert fused is not None
        return kernels.add_projected_and_norm(hidden, x, linear.weight, *fused)

    # Timing adds to the hidden states repeatedly, so it runs only during a warm-up, whose results are dropped.
    fused = _own_norm(norm) if _is_known(x, (linear,)) and linear.bias is None and hidden.is_contiguous() else None
    if fused is None or fused[0].dtype is not x.dtype or not _is_splittable(x, linear):
        return plain()
    return _faster(("add", "norm"), x, (linear,), plain, together)


def embed_and_norm(ids: Tensor, embedding: Any, norm: Any) -> tuple[Tensor, Tensor]:
    """The embeddings of tokens ``[tokens, width]``, and their norm."""
    weight = embedding.weight
    is_plain = type(embedding) is nn.Embedding and embedding.max_norm is None and not is_hooked(embedding)
    fused = _own_norm(norm) if weight.is_cuda and is_plain and weight.is_contiguous() else None
    if fused is None or fused[0].dtype is not weight.dtype:
        embedded = embedding(ids)
        embedded = embedded.view(-1, embedded.shape[-1])
        return embedded, norm(embedded)
    from verifiers.kernels.cuda import decode

    return decode.embed_and_norm(ids.reshape(-1), weight, *fused)


def _own_norm(norm: Any) -> tuple[Tensor, float] | None:
    """Weight and epsilon of a norm module that our kernel currently replaces; None if the module must be called."""
    from verifiers.kernels.cuda import decode

    forward = vars(norm).get("forward")
    if not isinstance(forward, partial) or forward.func is not decode.rms_norm or has_hooks(norm):
        return None
    return norm.weight, forward.args[1]


def _is_splittable(x: Tensor, linear: Any) -> bool:
    from verifiers.kernels.cuda import linear as kernels

    return kernels.is_splittable(len(x), linear.weight)


def _project_one(linear: Any, x: Tensor) -> Tensor:
    if x.is_cuda or _has_few_rows(x) or not is_plain_linear(linear):
        projected: Tensor = linear(x)
        return projected
    return matmul.linear(x, linear.weight, linear.bias)


def _has_few_rows(x: Tensor) -> bool:
    """Whether there are so few rows that oneDNN would have to pad them."""
    return len(x) < matmul.SIZES[-1]


# --- adapters ---------------------------------------------------------------------------------------------------------


def _adapted(x: Tensor, linears: Sequence[Any]) -> list[Any]:
    """The adapter of each layer, or None. An empty list if no layer has one or the kernels do not support one."""
    if not x.is_cuda or not _is_small(x):
        return []
    loras = [lora_of(one) for one in linears]
    found = [one for one in loras if one is not None]
    is_known = all(
        one.a_RK.dtype is one.b_NR.dtype is x.dtype
        and one.a_RK.is_contiguous()
        and one.b_NR.is_contiguous()
        and one.b_NR.shape[0] % TILE == 0
        and one.a_RK.shape[0] == found[0].a_RK.shape[0] <= MOST_RANK
        for one in found
    )
    are_others_plain = all(lora is not None or is_plain_linear(one) for lora, one in zip(loras, linears, strict=True))
    return loras if found and is_known and are_others_plain else []


def _add_adapted_(ys: Sequence[Tensor], x: Tensor, loras: Sequence[Lora]) -> None:
    from verifiers.kernels.cuda import lora

    lora.add_adapted_(ys, x, loras)


# --- plain layers -----------------------------------------------------------------------------------------------------


def _is_small(x: Tensor) -> bool:
    """Whether this is a small batch in half precision."""
    return x.dtype in (torch.bfloat16, torch.float16) and x.numel() <= MOST_ROWS * x.shape[-1]


def _is_known(x: Tensor, linears: Sequence[Any]) -> bool:
    """Whether this is a small batch in half precision and plain layers whose sizes are multiples of a tile."""
    if not x.is_cuda or not _is_small(x):
        return False
    return all(
        is_plain_linear(one)
        and one.weight.dtype is x.dtype
        and one.weight.is_contiguous()
        and one.in_features % TILE == one.out_features % TILE == 0
        for one in linears
    )


# --- recording --------------------------------------------------------------------------------------------------------


@contextmanager
def nothing_freed() -> Iterator[None]:
    """Disable the garbage collector while a CUDA graph is captured: freeing another graph would break the capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# --- timing -----------------------------------------------------------------------------------------------------------


def _faster(
    kind: tuple[Any, ...], x: Tensor, linears: Sequence[Any], plain: Callable[[], T], together: Callable[[], T]
) -> T:
    key = (*kind, x.device, x.dtype, x.numel(), *(one.weight.shape for one in linears))
    choice = _choices.get(key)
    if choice is None:
        if not _may_time(x.device):
            return plain()
        choice = _choices[key] = _is_faster(together, plain)
    return together() if choice else plain()


def _may_time(device: torch.device) -> bool:
    """Whether this is the warm-up of a CUDA graph: on a side stream and not yet capturing."""
    is_aside = torch.cuda.current_stream(device) != torch.cuda.default_stream(device)
    return is_aside and not torch.cuda.is_current_stream_capturing()


def _is_faster(one: Callable[[], Any], other: Callable[[], Any]) -> bool:
    from verifiers.kernels.cuda import linear

    try:
        return min(_time(one) for _ in range(2)) < MARGIN * min(_time(other) for _ in range(2))
    except linear.OutOfResources:  # the GPU has less shared memory than the tiles need
        return False


def _time(work: Callable[[], Any]) -> float:
    """Milliseconds on the device, measured with a CUDA graph to exclude the host's launch overhead."""
    work()  # compiles outside the capture
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    with nothing_freed():
        graph.capture_begin(capture_error_mode=OWN_FAULTS)
        for _ in range(REPEATS):
            work()
        graph.capture_end()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    began.record()
    graph.replay()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))
