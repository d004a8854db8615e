"""A model's linear layers with oneDNN's own weight layout: for models on a CPU that C does not run.

The parameters stay where they are: the copies are made from them, used for sampling only, and dropped as soon as the
parameters change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from verifiers.kernels.cpu.threads import is_small


class OneDNNLinears:
    """Reordered weights of every `nn.Linear` in a model; nothing is copied until `lay_out`, and `drop` forgets all."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.forwards: list[tuple[nn.Linear, Callable[[Tensor], Tensor]]] = []

    @staticmethod
    def helps(model: nn.Module) -> bool:
        """On a CPU with oneDNN, in float32, for a model that is not tiny."""
        parameter = next(model.parameters())
        return (
            parameter.device.type == "cpu"
            and parameter.dtype is torch.float32
            and torch.backends.mkldnn.is_available()
            and not is_small(model)
        )

    @property
    def is_laid_out(self) -> bool:
        return bool(self.forwards)

    def lay_out(self, rows: int) -> None:
        """Copy the weights for batches of about so many rows; layers with a forward of their own are left alone."""
        linears = [one for one in self._model.modules() if type(one) is nn.Linear and "forward" not in vars(one)]
        self.forwards = [(one, multiplication(one.weight, one.bias, rows)) for one in linears]

    def drop(self) -> None:
        self.forwards = []


def multiplication(weight: Tensor, bias: Tensor | None, rows: int) -> Callable[[Tensor], Tensor]:
    """Multiply by a weight that is laid out for batches of about so many rows; the layout is a copy."""
    operations: Any = torch.ops.mkldnn
    laid_out = operations._reorder_linear_weight(weight.detach(), rows)
    added = None if bias is None else bias.detach()
    multiply = operations._linear_pointwise

    def forward(x: Tensor) -> Tensor:
        y: Tensor = multiply(x, laid_out, added, "none", [], "")
        return y

    return forward
