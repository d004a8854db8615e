"""The parameters that are trained: gradients in, a step of the optimizer out, in float32 whatever the model is in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verifiers.trainers.base_config import TrainingConfig
from verifiers.trainers.distributed.processes import sum_gradients
from verifiers.trainers.learning.logprobs import TokenScorer
from verifiers.trainers.memory.optimizers import OPTIMIZERS, make_optimizer
from verifiers.trainers.stopping import NotFiniteError

LARGEST_SCALE, SCALE_GROWS_AFTER = 2.0**16, 200


class Weights:
    """Trained parameters and the optimizer that moves them.

    A parameter in half precision is too coarse for small steps: it has a float32 copy, which collects the gradients and
    is what the optimizer moves; the parameter, which the sampler reads, is rounded from it after each step. With
    ``optim="cpu_offload"`` copies, gradients and the optimizer are on the host. ``takes_each`` gradient as soon as it
    is there: a launch for each parameter, and no moment at which there are two of all.

    Here each of several processes holds all of them; `distributed.sharding` has those that hold a part.
    """

    is_sharded = False  # whether a forward or backward pass is one of all processes together

    def __init__(self, model: Any, config: TrainingConfig, processes: Any = None, *, takes_each: bool = False) -> None:
        self.module, self.config, self.processes = model, config, processes
        self._is_on_host = OPTIMIZERS[config.optim].on_host
        self.takes_each = takes_each or self._is_on_host
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        if not named:
            raise ValueError("no parameter of this model asks for a gradient: there is nothing to train")
        self.names = [name for name, _ in named]
        self.live = [one for _, one in named]
        self.masters = [self._master(one) for one in self.live]
        self._copies = [pair for pair in zip(self.live, self.masters, strict=True) if pair[0] is not pair[1]]
        self.check_finite("before training")
        self._versions = [one._version for one in self.live]
        self.scale = LARGEST_SCALE if any(one.dtype == torch.float16 for one in self.live) else 1.0
        self._good_steps = 0
        self.optimizer = make_optimizer(self.masters, config)

    def refresh(self) -> None:
        """Take over parameters that were written since the last step by others: another trainer, a warm-up."""
        with torch.no_grad():
            for live, master, version in zip(self.live, self.masters, self._versions, strict=True):
                is_written = live is not master and live._version != version  # a proof puts back what it changes
                if is_written and not torch.equal(master.to(live.device, live.dtype), live):
                    master.copy_(live)
        self._versions = [one._version for one in self.live]

    @property
    def device(self) -> torch.device:
        """Where the model is computed."""
        return self.live[0].device

    def scorer(self) -> TokenScorer:
        """What computes logprobs with the parameters that are trained."""
        return TokenScorer(self.module)

    def backward(self, loss: Tensor, *, is_last: bool = True) -> None:
        """Add a micro-batch's gradients to those of the step; ``is_last``: there are no more."""
        scaled = loss * self.scale if self.scale != 1.0 else loss
        if self.takes_each:
            with self._taking():
                scaled.backward()
            return
        scaled.backward()
        halves = [(live, master) for live, master in self._copies if live.grad is not None]
        first = [(live, master) for live, master in halves if master.grad is None]
        further = [(live, master) for live, master in halves if master.grad is not None]
        if first:
            grads = _empty_as([master for _, master in first])
            torch._foreach_copy_(grads, [live.grad for live, _ in first])
            for (_, master), grad in zip(first, grads, strict=True):
                master.grad = grad
        if further:
            torch._foreach_add_([master.grad for _, master in further], [live.grad for live, _ in further])
        for live, _ in halves:
            live.grad = None

    def collect(self) -> None:
        """Add up the gradients of all processes, once all of a step are there."""
        sum_gradients(self.processes, self.masters)

    @contextmanager
    def _taking(self) -> Iterator[None]:
        """While this lasts a parameter's gradient is added to its copy's at once, and let go of."""
        hooks = [live.register_post_accumulate_grad_hook(partial(_take, master)) for live, master in self._copies]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def gradients(self) -> list[Tensor]:
        return [master.grad for master in self.masters if master.grad is not None]

    def step(self, learning_rate: float) -> float:
        """Move the parameters; the norm of the gradient before it was clipped. NaN or infinity moves nothing."""
        gradients = self.gradients()
        if self.scale != 1.0 and gradients:
            torch._foreach_div_(gradients, self.scale)
        norm = self._norm(gradients)
        is_sound = math.isfinite(norm)
        if is_sound:
            most = self.config.max_grad_norm
            if most is not None and norm > most:
                torch._foreach_mul_(gradients, most / (norm + 1e-6))
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            self.publish()
        self._rescale(is_sound)
        self.clear()
        self.check_finite("after a step")
        return norm

    def _norm(self, gradients: list[Tensor]) -> float:
        norms = torch._foreach_norm(gradients) if gradients else [torch.zeros(())]
        return float(torch.linalg.vector_norm(torch.stack([one.float() for one in norms])))

    def check_finite(self, when: str) -> None:
        """Stop a training at the first weight that is NaN or infinite."""
        wrong = self._not_finite()
        if not wrong:
            return
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise NotFiniteError(f"weights are not finite {when}: {wrong[0]}{more}")

    def _not_finite(self) -> list[str]:
        worst = torch.stack([one.float() for one in torch._foreach_norm(self.live, torch.inf)])
        if bool(worst.isfinite().all()):
            return []
        return [name for name, is_sound in zip(self.names, worst.isfinite().tolist(), strict=True) if not is_sound]

    def clear(self) -> None:
        for one in self.masters:
            one.grad = None

    def finish(self) -> None:
        """Have the model that was handed in hold the weights, wherever it is, at the end of a training."""

    def publish(self) -> None:
        """Round the float32 copies into the parameters that everyone reads."""
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
        """The trained parameters by name, and their shapes, of which a process may hold a part."""
        return {name: tuple(one.shape) for name, one in zip(self.names, self.live, strict=True)}

    def tensors(self) -> dict[str, Tensor]:
        """The weights and the optimizer's state by name (see `distributed.shards`), to be written or read."""
        found = {}
        for i, (name, master) in enumerate(zip(self.names, self.masters, strict=True)):
            found[f"weights.{name}"] = self.spread(i, master.detach())
            for key, value in self.optimizer.state.get(master, {}).items():
                found[f"optimizer.{name}.{key}"] = self.spread(i, value) if value.shape == master.shape else value
        return found

    def spread(self, i: int, part: Tensor) -> Tensor:
        """What this process holds of a tensor of the shape of a parameter, as a part of the whole."""
        return part

    def make_room(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Have an optimizer's state with these entries; their values are taken afterwards."""
        is_fused = any(group.get("fused") for group in self.optimizer.param_groups)
        for name, master, live in zip(self.names, self.masters, self.live, strict=True):
            prefix = f"optimizer.{name}."
            for entry in [one for one in shapes if one.startswith(prefix)]:
                is_whole = shapes[entry] == tuple(live.shape) and shapes[entry] != ()
                number = torch.zeros((), device=master.device if is_fused else "cpu")
                room = torch.zeros_like(master, requires_grad=False) if is_whole else number
                self.optimizer.state[master][entry.removeprefix(prefix)] = room

    def take(self, read: Callable[[dict[str, Tensor]], Any]) -> None:
        """Have a function fill the tensors, and go on with what it put there."""
        with torch.no_grad():
            read(self.tensors())
        self.publish()

    def _rescale(self, is_sound: bool) -> None:
        """Float16 gradients are scaled up so that small ones are not lost; overflow halves the scale."""
        if self.scale == 1.0:
            return
        self._good_steps = self._good_steps + 1 if is_sound else 0
        if not is_sound:
            self.scale = max(self.scale / 2, 2.0)
        elif self._good_steps % SCALE_GROWS_AFTER == 0:
            self.scale = min(self.scale * 2, LARGEST_SCALE)


def _take(master: Tensor, live: Tensor) -> None:
    grad = live.grad.to(master.device)  # in its own precision: half the way between card and host
    if master.grad is None:
        master.grad = grad.float()
    else:
        master.grad.add_(grad)
    live.grad = None


def _empty_as(masters: list[Tensor]) -> list[Tensor]:
    """Room for numbers of these shapes: parts of one tensor, because each of its own takes the host as long."""
    if len({one.device for one in masters}) > 1:
        return [torch.empty_like(one) for one in masters]
    sizes = [one.numel() for one in masters]
    parts = torch.empty(sum(sizes), device=masters[0].device).split(sizes)
    return [part.view(one.shape) for part, one in zip(parts, masters, strict=True)]


def learning_rate(config: TrainingConfig, step: int, total: int) -> float:
    """The rate of a step (counted from 0): up in the warm-up, then as the schedule says.

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
