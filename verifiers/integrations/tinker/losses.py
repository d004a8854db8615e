"""Tinker's named losses, in terms of `verifiers.trainers.losses`; all are sums over tokens.

Each function takes the concatenated tokens of a micro-batch: their logprobs with gradients, the data's arrays, and the
index of each token's datum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from verifiers.errors import RequestRefusedError
from verifiers.trainers.losses import Objective, cispo, clipped, k3, sequence_mean

if TYPE_CHECKING:
    from torch import Tensor

Inputs = Mapping[str, Any]
Config = Mapping[str, float | str]

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
FREE = Objective(epsilon=float("inf"), epsilon_high=float("inf"))
STABLE = Objective(kind="cispo", epsilon_high=1.0)  # a ratio of at most 2, without a gradient


def cross_entropy(logprobs: Tensor, inputs: Inputs, config: Config, sequences: Tensor) -> Tensor:
    """−w log p; without weights, w = 1."""
    return -logprobs * inputs["weights"] if "weights" in inputs else -logprobs


def importance_sampling(logprobs: Tensor, inputs: Inputs, config: Config, sequences: Tensor) -> Tensor:
    """−r A."""
    loss_N: Tensor = clipped(logprobs, inputs["logprobs"], inputs["advantages"], sequences, FREE)[0]
    return loss_N


def ppo(logprobs: Tensor, inputs: Inputs, config: Config, sequences: Tensor) -> Tensor:
    """−min(r A, clip(r) A)."""
    loss_N: Tensor = clipped(logprobs, inputs["logprobs"], inputs["advantages"], sequences, _clip(inputs, config))[0]
    return loss_N


def bounded_cispo(logprobs: Tensor, inputs: Inputs, config: Config, sequences: Tensor) -> Tensor:
    """−clip(r) A log p, without a gradient of the ratio. Unlike in the trainer's CISPO, it has a lower bound too."""
    low, high = _bounds(inputs, config)
    ratio_N = (logprobs.detach() - inputs["logprobs"]).exp().clamp(low, high)
    return -ratio_N * inputs["advantages"] * logprobs


def dro(logprobs: Tensor, inputs: Inputs, config: Config, sequences: Tensor) -> Tensor:
    """−(A log p − β/2 (log p − log q)²)."""
    gap_N = logprobs - inputs["logprobs"]
    return -(logprobs * inputs["advantages"] - 0.5 * float(config.get("beta", 0.05)) * gap_N * gap_N)


def gspo(logprobs: Tensor, inputs: Inputs, config: Config, sequences: Tensor) -> Tensor:
    """−min(s A, clip(s) A), where s has the value of the sequence's mean ratio and the gradient of the token's logprob.

    The mean is over the tokens in ``sequence_ratio_mask``, or without it over tokens with a nonzero advantage.
    """
    is_in_N = (inputs["sequence_ratio_mask"] if "sequence_ratio_mask" in inputs else inputs["advantages"]) != 0
    detached_N = logprobs.detach()
    gap_N = (detached_N - inputs["logprobs"]) * is_in_N
    share_N = sequence_mean(is_in_N.to(gap_N.dtype), sequences).clamp(min=1e-12)
    mean_N = sequence_mean(gap_N, sequences) / share_N
    own_N = mean_N + logprobs - detached_N  # every token gets the sequence's mean ratio
    loss_N: Tensor = clipped(own_N, own_N.new_zeros(()), inputs["advantages"], sequences, _clip(inputs, config))[0]
    return loss_N


def stable_reinforce(logprobs: Tensor, inputs: Inputs, config: Config, sequences: Tensor) -> Tensor:
    """−min(r, 2) A log p + kl_coeff KL(p ‖ q), without a gradient of the ratio; the KL estimate is never negative."""
    loss_N, _ = cispo(logprobs, inputs["logprobs"], inputs["advantages"], sequences, STABLE)
    is_sampled_N = (inputs["logprobs"] != 0) | (inputs["advantages"] != 0)
    kl_N = k3(logprobs, inputs["logprobs"]) * is_sampled_N
    total_N: Tensor = loss_N + float(config.get("kl_coeff", 0.01)) * kl_N
    return total_N


def _bounds(inputs: Inputs, config: Config) -> tuple[Any, Any]:
    """The bounds of the ratio: per token, per request, or the defaults."""
    import torch

    found = [inputs[name] if name in inputs else torch.tensor(float(config.get(name, CLIP[name]))) for name in CLIP]
    return found[0].to(inputs["logprobs"].device), found[1].to(inputs["logprobs"].device)


def _clip(inputs: Inputs, config: Config) -> Objective:
    low, high = _bounds(inputs, config)
    return Objective(epsilon=1.0 - low, epsilon_high=high - 1.0)


LossFunction = Callable[..., Any]
_POLICY = ("logprobs", "advantages")
# name → the function, its required arrays besides target_tokens, its optional arrays, its settings
LOSSES: dict[str, tuple[LossFunction, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "cross_entropy": (cross_entropy, (), ("weights",), ()),
    "importance_sampling": (importance_sampling, _POLICY, (), ()),
    "ppo": (ppo, _POLICY, tuple(CLIP), tuple(CLIP)),
    "cispo": (bounded_cispo, _POLICY, tuple(CLIP), tuple(CLIP)),
    "dro": (dro, _POLICY, (), ("beta",)),
    "gspo": (gspo, _POLICY, (*CLIP, "sequence_ratio_mask"), tuple(CLIP)),
    "stable_reinforce": (stable_reinforce, _POLICY, (), ("kl_coeff",)),
}
_WITHOUT_EFFECT = frozenset(("target_tokens", "weights", "mask"))  # inputs that clients send but losses ignore


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def check_loss(name: str, inputs: Inputs, config: Config, where: str) -> None:
    """Raise for an unknown loss, missing or unknown inputs, or unknown settings."""
    if name not in LOSSES:
        raise RequestRefusedError(f"unknown loss {name!r:.80}; there are {', '.join((*LOSSES, 'custom'))}")
    _, needed, may, settings = LOSSES[name]
    if missing := [one for one in needed if one not in inputs]:
        raise RequestRefusedError(f"{where} has no {missing[0]}, which {name} needs")
    if unknown := inputs.keys() - {*needed, *may} - _WITHOUT_EFFECT:
        raise RequestRefusedError(f"{where}: {name} has no input {min(unknown)!r}")
    if unknown := config.keys() - set(settings):
        known = f"it has {', '.join(settings)}" if settings else "it has none"
        raise RequestRefusedError(f"{name} has no setting {min(unknown)!r}; {known}")
    if wrong := [key for key, value in config.items() if not _is_number(value)]:
        raise RequestRefusedError(f"{name}: {wrong[0]} must be a number, not {config[wrong[0]]!r:.80}")
