"""How kernels are launched on a card: what it has, and that each gets ready while the one before it ends.

That is programmatic dependent launch, on Hopper and later: each kernel lets the next begin at once, and waits until the
one before it is complete, before it reads or writes anything. A decode step of a small model is hundreds of kernels of
a few microseconds each.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

LEAST_CAPABILITY = (9, 0)
SHARED_BYTES = 99 << 10  # of cards that do not say how much there is


@triton.jit
def begin(OVERLAPS: tl.constexpr):
    """First of all in a kernel: the next one may get ready, and this one goes on when that before it is complete."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@cache
def overlap(device: torch.device) -> dict[str, Any]:
    """How to launch a kernel that calls `begin`."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if not is_nvidia or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return {"OVERLAPS": False}
    knows = hasattr(tl.extra.cuda, "gdc_wait")  # an older Triton does not
    return {"OVERLAPS": True, "launch_pdl": True} if knows else {"OVERLAPS": False}


@cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one block of threads may have."""
    known = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(getattr(known, "shared_memory_per_block_optin", SHARED_BYTES))
