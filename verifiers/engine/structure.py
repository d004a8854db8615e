"""What a module is made of, remembered, so that a change of it is noticed without walking through it again."""

from __future__ import annotations

from typing import Any


class Structure:
    """The parts and parameters of a module at one moment.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> seen = Structure(model)
    >>> seen.is_same
    True
    >>> model[0] = nn.Linear(2, 2)
    >>> seen.is_same
    False
    """

    def __init__(self, model: Any) -> None:
        self.modules: list[Any] = list(model.modules())
        self.parameters: list[Any] = list(model.parameters())
        self._kinds = [type(module) for module in self.modules]
        held = [one for module in self.modules for one in (module._modules, module._parameters)]
        self._members = [(one, list(one.values())) for one in held if one]
        self._empty = [one for one in held if not one]

    @property
    def is_same(self) -> bool:
        """Is every part and every parameter still the one it was?"""
        if any(self._empty) or [type(module) for module in self.modules] != self._kinds:
            return False
        for held, members in self._members:
            if len(held) != len(members):
                return False
            for one, other in zip(held.values(), members, strict=True):
                if one is not other:
                    return False
        return True
