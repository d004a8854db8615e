"""The trained parameters and their float32 master copies: gradients are accumulated, the optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verifiers.trainers.base_config import TrainingConfig
from verifiers.trainers.distributed.processes import shortfall, sum_gradients
from verifiers.trainers.learning.logprobs import TokenScorer
from verifiers.trainers.learning.micro_batches import MicroBatch, TrainSample, check_tokens, idle_batch, micro_batches
from verifiers.trainers.memory.optimizers import OPTIMIZERS, make_optimizer
from verifiers.trainers.stopping import NotFiniteError

LARGEST_SCALE, SCALE_GROWS_AFTER = 2.0**16, 200


class Weights:
    """Trained parameters (``live``, which the sampler reads) and the optimizer that updates them.

    A parameter in half precision has a float32 master copy, because rounding would lose small steps. Gradients are
    accumulated in the copy, the optimizer updates it, and it is rounded into the parameter after each step. With
    ``optim="cpu_offload"``, master copies, gradients and optimizer state are on the host. Gradients are moved to the
    master copies one by one during the backward pass, so that there are never two full sets.

    Here every process holds all weights; in `distributed.sharding` each process holds a part.
    """

    is_sharded = False  # whether forward and backward passes are collective (all processes run them together)

    def __init__(self, model: Any, config: TrainingConfig, processes: Any = None) -> None:
        self.module, self.config, self.processes = model, config, processes
        self._is_on_host = OPTIMIZERS[config.optim].on_host
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        if not named:
            raise ValueError("there is nothing to train: no parameter of this model has requires_grad=True")
        self.names = [name for name, _ in named]
        self.live = [one for _, one in named]
        self.masters = [self._master(one) for one in self.live]
        self._copies = [pair for pair in zip(self.live, self.masters, strict=True) if pair[0] is not pair[1]]
        self.check_finite("before training")
        self._versions = [one._version for one in self.live]
        self.scale = LARGEST_SCALE if any(one.dtype == torch.float16 for one in self.live) else 1.0
        self.good_steps = 0  # since the scaled loss last overflowed
        self.optimizer = make_optimizer(self.masters, config)

    def refresh(self) -> None:
        """Update master copies of parameters that were written since the last step, for example by another trainer."""
        with torch.no_grad():
            for live, master, version in zip(self.live, self.masters, self._versions, strict=True):
                is_written = live is not master and live._version != version
                # The proof of layouts changes and restores parameters: unchanged ones keep their precise master copy.
                if is_written and not torch.equal(master.to(live.device, live.dtype), live):
                    master.copy_(live)
        self._versions = [one._version for one in self.live]

    @property
    def device(self) -> torch.device:
        """The device that the model runs on."""
        return self.live[0].device

    def scorer(self) -> TokenScorer:
        """Computes logprobs with the trained parameters."""
        return TokenScorer(self.module)

    def micro_batches(self, sequences: Sequence[TrainSample], pad_id: int, **limits: Any) -> list[MicroBatch]:
        """Micro-batches to train on; if passes are collective, padded to the same number in all processes."""
        made = [check_tokens(one, self.module.config) for one in micro_batches(sequences, pad_id=pad_id, **limits)]
        return made + [idle_batch(pad_id)] * (shortfall(self.processes, len(made)) if self.is_sharded else 0)

    def backward(self, loss: Tensor, *, is_last: bool = True) -> None:
        """Add the gradients of a micro-batch to those of the step; ``is_last`` marks the step's last micro-batch."""
        scaled = loss * self.scale if self.scale != 1.0 else loss
        # As soon as a gradient is computed, it is added to the gradient of the master copy and freed.
        hooks = [live.register_post_accumulate_grad_hook(partial(_move, master)) for live, master in self._copies]
        try:
            scaled.backward()
        finally:
            for hook in hooks:
                hook.remove()

    def collect(self) -> None:
        """Sum the gradients over all processes, after the last micro-batch of a step."""
        sum_gradients(self.processes, self.masters)

    def gradients(self) -> list[Tensor]:
        return [master.grad for master in self.masters if master.grad is not None]

    def step(self, learning_rate: float) -> float:
        """One optimizer step, skipped if the gradient is not finite; returns the gradient norm before clipping."""
        gradients = self.gradients()
        if self.scale != 1.0 and gradients:
            torch._foreach_div_(gradients, self.scale)
        norm = self._norm(gradients)
        is_finite = math.isfinite(norm)
        if is_finite:
            most = self.config.max_grad_norm
            if most is not None and norm > most:
                torch._foreach_mul_(gradients, most / (norm + 1e-6))
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            self.publish()
        self._update_scale(is_finite)
        self.clear()
        self.check_finite("after a step")
        return norm

    def _norm(self, gradients: list[Tensor]) -> float:
        norms = torch._foreach_norm(gradients) if gradients else [torch.zeros(())]
        return float(torch.linalg.vector_norm(torch.stack([one.float() for one in norms])))

    def check_finite(self, when: str) -> None:
        """Raise NotFiniteError if a weight is NaN or infinite."""
        wrong = self._not_finite()
        if not wrong:
            return
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise NotFiniteError(f"weights are not finite {when}: {wrong[0]}{more}")

    def _not_finite(self) -> list[str]:
        worst = torch.stack([one.float() for one in torch._foreach_norm(self.live, torch.inf)])
        if bool(worst.isfinite().all()):
            return []
        return [name for name, is_finite in zip(self.names, worst.isfinite().tolist(), strict=True) if not is_finite]

    def clear(self) -> None:
        for one in self.masters:
            one.grad = None

    def finish(self) -> None:
        """At the end of a training, write the weights to the model that was passed in, if they are held elsewhere."""

    def publish(self) -> None:
        """Round the master copies into the parameters that the model runs with."""
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_(*map(list, zip(*self._copies, strict=True)))
        self._versions = [one._version for one in self.live]

    def _master(self, parameter: Tensor) -> Tensor:
        if self._is_on_host:
            return parameter.detach().to("cpu", torch.float32, copy=True).requires_grad_()
        if parameter.dtype == torch.float32:
            return parameter
        return parameter.detach().float().clone().requires_grad_()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The full (unsharded) shapes of the trained parameters, by name."""
        return {name: tuple(one.shape) for name, one in zip(self.names, self.live, strict=True)}

    def tensors(self) -> dict[str, Tensor]:
        """The weights and the optimizer state by name, for saving and loading (see `distributed.shards`)."""
        found = {}
        for i, (name, master) in enumerate(zip(self.names, self.masters, strict=True)):
            found[f"weights.{name}"] = self.spread(i, master.detach())
            for key, value in self.optimizer.state.get(master, {}).items():
                found[f"optimizer.{name}.{key}"] = self.spread(i, value) if value.shape == master.shape else value
        return found

    def spread(self, i: int, part: Tensor) -> Tensor:
        """This process's part of a tensor shaped like parameter ``i``; a distributed tensor if that is sharded."""
        return part

    def make_room(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Allocate optimizer state for these entries, whose values are loaded afterwards."""
        is_fused = any(group.get("fused") for group in self.optimizer.param_groups)
        for name, master, live in zip(self.names, self.masters, self.live, strict=True):
            prefix = f"optimizer.{name}."
            for entry in [one for one in shapes if one.startswith(prefix)]:
                is_per_element = shapes[entry] == tuple(live.shape) and shapes[entry] != ()
                number = torch.zeros((), device=master.device if is_fused else "cpu")
                value = torch.zeros_like(master, requires_grad=False) if is_per_element else number
                self.optimizer.state[master][entry.removeprefix(prefix)] = value

    def take(self, read: Callable[[dict[str, Tensor]], Any]) -> None:
        """Load weights and optimizer state with a function that fills the tensors in place."""
        with torch.no_grad():
            read(self.tensors())
        self.publish()

    def _update_scale(self, is_finite: bool) -> None:
        """Dynamic loss scaling against underflow in float16: overflow halves the scale, which grows again later."""
        if self.scale == 1.0:
            return
        self.good_steps = self.good_steps + 1 if is_finite else 0
        if not is_finite:
            self.scale = max(self.scale / 2, 2.0)
        elif self.good_steps % SCALE_GROWS_AFTER == 0:
            self.scale = min(self.scale * 2, LARGEST_SCALE)


def _move(master: Tensor, live: Tensor) -> None:
    """Add the gradient of a parameter to that of its master copy, and free it."""
    grad = live.grad.to(master.device)  # cast after the copy: half the bytes between GPU and host
    if master.grad is None:
        master.grad = grad.float()
    else:
        master.grad.add_(grad)
    live.grad = None


def learning_rate(config: TrainingConfig, step: int, total: int) -> float:
    """The learning rate of a step (counted from 0): linear warm-up, then the schedule.

    >>> config = TrainingConfig(learning_rate=1.0, warmup_steps=2, lr_scheduler_type="linear")
    >>> [round(learning_rate(config, step, 6), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(total - warmup, 1)
    if config.lr_scheduler_type == "linear":
        return config.learning_rate * (1.0 - progress)
    if config.lr_scheduler_type == "cosine":
        return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate
