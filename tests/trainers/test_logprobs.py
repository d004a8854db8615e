"""The logprobs that are trained on are those of the model's own forward pass, however few logits are held at once."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import FAMILIES, random_model  # noqa: E402
from verifiers.engine.logits import LogitsProcessor, processed  # noqa: E402
from verifiers.engine.sequence import ActiveSequence, Sampling  # noqa: E402
from verifiers.kernels.sampling import log_softmax  # noqa: E402
from verifiers.trainers.learning import target_logprobs  # noqa: E402
from verifiers.trainers.learning.logprobs import TokenScorer  # noqa: E402
from verifiers.trainers.learning.micro_batches import MicroBatch  # noqa: E402
from verifiers.trainers.sampling import Distribution  # noqa: E402
from verifiers.trainers.setup import recompute_activations  # noqa: E402


def batch_of(rows: int = 3, tokens: int = 9) -> MicroBatch:
    ids = torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(1))
    place = torch.tensor([2, 3, 4, 9, 12, 20, 21, 25])
    zeros = torch.zeros(len(place))
    return MicroBatch(
        ids_BT=ids, logit_index_N=place, target_N=ids.flatten()[place + 1], sequence_N=place // tokens,
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
    logits = model(input_ids=batch.ids_BT).logits.flatten(0, 1)[batch.logit_index_N] / temperature
    expected = torch.log_softmax(logits, -1).gather(1, batch.target_N[:, None])[:, 0]
    assert torch.allclose(found, expected, atol=1e-5)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_a_head_in_chunks_learns_what_it_learns_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("Llama-tied")
    model.lm_head.register_forward_hook(lambda *_: None)  # a head that somebody listens to is called as it is
    whole = learned(model, 0.8)
    monkeypatch.setattr(target_logprobs, "FREE_LOGITS", 1)
    monkeypatch.setattr(target_logprobs, "CHUNK_BYTES_ELSEWHERE", 3 * 97 * 4)
    for one, other in zip(learned(model, 0.8), whole, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_a_head_that_caps_its_logits_is_asked_whole() -> None:
    assert not TokenScorer(random_model("Gemma2", final_logit_softcapping=3.0))._is_split
    assert TokenScorer(random_model("Llama"))._is_split


def test_layers_that_are_computed_again_learn_the_same() -> None:
    model = random_model().train()
    kept = learned(model)
    recompute_activations(model)
    for one, other in zip(learned(model), kept, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GPT2"])
def test_layers_that_are_computed_again_keep_no_activations(family: str) -> None:
    model = random_model(family).train()
    model.config._attn_implementation = "sdpa"
    scorer = TokenScorer(model)
    assert scorer.layouts

    def numbers_kept() -> int:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one: sizes.append(one.numel()) or one, lambda one: one):
            scorer.logprobs(batch_of())
        return sum(sizes)

    kept = numbers_kept()
    recompute_activations(model)
    assert numbers_kept() < kept / 3


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "Gemma2"])
def test_lean_layers_learn_the_same(family: str) -> None:
    model = random_model(family)
    model.config._attn_implementation = "sdpa"
    scorer = TokenScorer(model)

    def learned(fused: bool) -> list[Any]:
        model.zero_grad(set_to_none=True)
        out = scorer.outputs(batch_of(), fused=fused)
        (out * torch.arange(out.numel()).view(out.shape).sin()).sum().backward()
        return [out.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]

    for one, other in zip(learned(True), learned(False), strict=True):
        assert (one - other).abs().max() <= 3e-5 * other.abs().max() + 1e-6
    due = {"Llama": 3, "Llama-tied": 3, "Qwen2": 3, "Qwen3": 3, "SmolLM3": 3, "Mistral": 3, "Gemma": 3}
    assert len(scorer._decoder.layers) >= due.get(family, 0)


@pytest.mark.parametrize("part", ["", "self_attn", "mlp", "mlp.act_fn", "input_layernorm", "mlp.up_proj"])
def test_a_hook_is_heard_and_the_numbers_stay(part: str) -> None:
    model = random_model()
    model.config._attn_implementation = "sdpa"
    scorer = TokenScorer(model)
    expected = scorer.logprobs(batch_of())
    heard: list[int] = []
    handle = model.model.layers[1].get_submodule(part).register_forward_hook(lambda *_: heard.append(1))
    assert torch.allclose(scorer.logprobs(batch_of()), expected, atol=1e-5)
    assert heard
    handle.remove()


def test_a_head_with_a_hook_is_called() -> None:
    model = random_model()
    scorer = TokenScorer(model)
    expected = scorer.logprobs(batch_of())
    model.lm_head.register_forward_hook(lambda module, given, out: out * 2)
    assert not torch.allclose(scorer.logprobs(batch_of()), expected, atol=1e-2)


def test_half_precision_and_autocast_on_a_cpu_are_left_to_the_model() -> None:
    model, batch = random_model(dtype=torch.bfloat16), batch_of()
    model.config._attn_implementation = "sdpa"
    logits = model(input_ids=batch.ids_BT).logits.flatten(0, 1)[batch.logit_index_N].float()
    expected = torch.log_softmax(logits, -1).gather(1, batch.target_N[:, None])[:, 0]
    assert torch.allclose(TokenScorer(model).logprobs(batch), expected, atol=1e-5)
    whole = random_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = TokenScorer(whole).logprobs(batch)
    assert not torch.equal(rounded, TokenScorer(whole).logprobs(batch))


def test_training_mode_is_left_as_it_was() -> None:
    model = random_model().train()
    TokenScorer(model)
    assert model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_is_added_as_the_sampler_adds_it_whatever_the_type_of_the_logits(dtype: Any) -> None:
    logits = (torch.randn((1, 64), generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
    bias = {token: 0.1 + token / 7 for token in range(64)}
    way = Sampling(logit_bias=bias)
    sequence = ActiveSequence([1], way, 0)
    sequence.processor = LogitsProcessor(way, [1], stop_ids=frozenset(), vocabulary=64, device=torch.device("cpu"))
    drawn = torch.log_softmax(processed(logits, [sequence], [[]]), -1)[0]
    scored = target_logprobs.score_logits(
        logits.expand(64, -1), torch.arange(64), Distribution(logit_bias=tuple(bias.items()))
    )
    assert torch.allclose(scored.logprob_N, drawn, atol=1e-4)


def test_over_a_large_vocabulary_no_unlikely_token_is_lost_in_the_mass_of_a_row() -> None:
    """One likely token among 50,000: PyTorch's own log_softmax of float32 is some 1e-5 too high there."""
    generator = torch.Generator().manual_seed(3)
    logits_NV = torch.randn(16, 50_000, generator=generator) * 3 + 5
    logits_NV[:, 0] += 20
    target_N = torch.softmax(logits_NV, -1).multinomial(1, generator=generator)[:, 0]
    whole_NV = logits_NV.double().requires_grad_()
    expected_N = torch.log_softmax(whole_NV, -1).gather(1, target_N[:, None])[:, 0]
    expected_N.sum().backward()
    logits_NV.requires_grad_()
    found_N = target_logprobs.score_logits(logits_NV, target_N, Distribution(temperature=1.0)).logprob_N
    found_N.sum().backward()
    assert (found_N - expected_N).abs().max() < 2e-6
    assert (logits_NV.grad - whole_NV.grad).abs().max() < 2e-6
    sampled_N = log_softmax(logits_NV.detach()).gather(1, target_N[:, None])[:, 0]
    assert (sampled_N - expected_N).abs().max() < 2e-6
