"""Logprobs of sampled tokens become a loss: the objectives of group-relative methods, as they are written down.

Everything here is over the trained tokens of a batch laid end to end (axis T): what the environment said is not among
them. ``sequence_T`` says which sequence (axis S) each token is of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verifiers.trainers.choices import LossType


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Which loss, how far the policy may move in one update, and what a move away from the reference costs."""

    kind: LossType = "dr_grpo"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    importance_cap: float | None = None
    kl_coef: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLosses:
    """Of each token: its loss, the ratio of new to old policy, if that was clipped, its distance to the reference."""

    loss_T: Tensor
    ratio_T: Tensor
    is_clipped_T: Tensor
    kl_T: Tensor | None


def token_losses(
    objective: Objective,
    *,
    new_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
    sequence_T: Tensor,
    reference_T: Tensor | None = None,
) -> TokenLosses:
    """The loss of each token before it is weighed; gradients flow through ``new_T`` alone."""
    log_ratio_T = new_T - old_T
    if objective.kind == "gspo":
        log_ratio_T = _sequence_mean(log_ratio_T, sequence_T)
    ratio_T = log_ratio_T.exp()
    low, high = 1.0 - objective.epsilon, 1.0 + objective.epsilon_high
    if objective.kind == "cispo":
        most = high if objective.importance_cap is None else min(high, objective.importance_cap)
        is_clipped_T = ratio_T > most
        loss_T = -ratio_T.detach().clamp(max=most) * advantage_T * new_T
    else:
        bounded_T = ratio_T if objective.delta is None else ratio_T.clamp(max=objective.delta)
        clipped_T = ratio_T.clamp(low, high)
        is_clipped_T = ((ratio_T < low) & (advantage_T < 0)) | ((ratio_T > high) & (advantage_T > 0))
        loss_T = -torch.minimum(bounded_T * advantage_T, clipped_T * advantage_T)
        if objective.importance_cap is not None:
            counts_T = torch.where(bounded_T * advantage_T < clipped_T * advantage_T, bounded_T, clipped_T)
            loss_T = loss_T * truncation(counts_T, objective.importance_cap)
    kl_T = None
    if reference_T is not None:
        kl_T = k3(new_T, reference_T)
        loss_T = loss_T + objective.kl_coef * kl_T
    return TokenLosses(
        loss_T=loss_T,
        ratio_T=ratio_T.detach(),
        is_clipped_T=is_clipped_T.detach(),
        kl_T=None if kl_T is None else kl_T.detach(),
    )


def truncation(ratio_T: Tensor, cap: float) -> Tensor:
    """The factor that keeps a token's importance at most ``cap``, whatever its advantage; it has no gradient.

    >>> truncation(torch.tensor([0.5, 2.0, 8.0]), 2.0)
    tensor([1.0000, 1.0000, 0.2500])
    """
    return (cap / ratio_T.detach()).clamp(max=1.0)


def k3(new_T: Tensor, reference_T: Tensor) -> Tensor:
    """An estimate of the divergence from the reference, token by token, that is never negative.

    >>> k3(torch.tensor([-1.0]), torch.tensor([-1.0]))
    tensor([0.])
    """
    gap_T = reference_T - new_T
    return gap_T.exp() - gap_T - 1.0


def _sequence_mean(values_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Each token gets the mean of its sequence."""
    n = int(sequence_T.max()) + 1 if len(sequence_T) else 0
    sums_S = values_T.new_zeros(n).index_add(0, sequence_T, values_T)
    counts_S = values_T.new_zeros(n).index_add(0, sequence_T, torch.ones_like(values_T))
    return (sums_S / counts_S)[sequence_T]


def token_weights(
    kind: LossType, lengths_S: Tensor, max_new_tokens: int, totals: tuple[int, int] | None = None
) -> Tensor:
    """What a token of each sequence counts, so that the sum over a batch is the method's mean.

    ``totals`` are the sequences and tokens of a batch of which these are a part: that of this process, of several.

    ``grpo`` and ``gspo``: sequences count the same; ``dr_grpo``: tokens count the same, and a batch of short replies
    does not count more for it; the others: the mean over the batch's tokens.

    >>> token_weights("grpo", torch.tensor([1, 4]), 8)
    tensor([0.5000, 0.1250])
    >>> token_weights("dr_grpo", torch.tensor([1, 4]), 8)
    tensor([0.0625, 0.0625])
    >>> token_weights("dapo", torch.tensor([1, 4]), 8)
    tensor([0.2000, 0.2000])
    """
    lengths_S = lengths_S.float()
    n, tokens = (len(lengths_S), lengths_S.sum()) if totals is None else (totals[0], torch.tensor(float(totals[1])))
    n = max(n, 1)
    if kind in ("grpo", "gspo"):
        return 1.0 / (n * lengths_S.clamp(min=1.0))
    if kind == "dr_grpo":
        return torch.full_like(lengths_S, 1.0 / (n * max_new_tokens))
    return torch.full_like(lengths_S, 1.0) / tokens.clamp(min=1.0)
