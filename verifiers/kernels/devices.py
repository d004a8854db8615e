"""Copy host arrays to tensors on a device, without synchronising."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one within the block. Each thread has its own current CUDA device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """An array as a tensor on a device."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def host_index(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """Integers as an index tensor on a device."""
    return to_device(np.array(values, np.int64), device)


def free_unused(device: torch.device) -> None:
    """Free unreferenced GPU memory: collect reference cycles and empty the caching allocator."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
