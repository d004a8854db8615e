"""A model's linear layers with their weights laid out as the CPU likes them, while the engine runs it.

The parameters stay where they are: the packed copies are made from them, used for sampling only, and dropped as soon as
the parameters change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

WORTH_PACKING = 2_000_000  # parameters in linear layers: below, the call costs more than the layout saves


class PackedLinears:
    """Packed weights of every `nn.Linear` in a model; nothing is packed until `pack`, and `drop` forgets it all."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._linears: list[nn.Linear] = []
        self._forwards: list[Callable[[Tensor], Tensor]] = []

    @staticmethod
    def helps(model: nn.Module) -> bool:
        """On a CPU with oneDNN, in float32, for a model that is not tiny."""
        parameter = next(model.parameters())
        return (
            parameter.device.type == "cpu"
            and parameter.dtype is torch.float32
            and torch.backends.mkldnn.is_available()
            and size_of(model) >= WORTH_PACKING
        )

    @property
    def is_packed(self) -> bool:
        return bool(self._forwards)

    def pack(self, rows: int) -> None:
        """Lay the weights out for batches of about so many rows; layers with a forward of their own are left alone."""
        modules = self._model.modules()
        self._linears = [module for module in modules if type(module) is nn.Linear and "forward" not in vars(module)]
        self._forwards = [multiplication(module.weight, module.bias, rows) for module in self._linears]

    def drop(self) -> None:
        self._forwards = []

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While this lasts the layers compute with their packed weights (past nn.Module's costly attribute setting)."""
        if not self._forwards:
            yield
            return
        for module, forward in zip(self._linears, self._forwards, strict=True):
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module in self._linears:
                del module.__dict__["forward"]


def size_of(model: nn.Module) -> int:
    """Parameters in a model's linear layers."""
    return sum(module.weight.numel() for module in model.modules() if type(module) is nn.Linear)


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
