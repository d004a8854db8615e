"""A module that others may train meanwhile: run for its logits alone, and watched for changes of its weights.

The engine reads the parameters of the module it was given: there is no copy, and nothing to transfer after an update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook

from verifiers.engine import kv_cache as slots
from verifiers.engine.compiled_model import Drawn
from verifiers.engine.fair_lock import TurnLock
from verifiers.engine.fused import Fused
from verifiers.engine.lean import Lean
from verifiers.engine.packed import PackedLinears, size_of
from verifiers.engine.plan import free_memory
from verifiers.engine.structure import Structure

PACK_AFTER = 8  # steps on the same weights: packing them costs about as much as it saves in so many

_locks: WeakValueDictionary[int, Any] = WeakValueDictionary()  # engines of one model share a lock


class LiveModel:
    """One module, its version, and the quickest way to run it here."""

    def __init__(self, module: Any) -> None:
        slots.register()
        _note_optimizer_steps()
        self.module = module
        config = module.config
        self.text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._configs = [config] if self.text_config is config else [config, self.text_config]
        parameter = next(module.parameters())
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = parameter.dtype
        # Held while the model runs: whoever runs it besides, or updates its weights, takes it.
        self.lock = _locks.setdefault(id(config), TurnLock())
        self.version = 0
        with self.lock:
            self._fused = Fused(module)
            self._lean = Lean(module, self._configs)
        self._structure = Structure(module)
        self._adapters = _adapted(self._structure.modules)
        self._seen: tuple[int, Any] = (0, None)
        self._packed = PackedLinears(module) if PackedLinears.helps(module) else None
        self._steps = 0
        self.is_plain = False  # whether the modules are run as transformers wrote them

    def forward(self, ids: Tensor, positions: Tensor, attend: slots.Attend, keep: Tensor | int = 0) -> Tensor:
        """The logits of the positions in ``keep`` (0: of all)."""
        if self.is_plain:
            with slots.attending(self._configs, attend):
                return self._run_module(ids, positions, keep)
        bare = self._lean.bare
        if bare is not None and bare.is_usable:
            logits = bare.run(ids, positions, attend, keep)
            if logits is not None:
                return logits
        packed = self._packed.in_use() if self._packed is not None else nullcontext()
        with slots.attending(self._configs, attend), self._fused, self._lean, packed:
            return self._run(ids, positions, keep)

    def decode(self, *args: Any) -> Drawn | None:
        """Several tokens for each row in one go (see `Bare.decode`), of a model with which that can be done."""
        return None if self.is_plain or self._lean.bare is None else self._lean.bare.decode(*args)

    def _run(self, ids: Tensor, positions: Tensor, keep: Tensor | int) -> Tensor:
        logits: Tensor | None = self._lean.forward(ids, positions, keep)
        return self._run_module(ids, positions, keep) if logits is None else logits

    def _run_module(self, ids: Tensor, positions: Tensor, keep: Tensor | int) -> Tensor:
        logits: Tensor = self.module(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep, return_dict=True
        ).logits
        return logits

    def attending_layers(self) -> set[int]:
        """Which layers ask for attention where we can answer them: others keep their past in ways of their own."""
        found: set[int] = set()

        def note(layer: int, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
            found.add(layer)
            return q.new_zeros((*q.shape[:3], v.shape[-1]))

        ids = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        with slots.attending(self._configs, note):
            self._run_module(ids, ids, 0)
        return found

    def count_step(self, rows: int) -> None:
        """After some steps on the same weights it pays to lay them out for this many rows."""
        self._steps += 1
        bare = self._lean.bare
        if (
            self.is_plain
            or (self._packed is None and bare is None)
            or self._steps != PACK_AFTER
            or not self._has_room()
        ):
            return
        if bare is not None and bare.is_welcome:
            bare.pack(rows)
        elif self._packed is not None:
            self._packed.pack(rows)

    def _has_room(self) -> bool:
        """Is there memory for a copy of the weights, and as much again for everybody else?"""
        return free_memory(self.device) > 2 * size_of(self.module) * int(self.dtype.itemsize)

    # --- changes --------------------------------------------------------------------------------------------------

    def notice(self, *, is_idle: bool) -> tuple[bool, bool]:
        """Have the weights changed since last time, and have they moved (or adapters been switched)?

        An optimizer step counts up the versions of the tensors it changes. Writing through ``.data`` does not: say
        `forget` after that.
        """
        if is_idle and not self._structure.is_same:  # parameters were replaced, adapters added
            self._structure = Structure(self.module)
            self._adapters = _adapted(self._structure.modules)
        versions = pointers = 0
        for parameter in self._structure.parameters:
            versions += parameter._version
            pointers ^= parameter.data_ptr()
        now = (versions, (pointers, _adapter_state(self._adapters)))
        if now == self._seen:
            return False, False
        has_moved = now[1] != self._seen[1]
        self._seen = now
        self.version += 1
        self._drop_packed()
        return True, has_moved

    def forget(self) -> None:
        """Whatever was made from the weights so far counts as made from others."""
        self._seen = (-1, self._seen[1])
        self._drop_packed()

    def start_afresh(self) -> None:
        """As if nothing had been run yet."""
        self.forget()
        self._seen, self.version = (0, None), 0

    def _drop_packed(self) -> None:
        self._steps = 0
        if self._packed is not None:
            self._packed.drop()
        if self._lean.bare is not None:
            self._lean.bare.drop()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A module that is being trained has no dropout while it is sampled from."""
        trained = [one for one in self.module.modules() if one.training] if self.module.training else []
        for one in trained:
            one.__dict__["training"] = False  # a module's own way of setting an attribute takes far longer
        try:
            yield
        finally:
            for one in trained:
                one.__dict__["training"] = True


@cache
def _note_optimizer_steps() -> None:
    """Fused optimizers write to parameters without counting up their versions: it is done for them."""

    def count_up(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        increment_version(parameter for group in optimizer.param_groups for parameter in group["params"])

    register_optimizer_step_post_hook(count_up)


def _adapted(modules: Sequence[Any]) -> list[Any]:
    return [one for one in modules if hasattr(one, "merged_adapters")]


def _adapter_state(layers: Sequence[Any]) -> Any:
    """Which adapters (peft) are in force, read off the first layer: they are switched on all at once; and how much
    each counts, which is set layer by layer."""
    if not layers:
        return None
    first = layers[0]
    scales = [tuple(one.scaling.values()) for one in layers if isinstance(getattr(one, "scaling", None), dict)]
    return first.disable_adapters, tuple(first.active_adapters), tuple(first.merged_adapters), scales
