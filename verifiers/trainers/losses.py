"""Logprobs of sampled tokens become a loss: the objectives of group-relative methods, which `METHODS` defines.

A loss is a function of tensors over the concatenated trained tokens of a micro-batch (axis T, without the environment's
tokens). Its parameters name the tensors that it needs (`INPUTS`). It returns the loss of each token, or a pair: these
losses, and which tokens were clipped. `GRPOTrainer(loss=...)` takes a function of your own. Torch is not imported here,
because the configuration imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from verifiers.rubrics.signature import name_of
from verifiers.trainers.functions import CallByName

if TYPE_CHECKING:
    from torch import Tensor

INPUTS = {
    "logprobs": "of the current policy; gradients flow only through these and the entropies",
    "old_logprobs": "of the policy that sampled",
    "advantages": "how much better than expected",
    "sequences": "the sequence number of each token: 0, 0, 0, 1, 1, …",
    "ref_logprobs": "of the reference model; None without kl_coef",
    "entropies": "of the distribution that each token was sampled from, in nats",
    "objective": "the settings: epsilon, epsilon_high, delta, importance_cap, …",
}

Level = Literal["token", "sequence"]
MeanOver = Literal["rollouts", "tokens", "max_new_tokens"]
MAX_LOG_RATIO = 20.0  # some samplers return a logprob of -inf or -9999, whose ratio would dominate the step
CORRECTIONS: tuple[str, ...] = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The loss with its settings: clip range, importance caps, KL coefficient, correction for the sampler."""

    kind: str = "dr_grpo"
    level: Level | None = None  # of the ratio; None: the method's default
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    importance_cap: float | None = None
    kl_coef: float = 0.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    correction: str | None = None  # for the trainer/sampler mismatch, one of CORRECTIONS
    correction_min: float | None = None
    correction_max: float | None = 3.0

    @property
    def ratio_level(self) -> Level:
        return self.level or METHODS[self.kind].level

    @property
    def has_sequence_ratios(self) -> bool:
        """Whether the loss or the correction for the sampler uses a sequence-level ratio."""
        return self.ratio_level == "sequence" or str(self.correction).startswith("sequence")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLosses:
    """For each token: its loss, the ratio of new to old policy, whether it was clipped, its KL to the reference."""

    loss_T: Tensor
    ratio_T: Tensor
    is_clipped_T: Tensor
    kl_T: Tensor | None


# --- the loss of a token ------------------------------------------------------------------------------------------


def clipped(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor, objective: Objective
) -> tuple[Tensor, Tensor]:
    """PPO's −min(r A, clip(r) A); ``delta`` bounds r from above, ``importance_cap`` the weight of a token."""
    ratio_T = ratios(logprobs, old_logprobs, sequences, objective)
    low, high = 1.0 - objective.epsilon, 1.0 + objective.epsilon_high
    bounded_T = ratio_T if objective.delta is None else ratio_T.clamp(max=objective.delta)
    clipped_T = ratio_T.clamp(low, high)
    is_clipped_T = ((ratio_T < low) & (advantages < 0)) | ((ratio_T > high) & (advantages > 0))
    loss_T = -(bounded_T * advantages).minimum(clipped_T * advantages)
    if objective.importance_cap is not None:
        weight_T = bounded_T.where(bounded_T * advantages < clipped_T * advantages, clipped_T)
        loss_T = loss_T * truncation(weight_T, objective.importance_cap)
    return loss_T, is_clipped_T


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor, objective: Objective
) -> tuple[Tensor, Tensor]:
    """−min(r, 1 + ε_high) A log p, with r detached: every token has a gradient, even if it is clipped."""
    ratio_T = ratios(logprobs, old_logprobs, sequences, objective)
    most = 1.0 + objective.epsilon_high
    if objective.importance_cap is not None:
        most = min(most, objective.importance_cap)
    return -ratio_T.detach().clamp(max=most) * advantages * logprobs, ratio_T > most


def sapo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor, objective: Objective
) -> tuple[Tensor, Tensor]:
    """−σ(τ (r − 1)) 4/τ A: a sigmoid gate instead of the clip, with a temperature τ for each sign of the advantage."""
    ratio_T = ratios(logprobs, old_logprobs, sequences, objective)
    is_good_T = (advantages > 0).to(ratio_T.dtype)
    tau_T = objective.sapo_temperature_pos * is_good_T + objective.sapo_temperature_neg * (1.0 - is_good_T)
    gate_T = (tau_T * (ratio_T - 1.0)).sigmoid() * 4.0 / tau_T
    loss_T = -gate_T * advantages
    if objective.importance_cap is not None:
        loss_T = loss_T * truncation(gate_T, objective.importance_cap)
    return loss_T, ratio_T != ratio_T  # nothing is clipped


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """The definition of a ``loss_type``.

    ``clip`` is epsilon below and above 1 (None: the same above). With ``bounds_itself``, ``importance_cap`` applies
    only if it was set explicitly. ``reads`` names the settings that only some methods use.
    """

    loss: Callable[..., Any] = clipped
    mean_over: MeanOver
    advantage: str = "grpo"
    level: Level = "token"
    clip: tuple[float, float | None] = (0.2, None)
    bounds_itself: bool = False
    reads: tuple[str, ...] = ("epsilon", "epsilon_high", "delta")


