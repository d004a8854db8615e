"""Threads and memory of a training on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verifiers.kernels.cpu.threads import is_small

LARGEST_KEPT = 31 << 20  # bytes: with the allocator's header it must stay below 32 MiB


@contextmanager
def sensible_threads(model: Any) -> Iterator[None]:
    """During the block, a tiny model on a CPU has one thread: several would mostly wait for each other."""
    before = torch.get_num_threads()
    if next(model.parameters()).device.type == "cpu":
        # glibc returns freed blocks to the system only if they are larger than any (up to 32 MiB) freed before. After
        # this one it keeps the memory that a step frees; getting new pages takes as long as the work on them.
        torch.empty(LARGEST_KEPT, dtype=torch.uint8)
        if is_small(model):
            torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
