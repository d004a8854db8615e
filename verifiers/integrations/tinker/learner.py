"""Training requests → gradients, updates and logprobs of one adapter of the shared model."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verifiers.errors import RequestRefusedError
from verifiers.integrations.tinker.adapters import Adapters, LoraShape, Snapshot
from verifiers.integrations.tinker.custom_losses import CustomLoss
from verifiers.integrations.tinker.data import Datum, TrainingRequest
from verifiers.integrations.tinker.losses import LOSSES
from verifiers.integrations.tinker.scoring import Scoring
from verifiers.trainers.base_config import TrainingConfig
from verifiers.trainers.threads import sensible_threads
from verifiers.trainers.weights import Weights

MOST_RATE = 10.0
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}


class Learner:
    """One training: an adapter, its accumulated gradients, and its optimizer."""

    def __init__(self, adapters: Adapters, scoring: Scoring, shape: LoraShape, seed: int | None = None) -> None:
        self.shape = shape
        self._adapters, self._scoring = adapters, scoring
        self.adapter = adapters.add(shape, seed)
        adapters.use(self.adapter)
        self._config = TrainingConfig(max_grad_norm=None)
        self.weights = Weights(adapters.model, self._config)

    def learn(self, request: TrainingRequest, custom: CustomLoss | None) -> tuple[list[Any], dict[str, float]]:
        """The logprobs of each datum's targets, and metrics. The gradients accumulate until the next step."""
        self._adapters.use(self.adapter)
        found: list[Any] = [None] * len(request.data)
        figures: dict[str, float] = {"loss:sum": 0.0}
        with sensible_threads(self._adapters.model), torch.set_grad_enabled(not request.forward_only):
            for members, logprob_N, sequence_N in self._scoring.logprobs(request.data):
                data = [request.data[i] for i in members]
                loss, more = _loss(request, custom, data, logprob_N, sequence_N)
                value = float(loss.detach())
                if not math.isfinite(value):
                    self.weights.clear()
                    raise RequestRefusedError(
                        f"the loss is {value}: the weights of this training or the numbers of the request are too "
                        "large; the gradients since the last step are discarded"
                    )
                if not request.forward_only:
                    self.weights.backward(loss)
                figures["loss:sum"] += value
                for name, value in more.items():
                    figures[name] = figures.get(name, 0.0) + value
                _keep(found, members, data, logprob_N.detach().cpu().numpy())
        return found, {
            name: value / len(request.data) if name.endswith(":mean") else value for name, value in figures.items()
        }

    def step(self, given: Mapping[str, Any]) -> dict[str, float]:
        """Update the adapter by AdamW, and clear the gradients."""
        adam = read_adam(given)
        self._adapters.use(self.adapter)
        for group in self.weights.optimizer.param_groups:
            group.update(betas=(adam["beta1"], adam["beta2"]), eps=adam["eps"], weight_decay=adam["weight_decay"])
        self._config.max_grad_norm = adam["grad_clip_norm"] if adam["grad_clip_norm"] > 0 else None
        norm = self.weights.step(adam["learning_rate"])
        if not math.isfinite(norm):
            raise RequestRefusedError(f"the norm of the gradients is {norm}: the weights were not changed")
        return {"grad_norm": norm}

    # --- saving and loading ---------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        return self._adapters.read(self.adapter, self.shape)

    def state(self) -> dict[str, Any]:
        """The state of the optimizer, and the float32 master weights of weights in half precision."""
        return {
            "optimizer": self.weights.optimizer.state_dict(),
            "masters": [one.detach() for one in self.weights.masters],
        }

    def restore(self, snapshot: Snapshot, state: Mapping[str, Any] | None) -> None:
        """Restore a snapshot; without a ``state`` the optimizer is reset."""
        if snapshot.shape != self.shape:
            raise RequestRefusedError(f"this training has the LoRA {self.shape}, but the weights {snapshot.shape}")
        before, old = self.snapshot(), self.weights
        self._adapters.write(self.adapter, snapshot)
        self._adapters.use(self.adapter)
        try:
            weights = Weights(self._adapters.model, self._config)
            if state is not None:
                _load_state(weights, state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            self._adapters.write(self.adapter, before)
            old.publish()
            raise RequestRefusedError(
                f"the saved state of the optimizer does not match this training: {error}"
            ) from error
        old.clear()  # the gradients of the previous weights
        self.weights = weights

    def close(self) -> None:
        self._adapters.remove(self.adapter)


def _load_state(weights: Weights, state: Mapping[str, Any]) -> None:
    with torch.no_grad():
        for master, saved in zip(weights.masters, state["masters"], strict=True):
            master.copy_(saved)
    weights.publish()
    weights.optimizer.load_state_dict(state["optimizer"])


def read_adam(given: Mapping[str, Any]) -> dict[str, float]:
    """Check the settings of one optimizer step.

    >>> read_adam({"learning_rate": 0.001})["beta2"]
    0.95
    """
    if unknown := given.keys() - {*ADAM, "type"}:
        raise RequestRefusedError(f"Adam has no setting {min(unknown)!r}; it has {', '.join(ADAM)}")
    read = {name: given.get(name, usual) for name, usual in ADAM.items()}
    for name, value in read.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= sys.float_info.max or (name.startswith("beta") and value >= 1):
            raise RequestRefusedError(f"{name} of a step is out of range: {value!r:.80}")
    if read["learning_rate"] > MOST_RATE:
        raise RequestRefusedError(
            f"the learning rate is {read['learning_rate']!r:.80}: Adam changes every weight by about that, and more "
            f"than {MOST_RATE:g} destroys the model; usual values are 1e-6 to 1e-3"
        )
    if read["learning_rate"] * read["weight_decay"] > 1:
        raise RequestRefusedError(
            f"learning_rate × weight_decay is {read['learning_rate'] * read['weight_decay']:g}: above 1 a step flips "
            "the sign of all weights"
        )
    return {name: float(value) for name, value in read.items()}


def _loss(
    request: TrainingRequest, custom: CustomLoss | None, data: Sequence[Datum], logprob_N: Tensor, sequence_N: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """The summed loss of a micro-batch, and the metrics of a custom loss."""
    if custom is not None:
        return _custom_loss(custom, data, logprob_N)
    inputs = {name: _column(data, name, logprob_N.device) for name in data[0].inputs if name != "target_tokens"}
    return LOSSES[request.loss_fn][0](logprob_N, inputs, request.config, sequence_N).sum(), {}


def _custom_loss(custom: CustomLoss, data: Sequence[Datum], logprob_N: Tensor) -> tuple[Tensor, dict[str, float]]:
    total, figures = logprob_N.new_zeros(()), dict[str, float]()
    parts = logprob_N.split([one.targets.size for one in data])
    for one, part in zip(data, parts, strict=True):
        inputs = {name: torch.from_numpy(np.array(value)).to(part.device) for name, value in one.inputs.items()}
        try:
            loss, more = custom(part.view(one.targets.shape), inputs)
        except RequestRefusedError:
            raise
        except Exception as error:  # the client's function
            raise RequestRefusedError(f"loss {custom.name!r} failed: {type(error).__name__}: {error}") from error
        total = total + loss
        for name, value in more.items():
            figures[name] = figures.get(name, 0.0) + value
    return total, figures


def _column(data: Sequence[Datum], name: str, device: torch.device) -> Tensor:
    """One input of all data, concatenated, with one value per target."""
    parts = []
    for one in data:
        values, shape = np.asarray(one.inputs[name], np.float32), one.targets.shape
        if values.ndim == 1 and len(shape) == 2:
            values = values[:, None]
        parts.append(np.broadcast_to(values, shape).reshape(-1))
    return torch.from_numpy(np.concatenate(parts)).to(device)


def _keep(found: list[Any], members: Sequence[int], data: Sequence[Datum], logprobs: Any) -> None:
    ends = np.cumsum([one.targets.size for one in data])
    for i, one, part in zip(members, data, np.split(logprobs, ends[:-1]), strict=True):
        found[i] = part.reshape(one.targets.shape)