METHODS: dict[str, Method] = {
    "grpo": Method(mean_over="rollouts"),
    "dr_grpo": Method(mean_over="max_new_tokens", advantage="dr_grpo"),
    "dapo": Method(mean_over="tokens", clip=(0.2, 0.28)),
    "bnpo": Method(mean_over="tokens"),
    "gspo": Method(mean_over="rollouts", level="sequence", clip=(3e-4, 4e-4)),
    "cispo": Method(loss=cispo, mean_over="tokens", clip=(0.2, 5.0), bounds_itself=True, reads=("epsilon_high",)),
    "sapo": Method(
        loss=sapo, mean_over="rollouts", bounds_itself=True, reads=("sapo_temperature_pos", "sapo_temperature_neg")
    ),
}


# --- a micro-batch ------------------------------------------------------------------------------------------------


class Loss:
    """A loss function with its settings; calling it returns the checked loss of each token."""

    def __init__(self, objective: Objective, function: Callable[..., Any] | None = None) -> None:
        self.objective = objective
        self.is_own = function is not None
        function = METHODS[objective.kind].loss if function is None else function
        self.name = name_of(function)
        self._call = CallByName(function, INPUTS, what="loss")

    @property
    def needs_entropies(self) -> bool:
        return "entropies" in self._call.wanted

    def __call__(
        self,
        *,
        new_T: Tensor,
        old_T: Tensor,
        advantage_T: Tensor,
        sequence_T: Tensor,
        reference_T: Tensor | None = None,
        entropy_T: Tensor | None = None,
        factor_T: Tensor | None = None,
    ) -> TokenLosses:
        """The loss of each token, before averaging; ``factor_T`` (without a gradient) scales all but the KL term."""
        tensors = {
            "logprobs": new_T,
            "old_logprobs": old_T,
            "advantages": advantage_T,
            "sequences": sequence_T,
            "ref_logprobs": reference_T,
            "entropies": entropy_T,
        }
        versions = {name: one._version for name, one in tensors.items() if one is not None}
        found = self._call(**tensors, objective=self.objective)
        for name, version in versions.items():
            if tensors[name]._version != version:
                raise ValueError(f"loss {self.name!r} changed {name} in place: create new tensors instead")
        loss_T, is_clipped_T = self._checked(found, new_T)
        if factor_T is not None:
            loss_T = loss_T * factor_T
        kl_T = None
        if reference_T is not None:
            kl_T = k3(new_T, reference_T)
            loss_T = loss_T + self.objective.kl_coef * kl_T
        return TokenLosses(
            loss_T=loss_T,
            ratio_T=ratios(new_T, old_T, sequence_T, self.objective).detach(),
            is_clipped_T=is_clipped_T.detach(),
            kl_T=None if kl_T is None else kl_T.detach(),
        )

    def _checked(self, found: Any, new_T: Tensor) -> tuple[Tensor, Tensor]:
        loss_T, is_clipped_T = found if isinstance(found, tuple) and len(found) == 2 else (found, new_T != new_T)
        if not self.is_own:
            return loss_T, is_clipped_T
        for one in (loss_T, is_clipped_T):
            is_tensor = isinstance(one, type(new_T.detach()))
            if not is_tensor or one.shape != new_T.shape:
                said = f"a tensor of shape {tuple(one.shape)}" if is_tensor else f"a {type(one).__name__}"
                raise ValueError(
                    f"loss {self.name!r} returned {said} for {len(new_T)} tokens: it must return the loss of each, in "
                    f"shape ({len(new_T)},); loss_type={self.objective.kind!r} determines how these are averaged"
                )
        if not bool(loss_T.isfinite().all()):
            place = int((~loss_T.isfinite()).nonzero()[0])
            value, logprob = float(loss_T[place].detach()), float(new_T[place].detach())
            raise ValueError(
                f"loss {self.name!r} returned {value} for a token with logprob {logprob:.4g}: a loss must be finite"
            )
        if new_T.requires_grad and not loss_T.requires_grad:
            raise ValueError(f"loss {self.name!r} has no gradient: compute it from logprobs, without detach or .item()")
        return loss_T, is_clipped_T


