"""The objectives, against their formulas written out plainly, and what must hold for all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from verifiers.trainers.config import GRPOConfig  # noqa: E402
from verifiers.trainers.losses import (  # noqa: E402
    CORRECTIONS,
    METHODS,
    Loss,
    Objective,
    TokenLosses,
    k3,
    sampler_correction,
    token_weights,
    truncation,
)

LOSS_TYPES = list(METHODS)
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


def token_losses(objective: Objective, **given: Any) -> TokenLosses:
    return Loss(objective)(**given)


def written_out(
    kind: str, new: Any, old: Any, advantage: Any, sequence: Any, reference: Any, is_of_sequences: bool = False
) -> Any:
    """The loss of each token as its paper has it, one token at a time."""
    losses = []
    for t in range(len(new)):
        if kind == "gspo" or is_of_sequences:
            members = [i for i in range(len(new)) if sequence[i] == sequence[t]]
            ratio = torch.exp(sum(new[i] - old[i] for i in members) / len(members))
        else:
            ratio = torch.exp(new[t] - old[t])
        a = advantage[t]
        if kind == "cispo":
            loss = -min(ratio.item(), 1 + HIGH, CAP) * a * new[t]
        elif kind == "sapo":
            tau = 1.0 if a > 0 else 1.05
            gate = 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
            loss = -gate * a * min(1.0, CAP / gate.item())
        else:
            clipped = ratio if 1 - EPS <= ratio <= 1 + HIGH else torch.tensor(1 - EPS if ratio < 1 else 1 + HIGH)
            bounded = ratio if ratio <= DELTA else torch.tensor(DELTA)
            counts = bounded if bounded * a < clipped * a else clipped
            loss = -counts * a * min(1.0, CAP / counts.item())
        gap = reference[t] - new[t]
        losses.append(loss + BETA * (torch.exp(gap) - gap - 1))
    return torch.stack([one.to(torch.float64) for one in losses])


@pytest.mark.parametrize("level", ["token", "sequence", None])
@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_loss_and_gradient_are_those_of_the_formula(kind, level):
    if kind == "gspo" and level == "token":
        pytest.skip("gspo at the level of tokens is grpo")
    given = batch()
    bounds = {"epsilon": EPS, "epsilon_high": HIGH, "delta": DELTA, "importance_cap": CAP}
    objective = Objective(kind=kind, level=level, kl_coef=BETA, **bounds)
    new_T = moved(given["old_T"])
    found = token_losses(objective, new_T=new_T, **given)
    found.loss_T.sum().backward()
    plain = new_T.detach().clone().requires_grad_()
    names = ("old_T", "advantage_T", "sequence_T", "reference_T")
    wanted = written_out(kind, plain, *(given[name] for name in names), is_of_sequences=level == "sequence")
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
    objective = config.objective
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


def test_sapo_weighs_a_token_by_the_slope_of_its_gate():
    """4 σ(τ(r−1)) σ(−τ(r−1)) r: 1 on policy, and less the further away, without an edge."""
    weights = weights_of(GRPOConfig(loss_type="sapo"))
    wanted = [4 * r / (1 + math.exp(1 - r)) / (1 + math.exp(r - 1)) for r in RATIOS]
    assert weights == pytest.approx(wanted, abs=1e-3)


def test_gspo_is_the_grpo_loss_with_the_ratio_of_the_sequence():
    given = batch()
    new_T = moved(given["old_T"])
    gspo, grpo = (
        token_losses(Objective(kind=kind, level=level), new_T=new_T, **given).loss_T
        for kind, level in (("gspo", None), ("grpo", "sequence"))
    )
    assert torch.equal(gspo, grpo)
    assert GRPOConfig(loss_type="grpo", importance_sampling_level="sequence").objective.level == "sequence"


# --- the ratio of trainer and sampler -----------------------------------------------------------------------------


@pytest.mark.parametrize("low", [None, 0.7])
@pytest.mark.parametrize("mode", CORRECTIONS)
def test_the_ratio_of_trainer_and_sampler_is_truncated_or_masked_by_token_or_sequence(mode, low):
    draw = torch.Generator().manual_seed(3)
    log_ratio = torch.randn(30, generator=draw, dtype=torch.float64) * 0.5
    sequence = torch.arange(30) // 3
    objective = Objective(correction=mode, correction_min=low, correction_max=1.4)
    wanted, is_outside = [], []
    for t in range(30):
        logs = [log_ratio[i] for i in range(30) if sequence[i] == sequence[t]] if "sequence" in mode else [log_ratio[t]]
        ratio = math.exp(sum(float(one) for one in logs))
        is_inside = (low is None or ratio >= low) and ratio <= 1.4
        kept = ratio if is_inside else 0.0
        is_outside.append(not is_inside)
        wanted.append(min(max(ratio, low or 0.0), 1.4) if "truncate" in mode else kept)
    counts, is_bounded = sampler_correction(objective, log_ratio, sequence)
    assert counts.tolist() == pytest.approx(wanted)
    assert is_bounded.tolist() == is_outside


def test_a_token_whose_sampler_gave_no_logprob_is_not_corrected():
    ratios = torch.tensor([math.nan, 0.5])
    found, _ = sampler_correction(Objective(correction="token_mask"), ratios, torch.tensor([0, 0]))
    assert found.tolist() == pytest.approx([1.0, math.exp(0.5)])


# --- a loss of one's own ------------------------------------------------------------------------------------------


def tokens(n: int = 3) -> dict[str, Any]:
    new_T = torch.full((n,), -1.0, requires_grad=True)
    return {"new_T": new_T, "old_T": new_T.detach(), "advantage_T": torch.ones(n), "sequence_T": torch.zeros(n).long()}


def test_a_loss_asks_for_tensors_by_name():
    def reinforce(logprobs, advantages):
        return -advantages * logprobs

    found = Loss(Objective(), reinforce)(**tokens())
    assert found.loss_T.tolist() == [1.0, 1.0, 1.0]
    assert not found.is_clipped_T.any()


def test_a_loss_may_say_which_tokens_it_clipped_and_has_the_divergence_added():
    def half(logprobs, old_logprobs, objective):
        return logprobs * objective.epsilon, torch.tensor([True, False, False])

    given = tokens()
    found = Loss(Objective(kl_coef=0.5, epsilon=0.3), half)(**given, reference_T=given["old_T"] + 1.0)
    assert found.is_clipped_T.tolist() == [True, False, False]
    assert found.loss_T.tolist() == pytest.approx([-0.3 + 0.5 * (math.e - 2)] * 3)


def scalar(logprobs):
    return logprobs.mean()


def plain_number(logprobs):
    return 0.5


def not_finite(logprobs):
    return logprobs.log()


def without_gradient(logprobs):
    return logprobs.detach()


def an_array(logprobs):
    return logprobs.detach().numpy()


def in_place(logprobs, advantages):
    return -logprobs * advantages.mul_(2.0)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (scalar, r"loss 'scalar' returned a tensor of shape \(\) for 3 tokens: it must return the loss of each"),
        (plain_number, "loss 'plain_number' returned a float for 3 tokens"),
        (not_finite, "loss 'not_finite' returned nan for a token with logprob -1: a loss must be finite"),
        (an_array, "loss 'an_array' returned a ndarray for 3 tokens"),
        (in_place, "loss 'in_place' changed advantages in place: create new tensors instead"),
        (without_gradient, "loss 'without_gradient' has no gradient: compute it from logprobs"),
    ],
)
def test_a_loss_that_gives_something_else_is_told_in_one_sentence(function, said):
    with pytest.raises(ValueError, match=said):
        Loss(Objective(), function)(**tokens())


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            lambda logprobs, old: logprobs,
            "has an unknown parameter 'old'; it can have logprobs, old_logprobs, advantages",
        ),
        (lambda: 0.0, "has no parameters; it can have logprobs"),
        (3, "loss must be a function or a name, not a int"),
    ],
)
def test_a_loss_that_cannot_be_called_is_refused_before_it_is(function, said):
    with pytest.raises(TypeError, match=said):
        Loss(Objective(), function)
