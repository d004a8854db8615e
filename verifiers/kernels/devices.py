"""Numbers of the host → tensors on a device, without waiting for what it is doing."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor


def current(device: torch.device) -> AbstractContextManager[Any]:
    """While this lasts a thread's kernels and streams are of this device: which card is current is a thread's own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """An array as a tensor on a device."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def host_index(values: Sequence[int] | np.ndarray, device: torch.device) -> Tensor:
    """Whole numbers as a tensor on a device."""
    return to_device(np.array(values, np.int64), device)


def free_unused(device: torch.device) -> None:
    """Give back to a card what nobody refers to: what refers to itself, and what its allocator keeps for later."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
