"""The policy before training, asked for its logprobs: what the divergence is measured from."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verifiers.trainers.learning.logprobs import TokenScorer
from verifiers.trainers.learning.micro_batches import MicroBatch


class Reference:
    """With LoRA, the same model with its adapters switched off; otherwise a frozen copy, which may follow.

    ``version`` counts its changes: as long as it is the same, what was saved of it is the same.
    """

    def __init__(self, model: Any) -> None:
        self._policy = model
        self.is_adapter = hasattr(model, "disable_adapter")
        self.model = model if self.is_adapter else copy.deepcopy(model).eval().requires_grad_(False)
        self.scorer = TokenScorer(self.model)
        self.version = 0
        self.saved: tuple[int, Path] | None = None  # which version, and where

    def logprobs(self, batch: MicroBatch, temperature: float | None = None) -> Tensor:
        off: AbstractContextManager[Any] = self.model.disable_adapter() if self.is_adapter else nullcontext()
        with torch.no_grad(), off:
            return self.scorer.logprobs(batch, temperature)

    def follow(self, share: float) -> None:
        """Move the reference towards the policy: by this share of the way."""
        self.version += 1
        with torch.no_grad():
            for mine, its in zip(self.model.parameters(), self._policy.parameters(), strict=True):
                mine.lerp_(its.to(mine.dtype), share)

    def weights(self) -> dict[str, Tensor]:
        """The weights of a copy, to be saved."""
        return {name: one.detach() for name, one in self.model.named_parameters()}

    def restore(self, weights: dict[str, Tensor]) -> None:
        """Put back what was saved of a copy."""
        self.version += 1
        with torch.no_grad():
            for name, one in self.model.named_parameters():
                one.copy_(weights[name])
