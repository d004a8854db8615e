"""The reference policy of the KL term, and its logprobs."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verifiers.trainers.learning.logprobs import TokenScorer
from verifiers.trainers.learning.micro_batches import MicroBatch

# Beginnings of LoRA that move a part of the weights into the adapters: without them it is another model.
TAKEN_FROM_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")


class Reference:
    """A frozen copy of the policy before training; with LoRA, the model with its adapters disabled, where that is it.

    ``version`` counts changes of the copy (``sync_ref_model``), so that an unchanged copy is not saved again.
    """

    def __init__(self, model: Any) -> None:
        self._policy = model
        begun = [getattr(one, "init_lora_weights", True) for one in getattr(model, "peft_config", {}).values()]
        is_whole = not any(isinstance(one, str) and one.startswith(TAKEN_FROM_WEIGHTS) for one in begun)
        self.is_adapter = hasattr(model, "disable_adapter") and is_whole
        self.model = model if self.is_adapter else copy.deepcopy(model).eval().requires_grad_(False)
        self.scorer = TokenScorer(self.model)
        self.version = 0
        self.saved: tuple[int, Path] | None = None  # the version that was saved last, and its file

    def logprobs(self, batch: MicroBatch, temperature: float | None = None) -> Tensor:
        off: AbstractContextManager[Any] = self.model.disable_adapter() if self.is_adapter else nullcontext()
        with torch.no_grad(), off:
            return self.scorer.logprobs(batch, temperature)

    def follow(self, share: float) -> None:
        """Interpolate the weights of the copy towards the policy by this share."""
        self.version += 1
        with torch.no_grad():
            for mine, its in zip(self.model.parameters(), self._policy.parameters(), strict=True):
                mine.lerp_(its.to(mine.dtype), share)

    def weights(self) -> dict[str, Tensor]:
        """The weights of the copy, for saving."""
        return {name: one.detach() for name, one in self.model.named_parameters()}

    def restore(self, weights: dict[str, Tensor]) -> None:
        """Restore the weights of a copy."""
        self.version += 1
        with torch.no_grad():
            for name, one in self.model.named_parameters():
                one.copy_(weights[name])
