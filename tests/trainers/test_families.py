"""Whatever decoder transformers has: what is learned is what its plain forward gives for each sequence alone."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import random_model  # noqa: E402
from tests.trainers.test_packing import sequences  # noqa: E402
from verifiers.trainers.learning.logprobs import TokenScorer  # noqa: E402
from verifiers.trainers.learning.micro_batches import micro_batches  # noqa: E402

WIDE = {"sliding_window": 64}  # longer than any sequence, which are then packed
ALL_OF_THEM = {
    "Gemma2": {},
    "Gemma3": {},
    "Gemma3-wide": WIDE,
    "Phi3": {},
    "Phi3-wide": WIDE,
    "Phi4-mini": {},
    "Olmo2": {},
    "SmolLM3": {},
    "Qwen3-MoE": {},
    "Qwen3-MoE-mixed": {"decoder_sparse_step": 2},  # every second layer is dense
    "Mixtral": {},
    "Mixtral-wide": WIDE,
    "Mixtral-routed": {"output_router_logits": True},  # which transformers collects by hooks
}
NOT_PACKED = {
    "Gemma2",
    "Gemma3",
    "Phi3",
    "Mixtral",
    "Mixtral-routed",
}  # capped scores, or windows shorter than the sequences


def learned(model: Any) -> tuple[TokenScorer, dict[str, Any]]:
    """Logprobs and gradients as training computes them: in packed rows where the model was proven in them."""
    model.zero_grad(set_to_none=True)
    scorer, device = TokenScorer(model), next(model.parameters()).device
    found: dict[int, Any] = {}
    for batch in micro_batches(sequences(), max_tokens=4096, **scorer.layouts.limits()):
        logprobs = scorer.logprobs(batch.to(device))
        for i, member in enumerate(batch.members):
            found[member] = logprobs[batch.sequence_N.to(device) == i]
    return scorer, _gathered(model, [found[i] for i in sorted(found)])


def expected(model: Any) -> dict[str, Any]:
    """The same by transformers alone, one sequence after the other."""
    model.zero_grad(set_to_none=True)
    found, device = [], next(model.parameters()).device
    for one in sequences():
        prompt, reply = one.sample.prompt_ids, one.sample.completion_ids
        ids = torch.tensor([[*prompt, *reply]], device=device)
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1], -1)
        chosen = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        found.append(chosen[torch.tensor(one.sample.completion_mask, device=device) == 1])
    return _gathered(model, found)


def _gathered(model: Any, parts: list[Any]) -> dict[str, Any]:
    found = torch.cat(parts)
    (found * torch.arange(1, len(found) + 1, device=found.device)).sum().backward()
    grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"logprobs": found.detach(), **grads}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], within: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, one in theirs.items():
        assert (ours[name] - one).abs().max() <= within * one.abs().max(), name


@pytest.mark.parametrize("name", ALL_OF_THEM)
def test_logprobs_and_gradients_are_those_of_each_sequence_alone(name: str) -> None:
    family = name.removesuffix("-wide").removesuffix("-mixed").removesuffix("-routed")
    model = random_model(family, initializer_range=0.1, **ALL_OF_THEM[name])
    scorer, ours = learned(model)
    assert bool(scorer.layouts.longest_packed) == (name not in NOT_PACKED)
    assert_same(ours, expected(model))
