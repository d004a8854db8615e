"""Norms of each head of queries and keys (Qwen3) are run and learned in C, fused with what is around them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.autograd import gradcheck  # noqa: E402

from tests.engine.support.exact import assert_exact, prompt_of, random_model  # noqa: E402
from tests.engine.tiny import tokenizer  # noqa: E402
from tests.trainers import making  # noqa: E402
from tests.trainers.test_families import assert_same, expected, learned  # noqa: E402
from tests.trainers.test_packing import sequences  # noqa: E402
from verifiers.engine.sequence import Sampling  # noqa: E402
from verifiers.kernels import autograd, reference  # noqa: E402
from verifiers.kernels.cpu import learning  # noqa: E402
from verifiers.kernels.cpu.build import find_compiler  # noqa: E402
from verifiers.kernels.norms import HeadNorms  # noqa: E402
from verifiers.trainers.learning.logprobs import TokenScorer  # noqa: E402
from verifiers.trainers.learning.micro_batches import micro_batches  # noqa: E402
from verifiers.trainers.setup import recompute_activations  # noqa: E402

WITHIN = 1e-5
WAY = Sampling(max_tokens=24, seed=1)
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C compiler here")


def qwen3(**more: Any) -> Any:
    """Heads wider than their share of the hidden states, and norms whose weights and epsilons differ and matter."""
    model = random_model("Qwen3", **{"head_dim": 24, "initializer_range": 0.1, "rms_norm_eps": 1e-3, **more})
    model.config._attn_implementation = "sdpa"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                parameter.uniform_(0.5, 2.0)
    return model


# --- sampling ---------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (3, 3)], ids=str)
def test_the_logprobs_of_qwen3_sampled_in_c_are_those_of_transformers_to_1e_5(
    start: Any, heads: tuple[int, int]
) -> None:
    model = qwen3(num_attention_heads=heads[0], num_key_value_heads=heads[1])
    engine = start(model)
    assert str(engine.backend) == "batched, in C"
    futures = [engine.submit(prompt_of(n, seed=n), WAY)[0] for n in (1, 9, 30, 77)]
    for future in futures:
        assert_exact(model, future.result(60), WAY, within=WITHIN)


@needs_compiler
def test_an_update_of_a_head_norm_is_sampled_from_at_once(start: Any) -> None:
    model = qwen3()
    engine = start(model)
    before = engine.generate([prompt_of(9)], WAY)[0]
    for name in ("q_norm", "k_norm"):
        with torch.no_grad():
            getattr(model.model.layers[1].self_attn, name).weight.mul_(3.0)
        assert_exact(model, engine.generate([prompt_of(9)], WAY)[0], WAY, within=WITHIN)
    assert engine.generate([prompt_of(9)], WAY)[0].logprobs != before.logprobs


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
@pytest.mark.parametrize("how", ["hook", "forward", "exchanged"])
def test_whoever_listens_to_a_head_norm_or_replaces_it_is_called(start: Any, name: str, how: str) -> None:
    model = qwen3()
    engine = start(model)
    scorer = TokenScorer(model)
    batch = packed_batch(scorer)
    plain = scorer.logprobs(batch)
    attention, heard = model.model.layers[1].self_attn, []
    own = getattr(attention, name)

    class Louder(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            heard.append(1)
            return type(own).forward(own, x) * 1.5

    if how == "hook":
        own.register_forward_hook(lambda module, given, out: heard.append(1) or out * 1.5)
    elif how == "forward":
        own.forward = Louder().forward
    else:
        setattr(attention, name, Louder())
    assert_exact(model, engine.generate([prompt_of(9)], WAY)[0], WAY, within=WITHIN)
    assert len(heard) >= WAY.max_tokens
    heard.clear()
    assert not torch.allclose(scorer.logprobs(batch), plain, atol=1e-2)
    assert heard


def test_without_c_qwen3_is_run_in_fewer_operations_all_the_same(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from verifiers.kernels.cpu import model as cpu_model

    monkeypatch.setattr(cpu_model, "decode_functions", lambda: None)
    model = qwen3()
    engine = start(model)
    assert engine.backend.name == "torch"
    assert len(engine.runner.decoder.layers) == 3
    assert_exact(model, engine.generate([prompt_of(9)], WAY)[0], WAY, within=WITHIN)


# --- learning ---------------------------------------------------------------------------------------------------------


def packed_batch(scorer: TokenScorer) -> Any:
    (batch,) = micro_batches(sequences(), max_tokens=10**6, longest_packed=scorer.layouts.longest_packed)
    assert batch.packing is not None
    return batch.to(next(scorer.model.parameters()).device)


def check_gradients(model: Any, within: float = WITHIN) -> None:
    """Training by our kernels, in packed rows, against transformers."""
    scorer, ours = learned(model)
    assert scorer.layouts.fused
    assert scorer.layouts.longest_packed
    assert len(scorer._decoder.layers) == 3
    assert_same(ours, expected(model), within)


def test_the_gradients_of_qwen3_are_those_of_transformers_to_1e_5() -> None:
    check_gradients(qwen3())


@pytest.mark.parametrize("trains_norms", [False, True], ids=["adapters", "norms-too"])
def test_the_gradients_of_adapters_on_qwen3_are_those_of_transformers_to_1e_5(trains_norms: bool) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "k_proj", "v_proj", "down_proj"], init_lora_weights=False,
        modules_to_save=["q_norm"] if trains_norms else None,
    )  # fmt: skip
    check_gradients(peft.get_peft_model(qwen3(), config))


def check_autocast(model: Any) -> None:
    """Queries are in half precision then, and the weights of their norms are not: rounding is left to the modules."""
    kind, heard = next(model.parameters()).device.type, []
    scorer = TokenScorer(model)
    assert len(scorer._decoder.layers) == 3
    batch = packed_batch(scorer)
    plain = scorer.logprobs(batch)
    norm = type(model.model.layers[0].self_attn.q_norm)
    with pytest.MonkeyPatch.context() as patch, torch.autocast(kind, dtype=torch.bfloat16):
        own = norm.forward
        patch.setattr(norm, "forward", lambda self, x: heard.append(self) or own(self, x))
        rounded = scorer.logprobs(batch)
    assert model.model.layers[0].self_attn.q_norm in heard
    assert 0 < float((rounded - plain).detach().abs().max()) < 0.2


def test_autocast_leaves_the_norms_of_heads_to_their_modules() -> None:
    check_autocast(qwen3())


def test_packed_rows_that_are_computed_again_have_the_same_gradients() -> None:
    model = qwen3().train()
    _, kept = learned(model)
    recompute_activations(model)
    _, again = learned(model)
    assert all(torch.equal(again[name], kept[name]) for name in kept)


def test_a_step_of_grpo_on_qwen3_at_a_rate_of_zero_has_ratios_of_one(tmp_path: Path) -> None:
    words = tokenizer()
    model = qwen3(vocab_size=len(words), eos_token_id=words.eos_token_id)
    report = making.trainer(tmp_path, model=model, learning_rate=0.0, max_steps=2).train()
    assert report.steps
    for step in report.steps:
        assert step["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert step["ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert step["clip_fraction"] == 0.0


# --- functions --------------------------------------------------------------------------------------------------------


def randn(*shape: int, seed: int = 0, dtype: Any = torch.float64) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def numbers(dtype: Any) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
    """Angles of three positions; queries, keys, and the weights of their norms."""
    angle = randn(1, 3, 6, seed=2, dtype=dtype) * 3
    shapes = ((2, 3, 4, 6), (2, 3, 2, 6), (6,), (6,))
    return (angle.cos(), angle.sin()), tuple(randn(*one, seed=i, dtype=dtype) for i, one in enumerate(shapes))


def normed_and_rotated(rotary: tuple[Any, Any], q: Any, k: Any, q_weight: Any, k_weight: Any) -> Any:
    return autograd.rotated(q, k, *rotary, HeadNorms(q_weight, k_weight, 1e-3, 0.5))


def test_heads_are_normed_each_by_itself_and_then_rotated() -> None:
    rotary, (q, k, q_weight, k_weight) = numbers(torch.float64)
    found = normed_and_rotated(rotary, q, k, q_weight, k_weight)
    for one, x, weight, epsilon in zip(found, (q, k), (q_weight, k_weight), (1e-3, 0.5), strict=True):
        normed = weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
        assert torch.allclose(one, reference.rotary(normed.transpose(1, 2), *rotary).transpose(1, 2))


def test_the_gradients_of_normed_and_rotated_heads_are_those_of_differences() -> None:
    rotary, inputs = numbers(torch.float64)
    inputs = tuple(one.requires_grad_() for one in inputs)
    assert gradcheck(partial(normed_and_rotated, rotary), inputs)
    frozen = (*inputs[:2], inputs[2].detach(), inputs[3].detach())
    assert gradcheck(partial(normed_and_rotated, rotary), frozen)


def test_projections_norms_and_rotation_in_one_go_learn_what_they_learn_one_by_one() -> None:
    linears = [torch.nn.Linear(6, n, bias=False, dtype=torch.float64) for n in (24, 12, 12)]
    rotary, (_, _, q_weight, k_weight) = numbers(torch.float64)
    x, weight = randn(2, 3, 6, seed=7).requires_grad_(), randn(6, seed=8).requires_grad_()
    norms = HeadNorms(q_weight.requires_grad_(), k_weight.requires_grad_(), 1e-3, 0.5)

    def one_by_one() -> Any:
        normed = autograd.add_norm(x.view(-1, 6), None, weight, 1e-5)[1].view(x.shape)
        q, k, v = (one.unflatten(-1, (-1, 6)) for one in autograd.projected(normed, linears))
        return x, *autograd.rotated(q, k, *rotary, norms), v

    in_one_go = autograd.projected_heads(x, weight, 1e-5, linears, 6, rotary, norms)
    learned = [x, weight, norms.q, norms.k, *(one.weight for one in linears)]
    answers = []
    for out in (in_one_go, one_by_one()):
        seeds = [randn(*one.shape, seed=i) for i, one in enumerate(out)]
        answers.append([*out, *torch.autograd.grad(out, learned, seeds)])
    assert all(torch.allclose(one, other) for one, other in zip(*answers, strict=True))


@needs_compiler
def test_c_norms_and_rotates_heads_as_the_reference_does(monkeypatch: pytest.MonkeyPatch) -> None:
    rotary, inputs = numbers(torch.float32)
    answers = []
    for kernels in (learning, reference):
        monkeypatch.setattr(autograd, "kernels_for", lambda _, kernels=kernels: kernels)
        given = [one.clone().requires_grad_() for one in inputs]
        out = normed_and_rotated(rotary, *given)
        seeds = [randn(*one.shape, seed=9, dtype=torch.float32) for one in out]
        answers.append([*out, *torch.autograd.grad(out, given, seeds)])
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*answers, strict=True))
