"""Inspect modules (plain, hooked, with adapters), detect changes, and replace forwards temporarily."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from types import NoneType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

LORA_MODULES = ("peft.tuners.lora.layer", "peft.tuners.lora.bnb")
_NO_SETTING = re.compile(r"^_|^training$|drop|checkpointing")  # private (of adapters, for example) or only for training
# What a rotary embedding with length-dependent angles computes anew: its current angles, and the length they are for.
_RECOMPUTED = re.compile(r"(?<!original_)inv_freq$|max_seq_len_cached$")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = [getattr(torch_modules, f"_global{name}") for name in HOOKS]  # on all modules of the process


def is_hooked(module: Any) -> bool:
    """Whether this module has a hook, or an instance attribute that replaces its forward."""
    return "forward" in vars(module) or has_hooks(module)


def has_hooks(module: Any) -> bool:
    own = vars(module)
    return any(GLOBAL_HOOKS) or any(own[name] for name in HOOKS)


def is_plain_linear(linear: Any) -> bool:
    """Whether this is exactly `nn.Linear`, without hooks."""
    return type(linear) is nn.Linear and not is_hooked(linear)


@dataclass(frozen=True, slots=True)
class Lora:
    """A linear layer with an adapter, which adds scale · (x · aᵀ) · bᵀ."""

    base: Any
    a_RK: Tensor
    b_NR: Tensor
    scale: float


def lora_of(linear: Any) -> Lora | None:
    """The adapter of a layer (peft) if it is active, the only one, plain LoRA, and currently without dropout."""
    kind = type(linear)
    if kind.__module__ not in LORA_MODULES or not kind.__name__.startswith("Linear") or is_hooked(linear):
        return None
    names = [name for name in linear.active_adapters if name in linear.lora_A]
    if linear.disable_adapters or linear.merged or len(names) != 1 or names[0] in getattr(linear, "lora_variant", ()):
        return None
    (name,) = names
    a, b, dropout = linear.lora_A[name], linear.lora_B[name], linear.lora_dropout[name]
    if not all(is_plain_linear(one) and one.bias is None for one in (a, b)):
        return None
    if dropout.training and type(dropout) is not nn.Identity:
        return None
    return Lora(linear.base_layer, a.weight, b.weight, float(linear.scaling[name]))


def base_model(model: Any) -> Any:
    """The model within adapters (peft), or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def invocation_tokens(model: Any) -> tuple[tuple[int, ...], ...]:
    """The tokens of a prompt from which on active adapters apply (peft's activated LoRA, aLoRA); usually none."""
    if not hasattr(model, "get_base_model"):
        return ()
    found = [getattr(model.peft_config[name], "alora_invocation_tokens", None) for name in model.active_adapters]
    return tuple(tuple(one) for one in found if one)


def is_quantised(model: Any) -> bool:
    """Whether a model has quantised weights, packed into integers."""
    return any(not one.is_floating_point() for one in model.parameters())


def linear_parameters(model: Any) -> int:
    """Number of parameters in a model's linear layers, which is the number of multiply-adds per token."""
    return sum(module.weight.numel() for module in model.modules() if type(module) is nn.Linear)


@contextmanager
def replaced_forwards(forwards: Iterable[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Replace the forwards of these modules within the block, then restore earlier replacements.

    Writes to ``__dict__`` because `nn.Module.__setattr__` is far slower and this runs in every step.
    """
    replaced: list[tuple[dict[str, Any], Any]] = []
    try:
        for module, forward in forwards:
            own = module.__dict__
            replaced.append((own, own.get("forward")))
            own["forward"] = forward
        yield
    finally:
        for own, before in reversed(replaced):
            if before is None:
                del own["forward"]
            else:
                own["forward"] = before


@contextmanager
def without_dropout(module: Any) -> Iterator[None]:
    """Put a module and its submodules into evaluation mode within the block."""
    training = [one for one in module.modules() if one.training]
    for one in training:
        one.__dict__["training"] = False
    try:
        yield
    finally:
        for one in training:
            one.__dict__["training"] = True


def recomputes_buffers(module: Any) -> bool:
    """Whether a module replaces its buffers as it runs: a rotary embedding whose angles depend on the length."""
    found = getattr(module, "rope_type", None)  # one for the model, or a dict by layer type
    kinds = found.values() if isinstance(found, dict) else [found]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


class ModuleSnapshot:
    """A snapshot of a module's submodules, parameters and settings, to detect changes without walking its tree.

    Settings are what a forward reads besides tensors: epsilons, scales, windows, an instance's own forward.
    ``varying`` are settings to ignore (`changed_settings` of an earlier snapshot).

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    >>> seen = ModuleSnapshot(model)
    >>> seen.is_same
    True
    >>> model[1].eps = 0.5
    >>> seen.is_same
    False
    """

    def __init__(self, model: Any, varying: Collection[tuple[int, str]] = ()) -> None:
        self.modules: list[Any] = list(model.modules())
        self.parameters: list[Any] = list(model.parameters())
        self.hooks: list[Any] = [*GLOBAL_HOOKS, *(vars(module)[name] for module in self.modules for name in HOOKS)]
        self._kinds = [type(module) for module in self.modules]
        self._forwards = {kind: kind.forward for kind in self._kinds}
        varied = {id(vars(module)) for module in self.modules if recomputes_buffers(module)}
        self._buffers = [(module._buffers, id(vars(module)) in varied) for module in self.modules]
        self._held = [one for module in self.modules for one in (module._modules, module._parameters)]
        self._sizes = list(map(len, self._held))
        slots = [(held, name) for held in self._held for name in held]
        slots += [
            (own, name) for own in map(vars, self.modules) for name in _settings(own)
            if (id(own), name) not in varying and not (id(own) in varied and _RECOMPUTED.search(name))
        ]  # fmt: skip
        self._slots, self._values = slots, [held.get(name) for held, name in slots]

    @property
    def buffers(self) -> list[Any]:
        """The current buffers, without those that a forward replaces."""
        found = [
            one for held, varies in self._buffers for name, one in held.items()
            if not (varies and _RECOMPUTED.search(name))
        ]  # fmt: skip
        return [one for one in found if one is not None and not one.is_inference()]

    @property
    def is_same(self) -> bool:
        """Whether every submodule, parameter and setting is still the same object."""
        return (
            list(map(len, self._held)) == self._sizes
            and list(map(type, self.modules)) == self._kinds
            and all(kind.forward is forward for kind, forward in self._forwards.items())
            and all(map(is_, [held.get(name) for held, name in self._slots], self._values))
        )

    @property
    def changed_settings(self) -> set[tuple[int, str]]:
        """The settings (and members) that have changed, as (id of their holder, name)."""
        pairs = zip(self._slots, self._values, strict=True)
        return {(id(held), name) for (held, name), value in pairs if held.get(name) is not value}


def _settings(own: Mapping[str, Any]) -> set[str]:
    """Names of a module's attributes that its forward in evaluation mode may depend on."""
    plain = {name for name, value in own.items() if isinstance(value, (int, float, str, NoneType)) or callable(value)}
    return {"forward", *(name for name in plain if not _NO_SETTING.search(name))}
