"""The parameters that are trained: gradients in, a step of the optimizer out, in float32 whatever the model is in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verifiers.trainers.base_config import TrainingConfig
from verifiers.trainers.optimizers import OPTIMIZERS, make_optimizer
from verifiers.trainers.stopping import NotFiniteError

LARGEST_SCALE, SCALE_GROWS_AFTER = 2.0**16, 200


class Weights:
    """Trained parameters and the optimizer that moves them.

    A parameter in half precision is too coarse for small steps: it has a float32 copy, which collects the gradients and
    is what the optimizer moves; the parameter, which the sampler reads, is rounded from it after each step. With
    ``optim="cpu_offload"`` copies, gradients and the optimizer are on the host. ``takes_each`` gradient as soon as it
    is there: a launch for each parameter, and no moment at which there are two of all.
    """

    def __init__(self, model: Any, config: TrainingConfig, *, takes_each: bool = False) -> None:
        self.config = config
        on_host = OPTIMIZERS[config.optim].on_host
        self.takes_each = takes_each or on_host
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        if not named:
            raise ValueError("no parameter of this model asks for a gradient: there is nothing to train")
        self.names = [name for name, _ in named]
        self.live = [one for _, one in named]
        self.masters = [_master(one, on_host) for one in self.live]
        self.check_finite("before training")
        self._versions = [one._version for one in self.live]
        self.scale = LARGEST_SCALE if any(one.dtype == torch.float16 for one in self.live) else 1.0
        self._good_steps = 0
        self.optimizer = make_optimizer(self.masters, config)

    def refresh(self) -> None:
        """Take over parameters that were written since the last step by others: another trainer, a warm-up."""
        with torch.no_grad():
            for live, master, version in zip(self.live, self.masters, self._versions, strict=True):
                if live is not master and live._version != version:
                    master.copy_(live)
        self._versions = [one._version for one in self.live]

    def backward(self, loss: Tensor) -> None:
        """Add a micro-batch's gradients to those of the step."""
        scaled = loss * self.scale if self.scale != 1.0 else loss
        if self.takes_each:
            with self._taking():
                scaled.backward()
            return
        scaled.backward()
        halves = [
            (live, master)
            for live, master in zip(self.live, self.masters, strict=True)
            if live is not master and live.grad is not None
        ]
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

    @contextmanager
    def _taking(self) -> Iterator[None]:
        """While this lasts a parameter's gradient is added to its copy's at once, and let go of."""
        pairs = [(live, master) for live, master in zip(self.live, self.masters, strict=True) if live is not master]
        hooks = [live.register_post_accumulate_grad_hook(partial(_take, master)) for live, master in pairs]
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
        norms = torch._foreach_norm(gradients) if gradients else [torch.zeros(())]
        norm = float(torch.linalg.vector_norm(torch.stack([one.float() for one in norms])))
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

    def check_finite(self, when: str) -> None:
        """Stop a training at the first weight that is NaN or infinite."""
        worst = torch.stack([one.float() for one in torch._foreach_norm(self.live, torch.inf)])
        if bool(worst.isfinite().all()):
            return
        wrong = [name for name, is_sound in zip(self.names, worst.isfinite().tolist(), strict=True) if not is_sound]
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise NotFiniteError(f"weights are not finite {when}: {wrong[0]}{more}")

    def clear(self) -> None:
        for one in self.masters:
            one.grad = None

    def publish(self) -> None:
        """Round the float32 copies into the parameters that everyone reads."""
        pairs = [(live, master) for live, master in zip(self.live, self.masters, strict=True) if live is not master]
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([live for live, _ in pairs], [master for _, master in pairs])
        self._versions = [one._version for one in self.live]

    def _rescale(self, is_sound: bool) -> None:
        """Float16 gradients are scaled up so that small ones are not lost; overflow halves the scale."""
        if self.scale == 1.0:
            return
        self._good_steps = self._good_steps + 1 if is_sound else 0
        if not is_sound:
            self.scale = max(self.scale / 2, 2.0)
        elif self._good_steps % SCALE_GROWS_AFTER == 0:
            self.scale = min(self.scale * 2, LARGEST_SCALE)


def _master(parameter: Tensor, on_host: bool) -> Tensor:
    if on_host:
        return parameter.detach().to("cpu", torch.float32, copy=True).requires_grad_()
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().float().clone().requires_grad_()


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
