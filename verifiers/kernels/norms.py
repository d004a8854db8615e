"""Find the norm modules of a model that compute a plain RMS norm, by running them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiers.kernels.modules import is_hooked


class HeadNorms(NamedTuple):
    """RMS norms of queries and keys, per head, before their rotary embedding (Qwen3): weights and epsilons."""

    q: Tensor
    k: Tensor
    q_epsilon: float
    k_epsilon: float

    def of(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys ``[..., head_dim]``, normed."""
        return (
            F.rms_norm(q, self.q.shape, self.q, self.q_epsilon),
            F.rms_norm(k, self.k.shape, self.k, self.k_epsilon),
        )


def fusible_norms(model: nn.Module) -> dict[nn.Module, float]:
    """The norms of a model that compute the same as `torch.nn.functional.rms_norm`, with their epsilons."""
    found = {}
    for module in model.modules():
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = getattr(module, "weight", None)
        is_named_so = type(module).__name__.endswith("RMSNorm")
        if not (is_named_so and isinstance(epsilon, float) and isinstance(weight, Tensor)) or is_hooked(module):
            continue
        generator = torch.Generator().manual_seed(0)  # leaves the global generator alone
        x = torch.randn((4, weight.shape[0]), generator=generator).to(weight.device, weight.dtype)
        with torch.no_grad():
            mine = F.rms_norm(x, weight.shape, weight, epsilon).float()
            theirs = module(x).float()
        within = 1e-4 if weight.dtype is torch.float32 else 2e-2
        if torch.allclose(mine, theirs, rtol=within, atol=within):
            found[module] = epsilon
    return found
