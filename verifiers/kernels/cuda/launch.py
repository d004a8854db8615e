"""Launching kernels: properties of the GPU, and programmatic dependent launch (PDL), on Hopper and later.

With PDL, a kernel first waits until the previous kernel is complete, then lets the next kernel launch, so that launches
overlap. A decode step of a small model has hundreds of kernels that take a few microseconds each. If a kernel let the
next one launch before waiting, thread blocks of many kernels would wait at the same time and occupy shared memory and
registers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

LEAST_CAPABILITY = (9, 0)
SHARED_BYTES = 99 << 10  # assumed for GPUs that do not report it


@triton.jit
def begin(OVERLAPS: tl.constexpr):
    """Call at the top of a kernel: waits until the previous kernel is complete, then lets the next one launch."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that calls `begin`."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if not is_nvidia or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return {"OVERLAPS": False}
    knows = hasattr(tl.extra.cuda, "gdc_wait")  # missing in older versions of Triton
    return {"OVERLAPS": True, "launch_pdl": True} if knows else {"OVERLAPS": False}


@cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


@cache
def shared_memory(device: torch.device) -> int:
    """Shared memory in bytes that one thread block may use."""
    known = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(getattr(known, "shared_memory_per_block_optin", SHARED_BYTES))
