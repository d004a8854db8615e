"""Matrix products of float32 on a CPU: PyTorch's own, or oneDNN's on processors that MKL does not know.

PyTorch multiplies by MKL, which has AVX-512 kernels for Intel's processors only: on AMD's it takes those for AVX2, half
as fast (`benchmarks/cpu_matmul.py`). oneDNN, which PyTorch brings along, takes what the processor has. Which of the two
multiplies depends on the processor and on the size of the weight, never on the rows: a token has the same numbers
whatever is computed beside it.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

NOT_INTEL = ("AuthenticAMD", "HygonGenuine")
SMALLEST = 1 << 15  # numbers of a weight: below, a call of oneDNN takes longer than the product


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """``x · weightᵀ + bias`` of ``x`` [..., K]. Without a backward pass where oneDNN multiplies: see `suits`."""
    if suits(x, weight_NK):
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_NK, bias_N, "none", [], "")
        return result
    return functional.linear(x, weight_NK, bias_N)


def matmul(a_MK: Tensor, b_KN: Tensor, out: Tensor | None = None) -> Tensor:
    """``a · b``, in ``out`` if that is given."""
    if not suits(a_MK, b_KN):
        return torch.mm(a_MK, b_KN, out=out)
    product = linear(a_MK, b_KN.t())
    return product if out is None else out.copy_(product)


def add_matmul(total_MN: Tensor, a_MK: Tensor, b_KN: Tensor, *, is_spare: bool = False) -> Tensor:
    """``total + a · b``; a ``total`` that is spare may be overwritten."""
    if not suits(a_MK, b_KN):
        return torch.addmm(total_MN, a_MK, b_KN, out=total_MN if is_spare else None)
    result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(a_MK, total_MN, b_KN.t(), None, "add")
    return result


def suits(x: Tensor, weight: Tensor) -> bool:
    """Does oneDNN multiply these? It records no gradients: only where none are asked for, as in a backward pass."""
    return (
        weight.numel() >= SMALLEST
        and x.dtype is weight.dtype is torch.float32
        and x.device.type == weight.device.type == "cpu"
        and not torch.is_grad_enabled()
        and uses_onednn()
    )


@cache
def uses_onednn() -> bool:
    """Is this a processor that MKL does not know, and does oneDNN multiply as it should here?"""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and _is_unknown_to_mkl()):
        return False
    x, weight, total = torch.arange(24.0).view(4, 6), torch.arange(30.0).view(5, 6), torch.ones(4, 5)
    ops = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # it is PyTorch's own, and promised to nobody
    if ops is None:
        return False
    try:
        products = ops(x, weight.t().contiguous().t(), None, "none", [], ""), ops.binary(x, total, weight, None, "add")
    except (AttributeError, RuntimeError, TypeError):
        return False
    expected = x @ weight.t()
    return bool(torch.equal(products[0], expected) and torch.equal(products[1], total + expected))


def _is_unknown_to_mkl() -> bool:
    try:
        told = Path("/proc/cpuinfo").read_text(errors="replace")[:4096]
    except OSError:
        told = platform.processor()
    return any(name in told for name in NOT_INTEL)