def ratios(logprobs: Tensor, old_logprobs: Tensor, sequences: Tensor, objective: Objective) -> Tensor:
    """The ratio of new to old policy for each token; at level "sequence", the geometric mean over its sequence."""
    log_ratio_T = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (sequence_mean(log_ratio_T, sequences) if objective.ratio_level == "sequence" else log_ratio_T).exp()


def truncation(ratio_T: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling: the factor that reduces a ratio above ``cap`` to ``cap``; without a gradient.

    >>> import torch
    >>> truncation(torch.tensor([0.5, 2.0, 8.0]), 2.0)
    tensor([1.0000, 1.0000, 0.2500])
    """
    return (cap / ratio_T.detach()).clamp(max=1.0)


def sampler_correction(objective: Objective, log_ratio_T: Tensor, sequence_T: Tensor) -> tuple[Tensor, Tensor]:
    """Importance weights of tokens for the trainer/sampler mismatch, and which tokens were out of bounds.

    ``log_ratio_T`` is trainer over sampler; it is NaN, which counts as a ratio of 1, where the sampler returned no
    logprob. A ratio (of a token, or the product over its sequence) out of bounds is truncated to them or masked to 0.

    >>> import torch
    >>> log_ratio_T, sequence_T = torch.tensor([0.5, 4.0, 2.0]).log(), torch.tensor([0, 0, 1])
    >>> sampler_correction(Objective(correction="token_truncate"), log_ratio_T, sequence_T)
    (tensor([0.5000, 3.0000, 2.0000]), tensor([False,  True, False]))
    >>> sampler_correction(Objective(correction="sequence_mask", correction_min=2.5), log_ratio_T, sequence_T)[0]
    tensor([0., 0., 0.])
    """
    level, _, how = str(objective.correction).partition("_")
    log_ratio_T = log_ratio_T.detach().nan_to_num(nan=0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if level == "sequence":
        log_ratio_T = _sequence_sums(log_ratio_T, sequence_T)[sequence_T].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_T = log_ratio_T.exp()
    low = objective.correction_min or 0.0
    high = float("inf") if objective.correction_max is None else objective.correction_max
    is_outside_T = (ratio_T < low) | (ratio_T > high)
    if how == "truncate":
        return ratio_T.clamp(low, high), is_outside_T
    return ratio_T.masked_fill(is_outside_T, 0.0), is_outside_T


def k3(new_T: Tensor, reference_T: Tensor) -> Tensor:
    """Schulman's k3 estimate of the KL divergence from the reference for each token; never negative.

    >>> import torch
    >>> k3(torch.tensor([-1.0]), torch.tensor([-1.0]))
    tensor([0.])
    """
    gap_T = reference_T - new_T
    return gap_T.exp() - gap_T - 1.0


def sequence_mean(values_T: Tensor, sequence_T: Tensor) -> Tensor:
    """For each token, the mean over its sequence."""
    sums_S = _sequence_sums(values_T, sequence_T)
    counts_S = _sequence_sums(values_T.detach().new_ones(len(values_T)), sequence_T)
    return (sums_S / counts_S)[sequence_T]


def _sequence_sums(values_T: Tensor, sequence_T: Tensor) -> Tensor:
    n = int(sequence_T.max()) + 1 if len(sequence_T) else 0
    return values_T.new_zeros(n).index_add(0, sequence_T, values_T)


def token_weights(kind: str, lengths_R: Tensor, max_new_tokens: int, totals: tuple[int, int] | None = None) -> Tensor:
    """The weight of a token of each rollout, so that the weighted sum over a batch is the method's mean.

    The mean is over "rollouts" (of their token means), over "tokens", or over "max_new_tokens" tokens per rollout
    regardless of its length. ``totals`` are the numbers of rollouts and tokens in all processes, if there are several.

    >>> import torch
    >>> token_weights("grpo", torch.tensor([1, 4]), 8)
    tensor([0.5000, 0.1250])
    >>> token_weights("dr_grpo", torch.tensor([1, 4]), 8)
    tensor([0.0625, 0.0625])
    >>> token_weights("dapo", torch.tensor([1, 4]), 8)
    tensor([0.2000, 0.2000])
    """
    lengths_R, mean_over = lengths_R.float(), METHODS[kind].mean_over
    n, tokens = (len(lengths_R), lengths_R.sum()) if totals is None else (totals[0], lengths_R.new_tensor(totals[1]))
    n = max(n, 1)
    if mean_over == "rollouts":
        return 1.0 / (n * lengths_R.clamp(min=1.0))
    if mean_over == "max_new_tokens":
        return lengths_R.new_full(lengths_R.shape, 1.0 / (n * max_new_tokens))
    return lengths_R.new_ones(lengths_R.shape) / tokens.clamp(min=1.0)
