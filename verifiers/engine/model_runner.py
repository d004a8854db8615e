"""Run a module that may be trained at the same time: tokens in, logits out, with detection of weight changes.

The engine reads the module's parameters in place, so nothing has to be transferred after an update.
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
from verifiers.kernels.cpu.model import CpuModel, Drawn, unsupported
from verifiers.kernels.decoder import CommonDecoder
from verifiers.kernels.modules import (
    ModuleSnapshot,
    invocation_tokens,
    linear_parameters,
    replaced_forwards,
    without_dropout,
)
from verifiers.kernels.prove import PAST, agree, place_bounds, prompts, text_config

LAY_OUT_AFTER = 8  # steps on the same weights; copying them to C's layout costs about what it saves in 8 steps
# Average number of keys that a prompt token attends to. Above it, PyTorch's attention, which batches queries, is faster
# than the C attention, which takes them one by one.
MOST_SEEN_IN_C = 128
BURST_S = 0.02  # target duration of one C call that samples several tokens; a new request waits until it returns

_locks: WeakValueDictionary[int, Any] = WeakValueDictionary()  # engines of one model share a lock


class ModelRunner:
    """One module, the version of its weights, and its forward: in C, in fused PyTorch operations, or its own."""

    def __init__(self, module: Any) -> None:
        register()
        _note_optimizer_steps()
        self.module = module
        config = module.config
        self.text_config = text_config(config)
        self._configs = [config] if self.text_config is config else [config, self.text_config]
        parameter = next(module.parameters())
        if parameter.is_meta or any(one.is_inference() for one in module.parameters()):
            where = "on the meta device" if parameter.is_meta else "inference-mode tensors, whose changes go undetected"
            raise ValueError(f"the weights of this {type(module).__name__} are {where}: load it outside that context")
        self._kind_then = self._kind
        self.dtype: torch.dtype = parameter.dtype
        self.device: torch.device = parameter.device
        self.vocabulary = int(self.text_config.vocab_size)
        # Held while the model runs. Other code that runs the model or updates its weights must hold it too.
        self.lock = _locks.setdefault(id(config), FairLock())
        self.changes = 0  # detected changes of the weights
        self.weight_version = "0"  # the name of the weights (`name_weights`), or the number of changes
        self._is_named = False
        self.varying: set[tuple[int, str]] = set()  # module settings that a forward changes, found during the proof
        with self.lock:
            self._take_snapshot()
            self.not_in_c = unsupported(self.decoder) if self.device.type == "cpu" else "it is not on the CPU"
        self.cpu = CpuModel(self.decoder) if self.not_in_c is None else None
        self._buffers: list[Tensor] = self._snapshot.buffers  # at the last check
        self._hooks: list[int] = []  # unique ids of the forward hooks
        self.attending: tuple[int, set[int]] | None = None  # argument and result of `attending_layers` at the proof
        self._last_state: tuple[int, Any] = (0, None)  # of the weights: writes to them; addresses, adapters and hooks
        self._lock_count = -2  # `lock.taken` at the last check; -2: check again
        self._steps = 0  # on the same weights
        self._step_s = BURST_S  # duration of the last step in C; starts so that the first burst is one step
        self.uses_c = self.cpu is not None
        self.uses_modules = False  # whether the module's own forward is used

    @property
    def _usable_cpu(self) -> CpuModel | None:
        return self.cpu if self.uses_c and self.cpu is not None and self.cpu.is_usable else None

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, keep: Tensor | int = 0) -> Tensor:
        """The logits after the tokens at ``keep`` (0: after all tokens)."""
        if self.uses_modules:
            with attending(self._configs, attend):
                return self._run_module(ids, positions, keep)
        logits = self._run_in_c(ids, positions, attend, keep)
        return self._run(ids, positions, attend, keep) if logits is None else logits

    def burst(self, steps: int, vocabulary: int) -> int:
        """How many tokens, at most ``steps``, `decode` should sample in one call; 0 if C cannot run the model."""
        cpu = self._usable_cpu
        return 0 if cpu is None or vocabulary < cpu.vocabulary else max(1, min(steps, int(BURST_S / self._step_s)))

    def decode(self, *given: Any) -> Drawn:
        """Sample several tokens for each sequence of a batch, in C. See `CpuModel.decode`."""
        assert self.cpu is not None
        began = time.perf_counter()
        drawn = self.cpu.decode(*given)
        self._step_s = max((time.perf_counter() - began) / len(drawn.token_KB), 1e-6)
        return drawn

    def _run_in_c(self, ids: Tensor, positions: Tensor, attend: Attend, keep: Tensor | int) -> Tensor | None:
        cpu = self._usable_cpu
        if cpu is None:
            return None
        if isinstance(attend, Decode):
            sequence_B, length_B = np.arange(len(ids)), attend.length_B.numpy()
            return cpu.run(ids[:, 0], sequence_B, length_B, sequence_B, attend.cache.paged(attend.tables))[:, None]
        if not isinstance(attend, Prefill) or isinstance(keep, int):
            return None
        position_T = positions[0].numpy()
        if position_T.mean() > MOST_SEEN_IN_C:
            return None
        return cpu.run(ids[0], attend.table_T, position_T, keep.numpy(), attend.cache.paged(attend.tables))[None]

    def _run(self, ids: Tensor, positions: Tensor, attend: Attend, keep: Tensor | int) -> Tensor:
        """The module's forward, with its norms and recognised layers replaced by fused PyTorch operations."""
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
        """The layers whose attention the engine can compute. Other layers keep their state in custom ways.

        A layer that uses a token's index in the row (of at most ``row`` tokens) instead of its position cannot run
        packed sequences. The same token at the same position must have the same queries and keys at any index.
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
        """After `LAY_OUT_AFTER` steps on the same weights, copy them to C's layout if two copies fit into memory."""
        self._steps += 1
        if self.uses_modules or not self.uses_c or self._steps != LAY_OUT_AFTER:
            return
        if self.cpu is not None and self.cpu.is_unchanged:
            copy_bytes = linear_parameters(self.module) * int(self.dtype.itemsize)
            if free_memory(self.device) > 2 * copy_bytes:
                self.cpu.lay_out()

    # --- changes of the weights -----------------------------------------------------------------------------------

    @property
    def _kind(self) -> tuple[Any, ...]:
        """The properties that the KV cache and the kernels depend on. The window is the one used for masks."""
        parameter, text, started = next(self.module.parameters()), self.text_config, invocation_tokens(self.module)
        window = getattr(text, "sliding_window", None)
        return parameter.dtype, parameter.device, int(text.vocab_size), window, _said(started)

    def check_compatible(self) -> None:
        """Raise InfraError if the model's dtype, device, vocabulary, sliding window or kind of adapter has changed."""
        if (now := self._kind) != self._kind_then:
            kinds = ("{} on {} with {} tokens and sliding_window={}{}".format(*one) for one in (now, self._kind_then))
            said = ", not ".join(kinds)
            raise InfraError(f"the model is {said}, as when its engine was created: create a new LocalModel or Engine")

    def detect_changes(self, *, is_idle: bool, has_prompts: bool) -> tuple[bool, bool]:
        """Whether the weights have changed since the last call, and whether they moved (or adapters or hooks changed).

        An optimizer step increments the versions of the tensors it changes. Writing through ``.data`` does not: call
        `forget` after that. Code that changes weights while sequences run must take the lock. If no other code took it,
        weights are checked only when there are prompts, which could otherwise reuse a prefix of the old weights.
        """
        # Code that moves parameters holds the lock. `taken` also counts this thread.
        is_alone, self._lock_count = not is_idle and self.lock.taken - self._lock_count <= 1, self.lock.taken
        if not is_alone and not self._snapshot.is_same:  # parameters were replaced, adapters added, or a scale set
            is_other = any("window" in name for _, name in self._snapshot.changed_settings)
            if is_other or (self.attending and self.attending[1] != self.attending_layers(self.attending[0])):
                raise InfraError(
                    "layers of the model were replaced, or their attention windows: create a new LocalModel or Engine"
                )
            self._take_snapshot()
            self._last_state = (-1, None)
        if not is_alone:
            self._hooks = [hook for held in self._snapshot.hooks for hook in held]
        if is_alone and not has_prompts:
            return False, False
        where = self._last_state[1]
        if not is_alone:
            pointers = [parameter.data_ptr() for parameter in self._snapshot.parameters]
            buffers = self._snapshot.buffers  # the previous buffers are still alive here, so ids are not reused
            held = [(id(one), one.data_ptr()) for one in buffers]
            where = pointers, held, _adapter_state(self._adapters), self._hooks
            self._buffers = buffers
        now = (self.writes, where)
        if now == self._last_state:
            return False, False
        has_moved = now[1] != self._last_state[1]
        self._last_state = now
        self.changes += 1
        if self.changes > 1 and not self._is_named:
            self.weight_version = str(self.changes - 1)
        self._drop_copies()
        return True, has_moved

    def _take_snapshot(self) -> None:
        """Describe the model as it is now."""
        self.decoder = CommonDecoder(self.module, self._configs)
        self._norms = [
            (one, partial(_rms_norm(self.device), one, epsilon))
            for one, epsilon in self.decoder.epsilons.items()
            if one not in self.decoder.fused_norms
        ]
        self._snapshot = ModuleSnapshot(self.module, self.varying)
        self._adapters = [one for one in self._snapshot.modules if hasattr(one, "merged_adapters")]  # layers of peft

    @property
    def writes(self) -> int:
        """How often parameters and buffers were written to, without writes that do not change the weights."""
        versions: int = sum([parameter._version for parameter in self._snapshot.parameters])
        return versions + self.buffer_writes - int(self.lock.undone)

    @property
    def buffer_writes(self) -> int:
        versions: int = sum([buffer._version for buffer in self._buffers])
        return versions

    def name_weights(self, version: int | str) -> None:
        """Name the weights, from the next token on. The caller must hold the lock."""
        self.weight_version, self._is_named = str(version), True

    def name_next(self) -> None:
        """Name weights that were loaded without a name: the next number, if the previous name was a number."""
        if self._is_named and self.weight_version.isdecimal():
            self.weight_version = str(int(self.weight_version) + 1)

    def forget(self) -> None:
        """Treat the weights as changed at the next check, and drop copies of them."""
        self._last_state, self._lock_count = (-1, self._last_state[1]), -2
        self._drop_copies()

    def reset(self) -> None:
        """Reset change detection and the count of changes."""
        self._snapshot = ModuleSnapshot(self.module, self.varying)
        self.forget()
        self._last_state, self.changes = (0, None), 0
        self.weight_version = self.weight_version if self._is_named else "0"

    def _drop_copies(self) -> None:
        self._steps = 0
        if self.cpu is not None:
            self.cpu.drop()

    def evaluating(self) -> AbstractContextManager[None]:
        """Switch dropout off if the module is in training mode."""
        return without_dropout(self.module) if self.module.training else nullcontext()


def _said(invocations: Sequence[Sequence[int]]) -> str:
    return "".join(f" and an adapter that applies from tokens {list(one)} on" for one in invocations)


def _rms_norm(device: torch.device) -> Callable[[Any, float, Tensor], Tensor]:
    if device.type != "cuda":
        return reference.rms_norm
    from verifiers.kernels.cuda import decode

    return decode.rms_norm


@cache
def _note_optimizer_steps() -> None:
    """Install a hook that increments parameter versions after optimizer steps; fused optimizers do not do so."""

    def increment(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        increment_version(parameter for group in optimizer.param_groups for parameter in group["params"])

    register_optimizer_step_post_hook(increment)


def _adapter_state(layers: Sequence[Any]) -> Any:
    """The active and merged adapters (peft) of every layer, and their scaling. Layers may differ."""
    scales = [tuple(one.scaling.values()) for one in layers if isinstance(getattr(one, "scaling", None), dict)]
    return [(one.disable_adapters, tuple(one.active_adapters), tuple(one.merged_adapters)) for one in layers], scales
