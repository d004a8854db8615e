"""Tokens → logits, by a module that others may train meanwhile, whose weights are watched for changes.

The engine reads the parameters of the module it was given: nothing has to be transferred after an update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook

from verifiers.engine.fair_lock import FairLock
from verifiers.engine.kv_cache import Decode, Prefill
from verifiers.engine.plan import free_memory
from verifiers.errors import InfraError
from verifiers.kernels import reference
from verifiers.kernels.attention import Attend, attending, register
from verifiers.kernels.cpu.model import CpuModel, DecodeColumns, Drawn, Paged, unsupported
from verifiers.kernels.decoder import CommonDecoder
from verifiers.kernels.modules import ModuleSnapshot, linear_parameters, replaced_forwards, without_dropout
from verifiers.kernels.prove import PAST, agree, place_bounds, prompts, text_config

LAY_OUT_AFTER = 8  # steps on the same weights: copying them costs about as much as it saves in so many
# Tokens that those of a prompt attend to, on average: C sees each query's keys alone, PyTorch's attention many queries
# at a time, which is quicker from here on.
MOST_SEEN_IN_C = 128
# How long tokens are drawn in C without looking at what came meanwhile: a request that arrives waits no longer for it.
BURST_S = 0.02

_locks: WeakValueDictionary[int, Any] = WeakValueDictionary()  # engines of one model share a lock


class ModelRunner:
    """One module, its version, and the ways to run it here: in C, in fewer operations, or as its modules are."""

    def __init__(self, module: Any) -> None:
        register()
        _note_optimizer_steps()
        self.module = module
        config = module.config
        self.text_config = text_config(config)
        self._configs = [config] if self.text_config is config else [config, self.text_config]
        parameter = next(module.parameters())
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = parameter.dtype
        self.vocabulary = int(self.text_config.vocab_size)
        # Held while the model runs: whoever runs it besides, or updates its weights, takes it.
        self.lock = _locks.setdefault(id(config), FairLock())
        self.version = 0
        self.weight_version = "0"  # as their owner calls the weights; where nobody does, the changes are counted
        self._is_named = False
        with self.lock:
            self.decoder = CommonDecoder(module, self._configs)
            self.not_in_c = unsupported(self.decoder) if self.device.type == "cpu" else "it is not on the CPU"
        self.cpu = CpuModel(self.decoder) if self.not_in_c is None else None
        self._norms = [
            (one, partial(_rms_norm(self.device), one, epsilon))
            for one, epsilon in self.decoder.norms
            if id(one) not in self.decoder.fused_norms
        ]
        self._snapshot = ModuleSnapshot(module)
        self._adapters = _adapted(self._snapshot.modules)
        self._hooks: list[int] = []  # their numbers, of which none is used twice
        self.attending: tuple[int, set[int]] | None = None  # in rows of so many tokens, these layers: as was proven
        self._seen: tuple[int, Any] = (0, None)
        self._taken = -2
        self._steps = 0
        self._step_s = BURST_S  # how long the last step took in C: the first one is tried alone
        self.uses_c = self.cpu is not None
        self.uses_modules = False  # as transformers wrote them

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, keep: Tensor | int = 0) -> Tensor:
        """The logits of the positions in ``keep`` (0: of all)."""
        if self.uses_modules:
            with attending(self._configs, attend):
                return self._run_module(ids, positions, keep)
        logits = self._run_in_c(ids, positions, attend, keep)
        return self._run(ids, positions, attend, keep) if logits is None else logits

    def burst(self, steps: int, vocabulary: int) -> int:
        """How many tokens `decode` is to draw at once, of so many that could be; 0: it cannot be done in C."""
        if not (self.uses_c and self.cpu is not None and self.cpu.is_usable and vocabulary >= self.cpu.vocabulary):
            return 0
        return max(1, min(steps, int(BURST_S / self._step_s)))

    def decode(self, columns: DecodeColumns, steps: int, is_end_V: np.ndarray, cache: Paged) -> Drawn:
        """Several tokens for each of some sequences, drawn one after the other in C."""
        assert self.cpu is not None
        began = time.perf_counter()
        drawn = self.cpu.decode(columns, steps, is_end_V, cache)
        self._step_s = max((time.perf_counter() - began) / len(drawn.token_KB), 1e-6)
        return drawn

    def _run_in_c(self, ids: Tensor, positions: Tensor, attend: Attend, keep: Tensor | int) -> Tensor | None:
        if not (self.uses_c and self.cpu is not None and self.cpu.is_usable):
            return None
        if isinstance(attend, Decode):
            sequence_B, length_B = np.arange(len(ids)), attend.length_B.numpy()
            cache = Paged(attend.cache.store, attend.tables, attend.cache.length)
            return self.cpu.run(ids[:, 0], sequence_B, length_B, sequence_B, cache)[:, None]
        if not isinstance(attend, Prefill) or isinstance(keep, int):
            return None
        position_T = positions[0].numpy()
        if position_T.mean() > MOST_SEEN_IN_C:
            return None
        cache = Paged(attend.cache.store, attend.tables, attend.cache.length)
        return self.cpu.run(ids[0], attend.tables_of_tokens, position_T, keep.numpy(), cache)[None]

    def _run(self, ids: Tensor, positions: Tensor, attend: Attend, keep: Tensor | int) -> Tensor:
        """By the model's forward, its norms and the layers that were recognised in fewer operations."""
        decoder, is_unhooked = self.decoder, self.decoder.is_unhooked
        forwards: list[tuple[Any, Callable[..., Any]]] = [
            pair for pair in self._norms if "forward" not in vars(pair[0])
        ]
        forwards += decoder.forwards if is_unhooked else []
        is_whole = is_unhooked and decoder.may_run_whole
        with attending(self._configs, attend), replaced_forwards(forwards):
            return decoder.forward(ids, positions, keep) if is_whole else self._run_module(ids, positions, keep)

    def _run_module(self, ids: Tensor, positions: Tensor, keep: Tensor | int) -> Tensor:
        logits: Tensor = self.module(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep, return_dict=True
        ).logits
        return logits

    def attending_layers(self, row: int) -> set[int]:
        """Which layers ask for attention where we can answer them: others keep their past in ways of their own.

        Nor can those be run beside other sequences that count places in a row (of so many tokens, at most) where they
        were given positions: one token at many places of the same position must look the same at all of them.
        """
        found: set[int] = set()

        def note(layer: int, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
            if agree([q[:, :, :1].expand_as(q), k[:, :, :1].expand_as(k)], [q, k]):
                found.add(layer)
            return q.new_zeros((*q.shape[:3], v.shape[-1]))

        config = self.module.config
        (token,) = prompts(config, [1])
        ids = torch.tensor([token * max([PAST, *place_bounds(config, row)])], device=self.device)
        with attending(self._configs, note):
            self._run_module(ids, torch.zeros_like(ids), 1)
        return found

    def count_step(self) -> None:
        """After some steps on the same weights it pays to copy them in C's layout."""
        self._steps += 1
        if self.uses_modules or not self.uses_c or self._steps != LAY_OUT_AFTER:
            return
        if self.cpu is not None and self.cpu.is_unchanged and self._has_room():
            self.cpu.lay_out()

    def _has_room(self) -> bool:
        """Is there memory for a copy of the weights, and as much again for everybody else?"""
        return free_memory(self.device) > 2 * linear_parameters(self.module) * int(self.dtype.itemsize)

    # --- changes --------------------------------------------------------------------------------------------------

    def check_kind(self) -> None:
        """The KV cache and the kernels are for the dtype, the device and the vocabulary that the model had."""
        parameter = next(self.module.parameters())
        now = parameter.dtype, parameter.device, int(self.text_config.vocab_size)
        then = self.dtype, self.device, self.vocabulary
        if now != then:
            said = ", not ".join("{} on {} with {} tokens".format(*one) for one in (now, then))
            raise InfraError(f"the model is {said}, since its engine was made: make a new one (LocalModel, Engine)")

    def notice(self, *, is_idle: bool, has_prompts: bool) -> tuple[bool, bool]:
        """Have the weights changed since last time, and have they moved (or adapters been switched, or hooks)?

        An optimizer step counts up the versions of the tensors it changes. Writing through ``.data`` does not: say
        `forget` after that. Whoever changes weights while sequences run takes the lock: if nobody has, they are looked
        at only where there are prompts, which may find keys of others in the cache.
        """
        # Whoever puts parameters elsewhere has the lock meanwhile; `taken` is counted up when this thread has it, too.
        is_alone, self._taken = not is_idle and self.lock.taken - self._taken <= 1, self.lock.taken
        if not is_alone and not self._snapshot.is_same:  # parameters were replaced, adapters added
            if self.attending is not None and self.attending[1] != self.attending_layers(self.attending[0]):
                raise InfraError(
                    "layers of the model were replaced by others since its engine was made: make a new one"
                )
            self._snapshot = ModuleSnapshot(self.module)
            self._adapters = _adapted(self._snapshot.modules)
        if not is_alone:
            self._hooks = [hook for held in self._snapshot.hooks for hook in held]
        if is_alone and not has_prompts:
            return False, False
        where = self._seen[1]
        if not is_alone:
            pointers = [parameter.data_ptr() for parameter in self._snapshot.parameters]
            where = pointers, _adapter_state(self._adapters), self._hooks
        now = (self.changes, where)
        if now == self._seen:
            return False, False
        has_moved = now[1] != self._seen[1]
        self._seen = now
        self.version += 1
        if self.version > 1 and not self._is_named:
            self.weight_version = str(self.version - 1)
        self._drop_copies()
        return True, has_moved

    @property
    def changes(self) -> int:
        """How often parameters were written to, less what a proof has put back."""
        versions: int = sum([parameter._version for parameter in self._snapshot.parameters])
        return versions - int(self.lock.undone)

    def name_weights(self, version: int | str) -> None:
        """Call the weights so from the next token on; whoever has changed them says it, holding the lock."""
        self.weight_version, self._is_named = str(version), True

    def name_next(self) -> None:
        """The weights were replaced by some without a name: one more than those before, if these were counted."""
        if self._is_named and self.weight_version.isdecimal():
            self.weight_version = str(int(self.weight_version) + 1)

    def forget(self) -> None:
        """Whatever was made from the weights so far counts as made from others."""
        self._seen, self._taken = (-1, self._seen[1]), -2
        self._drop_copies()

    def reset(self) -> None:
        """As if nothing had been run yet."""
        self.forget()
        self._seen, self.version = (0, None), 0

    def _drop_copies(self) -> None:
        self._steps = 0
        if self.cpu is not None:
            self.cpu.drop()

    def evaluating(self) -> AbstractContextManager[None]:
        """A module that is being trained has no dropout while it is sampled from."""
        return without_dropout(self.module) if self.module.training else nullcontext()


def _rms_norm(device: torch.device) -> Callable[[Any, float, Tensor], Tensor]:
    if device.type != "cuda":
        return reference.rms_norm
    from verifiers.kernels.cuda import decode

    return decode.rms_norm


@cache
def _note_optimizer_steps() -> None:
    """Fused optimizers write to parameters without counting up their versions: it is done for them."""

    def count_up(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        increment_version(parameter for group in optimizer.param_groups for parameter in group["params"])

    register_optimizer_step_post_hook(count_up)


def _adapted(modules: Sequence[Any]) -> list[Any]:
    return [one for one in modules if hasattr(one, "merged_adapters")]


def _adapter_state(layers: Sequence[Any]) -> Any:
    """Which adapters (peft) are in force, and how much each counts: of every layer, as each may be set on its own."""
    scales = [tuple(one.scaling.values()) for one in layers if isinstance(getattr(one, "scaling", None), dict)]
    return [(one.disable_adapters, tuple(one.active_adapters), tuple(one.merged_adapters)) for one in layers], scales
