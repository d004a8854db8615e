"""The objectives, against their formulas written out plainly, and what must hold for all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from verifiers.trainers.choices import LOSS_TYPES  # noqa: E402
from verifiers.trainers.config import GRPOConfig  # noqa: E402
from verifiers.trainers.losses import Objective, k3, token_losses, token_weights, truncation  # noqa: E402

EPS, HIGH, DELTA, CAP, BETA = 0.2, 0.3, 3.0, 2.0, 0.1


def batch(seed: int = 0, n: int = 40, sequences: int = 5) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    sequence_T = torch.arange(n) % sequences
    return {
        "old_T": -torch.rand(n, generator=draw, dtype=torch.float64) * 3,
        "advantage_T": torch.randn(sequences, generator=draw, dtype=torch.float64)[sequence_T],
        "sequence_T": sequence_T,
        "reference_T": -torch.rand(n, generator=draw, dtype=torch.float64) * 3,
    }


def moved(old_T: Any, seed: int = 1, by: float = 0.8) -> Any:
    draw = torch.Generator().manual_seed(seed)
    return (old_T + by * torch.randn(len(old_T), generator=draw, dtype=torch.float64)).requires_grad_()


def written_out(kind: str, new: Any, old: Any, advantage: Any, sequence: Any, reference: Any) -> Any:
    """The loss of each token as its paper has it, one token at a time."""
    losses = []
    for t in range(len(new)):
        if kind == "gspo":
            members = [i for i in range(len(new)) if sequence[i] == sequence[t]]
            ratio = torch.exp(sum(new[i] - old[i] for i in members) / len(members))
        else:
            ratio = torch.exp(new[t] - old[t])
        a = advantage[t]
        if kind == "cispo":
            loss = -min(ratio.item(), 1 + HIGH, CAP) * a * new[t]
        else:
            clipped = ratio if 1 - EPS <= ratio <= 1 + HIGH else torch.tensor(1 - EPS if ratio < 1 else 1 + HIGH)
            bounded = ratio if ratio <= DELTA else torch.tensor(DELTA)
            counts = bounded if bounded * a < clipped * a else clipped
            loss = -counts * a * min(1.0, CAP / counts.item())
        gap = reference[t] - new[t]
        losses.append(loss + BETA * (torch.exp(gap) - gap - 1))
    return torch.stack([one.to(torch.float64) for one in losses])


@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_loss_and_gradient_are_those_of_the_formula(kind):
    given = batch()
    objective = Objective(kind=kind, epsilon=EPS, epsilon_high=HIGH, delta=DELTA, importance_cap=CAP, kl_coef=BETA)
    new_T = moved(given["old_T"])
    found = token_losses(objective, new_T=new_T, **given)
    found.loss_T.sum().backward()
    plain = new_T.detach().clone().requires_grad_()
    wanted = written_out(kind, plain, given["old_T"], given["advantage_T"], given["sequence_T"], given["reference_T"])
    wanted.sum().backward()
    assert torch.allclose(found.loss_T, wanted)
    assert torch.allclose(new_T.grad, plain.grad)


@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_on_policy_the_gradient_is_the_advantage_times_that_of_the_logprob(kind):
    given = batch()
    new_T = given["old_T"].clone().requires_grad_()
    found = token_losses(Objective(kind=kind), new_T=new_T, **{**given, "reference_T": None})
    assert torch.equal(found.ratio_T, torch.ones_like(new_T))
    assert not found.is_clipped_T.any()
    found.loss_T.sum().backward()
    assert torch.allclose(new_T.grad, -given["advantage_T"])


def test_a_ratio_outside_the_clip_range_has_no_gradient_where_it_would_go_further_out():
    new_T = torch.tensor([math.log(2.0), math.log(0.5)], requires_grad=True)
    given = {"old_T": torch.zeros(2), "advantage_T": torch.tensor([1.0, -1.0]), "sequence_T": torch.tensor([0, 1])}
    found = token_losses(Objective(kind="grpo"), new_T=new_T, **given)
    found.loss_T.sum().backward()
    assert found.is_clipped_T.all()
    assert not new_T.grad.any()


def test_the_importance_of_a_bad_token_is_bounded():
    """Clipping leaves a large ratio alone where the advantage is negative: one token could outweigh a batch."""
    given = {"old_T": torch.zeros(1), "advantage_T": torch.tensor([-1.0]), "sequence_T": torch.tensor([0])}
    new_T = torch.tensor([math.log(50.0)], requires_grad=True)
    token_losses(Objective(kind="grpo", importance_cap=2.0), new_T=new_T, **given).loss_T.sum().backward()
    assert new_T.grad.item() == pytest.approx(2.0)


RATIOS = [1.0, 2.0, 4.0, 6.0, 12.0, 60.0]


def weights_of(config: GRPOConfig, advantage: float = 1.0) -> list[float]:
    """What tokens with the ratios above weigh in the gradient, under the objective of a configuration."""
    low, high = config.clip
    objective = Objective(kind=config.loss_type, epsilon=low, epsilon_high=high, importance_cap=config.cap)
    new_T = torch.tensor(RATIOS).log().requires_grad_()
    n = len(RATIOS)
    given = {"old_T": torch.zeros(n), "advantage_T": torch.full((n,), advantage), "sequence_T": torch.arange(n)}
    token_losses(objective, new_T=new_T, **given).loss_T.sum().backward()
    return [round(-weight / advantage, 4) for weight in new_T.grad.tolist()]


def test_cispo_weighs_tokens_by_their_ratio_up_to_its_own_bound():
    assert weights_of(GRPOConfig(loss_type="cispo")) == [1, 2, 4, 6, 6, 6]
    assert weights_of(GRPOConfig(loss_type="cispo", epsilon_high=2.0)) == [1, 2, 3, 3, 3, 3]


def test_an_importance_cap_that_was_asked_for_bounds_cispo_too():
    assert weights_of(GRPOConfig(loss_type="cispo", importance_cap=3.0)) == [1, 2, 3, 3, 3, 3]
    assert weights_of(GRPOConfig(loss_type="cispo", importance_cap=None)) == [1, 2, 4, 6, 6, 6]


@pytest.mark.parametrize("kind", LOSS_TYPES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("delta", [None, 3.0])
def test_what_a_token_counts_never_falls_as_its_ratio_rises_and_never_exceeds_the_cap(kind, advantage, delta):
    objective = Objective(kind=kind, epsilon=0.2, epsilon_high=0.2, delta=delta, importance_cap=2.0)
    ratio_T = torch.linspace(0.3, 60.0, 400, dtype=torch.float64)
    given = {"old_T": torch.zeros(400), "advantage_T": torch.full((400,), advantage), "sequence_T": torch.arange(400)}
    loss_T = token_losses(objective, new_T=ratio_T.log(), **given).loss_T
    counts_T = (loss_T / ratio_T.log() if kind == "cispo" else loss_T) / -advantage
    counts_T = counts_T[ratio_T.log().abs() > 1e-3]
    assert (counts_T.diff() >= -1e-9).all()
    assert counts_T.max() <= 2.0 + 1e-9


def test_k3_is_zero_at_the_reference_and_positive_elsewhere():
    reference_T = -torch.rand(100) * 3
    assert torch.equal(k3(reference_T, reference_T), torch.zeros(100))
    assert (k3(reference_T + torch.randn(100), reference_T) >= 0).all()


def test_truncation_has_no_gradient():
    ratio_T = torch.tensor([4.0], requires_grad=True)
    assert not truncation(ratio_T, 2.0).requires_grad


@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_weights_make_the_sum_the_mean_that_the_method_is_named_for(kind):
    lengths_S = torch.tensor([1, 3, 8])
    weights_S = token_weights(kind, lengths_S, max_new_tokens=10)
    total = float((weights_S * lengths_S).sum())
    assert total == pytest.approx(12 / 30 if kind == "dr_grpo" else 1.0)
