"""Launching kernels: properties of the GPU, and programmatic dependent launch (PDL), on Hopper and later.

With PDL each kernel waits for the one before it to complete before it reads or writes anything, and lets the next one
start then, so that launches overlap. A decode step of a small model is hundreds of kernels of a few microseconds. If a
kernel let the next one start before it waits, thread blocks of many kernels would wait side by side, and take the
shared memory and registers of those that run.
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
    """At the top of a kernel: waits until the previous kernel is complete, and lets the next one launch."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that calls `begin`."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if not is_nvidia or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return {"OVERLAPS": False}
    knows = hasattr(tl.extra.cuda, "gdc_wait")  # not in older versions of Triton
    return {"OVERLAPS": True, "launch_pdl": True} if knows else {"OVERLAPS": False}


@cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


@cache
def shared_memory(device: torch.device) -> int:
    """Shared memory in bytes that one thread block may use."""
    known = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(getattr(known, "shared_memory_per_block_optin", SHARED_BYTES))
