"""float32 matrix products on a CPU: PyTorch's default, or oneDNN on processors for which MKL is slow.

PyTorch uses MKL, which has AVX-512 kernels only for Intel processors. On AMD it uses those for AVX2, which are half as
fast (`benchmarks/cpu_matmul.py`). oneDNN, which is part of PyTorch, uses what the processor supports. The choice
depends on the processor and the size of the weight, but not on the number of rows. So in training, a token's results do
not depend on the other tokens in its batch.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

NOT_INTEL = ("AuthenticAMD", "HygonGenuine")
SMALLEST = 1 << 15  # numbers in a weight; for smaller ones, a call of oneDNN takes longer than the product
# Rows that are multiplied at once. oneDNN caches compiled code for up to a thousand different numbers of rows. These
# allocations fragment memory, by gigabytes in a training, because its micro-batches all differ in length.
SIZES = (512, 256, 128, 64, 32)


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """``x · weightᵀ + bias`` for ``x`` [..., K]."""
    if not suits(x, weight_NK):
        return functional.linear(x, weight_NK, bias_N)
    return _product(x.reshape(-1, x.shape[-1]), weight_NK, bias_N).view(*x.shape[:-1], len(weight_NK))


def matmul(a_MK: Tensor, b_KN: Tensor, out: Tensor | None = None) -> Tensor:
    """``a · b``, written to ``out`` if given."""
    return _product(a_MK, b_KN.t(), out=out) if suits(a_MK, b_KN) else torch.mm(a_MK, b_KN, out=out)


def add_matmul(total_MN: Tensor, a_MK: Tensor, b_KN: Tensor, *, in_place: bool = False) -> Tensor:
    """``total + a · b``."""
    if not suits(a_MK, b_KN):
        return total_MN.addmm_(a_MK, b_KN) if in_place else torch.addmm(total_MN, a_MK, b_KN)
    return _product(a_MK, b_KN.t(), add_MN=total_MN, out=total_MN if in_place else None)


def weight_gradient(grad_MN: Tensor, x_MK: Tensor) -> Tensor:
    """``gradᵀ · x``: the gradient of a layer's weight, from its output's gradient and its input."""
    if not len(x_MK) or not suits(grad_MN, x_MK, size=grad_MN.shape[1] * x_MK.shape[1]):
        return torch.mm(grad_MN.t(), x_MK)
    first, *others = parts_of(len(x_MK))
    total_NK = _onednn(_padded(grad_MN[first]).t(), _padded(x_MK[first]).t())
    for part in others:
        total_NK += _onednn(_padded(grad_MN[part]).t(), _padded(x_MK[part]).t())
    return total_NK


def parts_of(rows: int) -> list[slice]:
    """Split rows into parts of the sizes in SIZES. The rest is later padded to the smallest size.

    >>> [(part.start, part.stop) for part in parts_of(669)]
    [(0, 512), (512, 640), (640, 669)]
    """
    parts, start = [], 0
    while start < rows:
        size = next((size for size in SIZES if size <= rows - start), rows - start)
        parts.append(slice(start, start + size))
        start += size
    return parts


def _product(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    add_MN: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    parts = parts_of(len(x_MK))
    if len(parts) == 1 and add_MN is None and out is None:
        return _onednn(_padded(x_MK), weight_NK, bias_N)[: len(x_MK)]
    out = x_MK.new_empty((len(x_MK), len(weight_NK))) if out is None else out
    for part in parts:
        product_PN = _onednn(_padded(x_MK[part]), weight_NK, bias_N)[: part.stop - part.start]
        if add_MN is None:
            out[part] = product_PN
        else:
            torch.add(add_MN[part], product_PN, out=out[part])
    return out


def _padded(x_PK: Tensor) -> Tensor:
    missing = SIZES[-1] - len(x_PK)
    return functional.pad(x_PK, (0, 0, 0, missing)) if missing > 0 else x_PK


def _onednn(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, weight_NK, bias_N, "none", [], "")
    return product


def suits(x: Tensor, weight: Tensor, *, size: int | None = None) -> bool:
    """Whether to use oneDNN: only if gradients are not recorded (it has no backward), as in autograd functions.

    ``size`` is the size of the layer's weight, if the weight is not a factor of the product.
    """
    return (
        (weight.numel() if size is None else size) >= SMALLEST
        and x.dtype is weight.dtype is torch.float32
        and x.device.type == weight.device.type == "cpu"
        and not torch.is_grad_enabled()
        and uses_onednn()
    )


@cache
def uses_onednn() -> bool:
    """Whether MKL is slow on this processor and oneDNN returns correct products here."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and _is_unknown_to_mkl()):
        return False
    x, weight = torch.arange(24.0).view(4, 6), torch.arange(30.0).view(6, 5).t()
    try:  # a private operator of PyTorch, which may change
        return bool(torch.equal(_onednn(x, weight), x @ weight.t()))
    except (AttributeError, RuntimeError, TypeError):
        return False


def _is_unknown_to_mkl() -> bool:
    try:
        told = Path("/proc/cpuinfo").read_text(errors="replace")[:4096]
    except OSError:
        told = platform.processor()
    return any(name in told for name in NOT_INTEL)
