"""The logprobs that are trained on are those of the model's own forward pass, however few logits are held at once."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import random_model  # noqa: E402
from verifiers.trainers import logprobs as logprobs_module  # noqa: E402
from verifiers.trainers.logprobs import TokenScorer  # noqa: E402
from verifiers.trainers.micro_batches import MicroBatch  # noqa: E402


def batch_of(rows: int = 3, tokens: int = 9) -> MicroBatch:
    ids = torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(1))
    place = torch.tensor([2, 3, 4, 9, 12, 20, 21, 25])
    zeros = torch.zeros(len(place))
    return MicroBatch(
        ids_BT=ids, place_N=place, target_N=ids.flatten()[place + 1], sequence_N=place // tokens,
        old_N=zeros, advantage_N=zeros, weight_N=zeros + 1, members=tuple(range(rows)),
    )  # fmt: skip


def learned(model: Any, temperature: float = 1.0) -> list[Any]:
    model.zero_grad(set_to_none=True)
    found = TokenScorer(model).logprobs(batch_of(), temperature)
    (found * torch.arange(1, len(found) + 1)).sum().backward()
    return [found.detach(), *(one.grad for one in model.parameters())]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", ["Llama", "Llama-tied", "Qwen3", "Gemma2", "GPT2"])
def test_logprobs_are_those_of_the_forward_pass(family: str, temperature: float) -> None:
    model, batch = random_model(family), batch_of()
    found = TokenScorer(model).logprobs(batch, temperature)
    logits = model(input_ids=batch.ids_BT).logits.flatten(0, 1)[batch.place_N] / temperature
    expected = torch.log_softmax(logits, -1).gather(1, batch.target_N[:, None])[:, 0]
    assert torch.allclose(found, expected, atol=1e-5)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_a_head_in_chunks_learns_what_it_learns_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("Llama-tied")
    whole = learned(model, 0.8)
    monkeypatch.setattr(logprobs_module, "FREE_LOGITS", 1)
    monkeypatch.setattr(logprobs_module, "CHUNK_LOGITS", 3 * 97)
    for one, other in zip(learned(model, 0.8), whole, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_a_head_that_caps_its_logits_is_asked_whole() -> None:
    assert not TokenScorer(random_model("Gemma2", final_logit_softcapping=3.0))._is_split
    assert TokenScorer(random_model("Llama"))._is_split


def test_layers_that_are_computed_again_learn_the_same() -> None:
    model = random_model().train()
    kept = learned(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for one, other in zip(learned(model), kept, strict=True):
        assert torch.equal(one, other)


def test_training_mode_is_left_as_it_was() -> None:
    model = random_model().train()
    TokenScorer(model)
    assert model.training
