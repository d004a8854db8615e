"""How many threads train a model, and what memory they keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verifiers.kernels.cpu.threads import is_small

LARGEST_KEPT = 31 << 20  # bytes: what the C library looks at is a little larger, and must be below 32 MiB


def _keep_memory() -> None:
    """Let the C library keep what a step gives back: new pages from the system take as long as what is done on them.

    It learns from the largest block that it ever gave back to the system (of up to 32 MiB) not to do so with less.
    """
    torch.empty(LARGEST_KEPT, dtype=torch.uint8)


@contextmanager
def sensible_threads(model: Any) -> Iterator[None]:
    """Tiny models on a CPU are trained by one thread: more would wait for one another longer than they compute."""
    before = torch.get_num_threads()
    if next(model.parameters()).device.type == "cpu":
        _keep_memory()
        if is_small(model):
            torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
