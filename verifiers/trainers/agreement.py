"""Two computations of the same become a verdict: do they agree to rounding?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def agree(theirs: Sequence[Tensor], ours: Sequence[Tensor], rounds: int = 1) -> bool:
    """The same to rounding, which adds up as a random walk over so many rounds."""
    if len(theirs) != len(ours):
        return False
    for one, other in zip(theirs, ours, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        within = (2e-3 if one.dtype is torch.float32 else 4e-2) * math.sqrt(rounds)
        size, apart = one.float().abs().max(), (one.float() - other.float()).abs().max()
        if not bool(apart <= within * size):
            return False
    return True
