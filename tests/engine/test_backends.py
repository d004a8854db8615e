"""A model is proven at start-up on the path that will run: it samples exactly, perhaps more slowly, or is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.engine.support.exact import FAMILIES, SMALL, VOCABULARY, prompt_of, random_model  # noqa: E402
from tests.engine.support.unusual import CHUNK, LONGROPE, PAD, UNUSUAL, reformer, roberta, unusual_model  # noqa: E402
from verifiers.engine.backends import BATCHED, DESCRIPTIONS, MODULES, SEQUENTIAL, UNCACHED, UnsupportedModelError  # noqa: E402
from verifiers.engine.engine import Engine  # noqa: E402
from verifiers.engine.plan import plan  # noqa: E402
from verifiers.engine.sequence import Generated, Sampling  # noqa: E402
from verifiers.kernels import prove  # noqa: E402
from verifiers.kernels.attention import NAME  # noqa: E402

FRESH = 0.02  # the scale of weights that were never trained
LENGTH = {"Doge": CHUNK}  # past its window its own forward is not causal
PROMPTS = [prompt_of(n, seed=n) for n in (1, 3, CHUNK - 3, CHUNK + 1, 40)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def worst_error(model: Any, replies: list[Generated]) -> float:
    """The largest error of a logprob, beside the model's own forward over the whole sequence."""
    worst = 0.0
    for reply in replies:
        with torch.no_grad():
            logits_TV = prove.plain_logits(model, [*reply.prompt_ids, *reply.ids], len(reply.ids) + 1)[:-1]
        expected = torch.log_softmax(logits_TV, -1)[torch.arange(len(reply.ids)), torch.tensor(reply.ids)]
        worst = max(worst, float((expected - torch.tensor(reply.raw_logprobs)).abs().max()))
    return worst


@pytest.mark.parametrize("family", UNUSUAL)
def test_a_model_with_attention_or_state_of_its_own_samples_exactly(family: str, caplog: Any) -> None:
    model, length = unusual_model(family), LENGTH.get(family, 96)
    with caplog.at_level(logging.WARNING, "verifiers.engine"):
        engine = Engine(model, rows=3, length=length)
    try:
        fitting = [prompt for prompt in PROMPTS if len(prompt) < length]
        asked = [engine.submit(prompt, Sampling(max_tokens=20, seed=1), n=2) for prompt in fitting]
        replies = [future.result(60) for futures in asked for future in futures]
        assert worst_error(model, replies) < 2e-4
        assert len({tuple(reply.ids) for reply in replies}) > len(fitting), "completions of one prompt go apart"
        first = replies[0]
        if len(first.prompt_ids) + len(first.ids) + 3 < length:
            turn = [*first.prompt_ids, *first.ids, 5, 6]
            assert worst_error(model, engine.generate([turn], Sampling(max_tokens=9, seed=2))) < 2e-4
    finally:
        engine.close()
    if engine.backend.name not in BATCHED:
        assert f"is sampled {DESCRIPTIONS[engine.backend.name]}, which is exact and slower" in caplog.text


@pytest.mark.parametrize("family", [name for name in UNUSUAL if name != "Doge"])
def test_weights_that_were_never_trained_hide_no_wrong_way_of_attending(family: str) -> None:
    engine = Engine(unusual_model(family, initializer_range=FRESH), rows=2, length=64)
    engine.close()
    assert engine.backend.name == SEQUENTIAL


@pytest.mark.parametrize(("length", "before"), [(8, 2), (24, 2), (64, 2), (64, 6), (80, 13)])
def test_a_chunk_that_ends_just_before_the_context_does_is_passed_by_the_proof_too(length: int, before: int) -> None:
    model = unusual_model("Llama4", attention_chunk_size=length - before)
    engine = Engine(model, rows=2, length=length)
    try:
        replies = engine.generate([[5], [6, 7, 8]], Sampling(max_tokens=length, seed=1))
    finally:
        engine.close()
    assert worst_error(model, replies) < 2e-4


def test_attention_that_selects_its_keys_is_proven_past_as_many_as_it_selects() -> None:
    selected, small = 70, {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    config = transformers.DeepseekV32Config(
        **small, num_key_value_heads=4, index_topk=selected, index_n_heads=2, index_head_dim=16, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, moe_intermediate_size=16,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.DeepseekV32ForCausalLM(config).eval()
    with pytest.raises(UnsupportedModelError, match=f"try length={selected}"):  # past it, its own forward is not causal
        Engine(model, rows=2, length=160)
    engine = Engine(model, rows=2, length=selected)
    try:
        replies = engine.generate([[5], [6, 7, 8]], Sampling(max_tokens=selected, seed=1))
    finally:
        engine.close()
    assert worst_error(model, replies) < 2e-4


@pytest.mark.parametrize("scale", [FRESH, 0.3])
@pytest.mark.parametrize("family", FAMILIES)
def test_common_decoders_are_batched(family: str, scale: float) -> None:
    engine = Engine(random_model(family, initializer_range=scale), rows=2, length=64)
    engine.close()
    assert engine.backend.name in BATCHED


def test_the_proof_leaves_no_trace() -> None:
    model = unusual_model("Qwen3.5", initializer_range=FRESH).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    heard: list[Any] = []
    model.register_forward_pre_hook(lambda *_: heard.append(1))
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    engine = Engine(model, rows=2, length=64)
    engine.close()
    assert torch.equal(torch.rand(1), expected), "the caller's random numbers are as they were"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert all(module.training for module in model.modules())
    assert not heard
    assert (engine.steps, engine.tokens, engine.runner.changes) == (0, 0, 0)


def test_no_logits_are_computed_for_places_that_the_proof_does_not_compare() -> None:
    model, window = random_model("Mistral", sliding_window=100), 100
    places: list[int] = []
    own = model.lm_head.forward
    model.lm_head.forward = lambda hidden: (places.append(hidden.shape[-2]), own(hidden))[1]
    Engine(model, rows=2, length=200).close()
    assert places
    assert max(places) < window // 2, "a long prompt times a large vocabulary would take gigabytes"


def test_a_model_that_is_not_causal_is_refused() -> None:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        initializer_range=0.3,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="is it a causal language model"):
        Engine(transformers.BertLMHeadModel(config).eval(), rows=2, length=64)


def test_a_model_that_is_causal_up_to_a_window_is_refused_with_the_length_that_works() -> None:
    model = unusual_model("Doge")
    with pytest.raises(UnsupportedModelError, match=f"try length={CHUNK}"):
        Engine(model, rows=2, length=64)
    Engine(model, rows=2, length=CHUNK).close()


def test_a_model_that_does_not_count_padding_as_positions_samples_exactly_after_it_too() -> None:
    model = roberta()
    engine = Engine(model, rows=2, length=96)
    try:
        way = Sampling(max_tokens=20, seed=1, logit_bias={PAD: 6.0})
        replies = engine.generate([[5, 6, 7], [5, PAD, 6, 7]], way)
        assert all(PAD in reply.ids[:-1] for reply in replies)
        assert worst_error(model, replies) < 2e-4
    finally:
        engine.close()


def test_a_model_whose_own_forward_is_not_the_same_twice_is_refused_in_one_sentence() -> None:
    with pytest.raises(UnsupportedModelError, match="its own forward is not deterministic"):
        Engine(reformer(), rows=2, length=96)


def test_weights_that_are_not_loaded_or_cannot_be_watched_are_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM are on the meta device"):
        Engine(random_model("Llama").to("meta"))
    with torch.inference_mode():
        model = random_model("Llama")
    with pytest.raises(ValueError, match=r"inference-mode tensors, .* load it outside that context"):
        Engine(model)


def test_linear_layers_without_a_weight_tensor_are_run_by_their_own_forward() -> None:
    class Doubled(torch.nn.Module):
        def __init__(self, linear: Any) -> None:
            super().__init__()
            self.inner, self.out_features = [linear], linear.out_features

        def weight(self) -> Any:
            return self.inner[0].weight

        def forward(self, x: Any) -> Any:
            return 2 * self.inner[0](x)

    model = random_model("Llama")
    for layer in model.model.layers:
        layer.mlp.up_proj = Doubled(layer.mlp.up_proj)
    engine = Engine(model, rows=2, length=64)
    try:
        assert engine.backend.name == "torch", engine.backend
        assert worst_error(model, engine.generate(PROMPTS, Sampling(max_tokens=8, seed=1))) < 2e-4
    finally:
        engine.close()


def test_a_forward_that_fails_is_refused_in_one_sentence() -> None:
    model = random_model()
    model.model.norm = None
    with pytest.raises(
        UnsupportedModelError, match=r"LlamaForCausalLM cannot be sampled from: TypeError: .*"
    ) as refusal:
        Engine(model, rows=2, length=64)
    assert "\n" not in str(refusal.value)


def test_attention_that_is_wrong_here_is_noticed_and_left_to_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick path of this very machine is what is proven: a fault in it is found at start-up."""
    from verifiers.engine.model_runner import ModelRunner

    own = ModelRunner.forward

    def wrong(self: Any, *args: Any) -> Any:
        logits = own(self, *args)
        return logits if self.uses_modules else logits.roll(1, -1)

    monkeypatch.setattr(ModelRunner, "forward", wrong)
    monkeypatch.setattr(ModelRunner, "decode", lambda *_: None)
    model = random_model()
    engine = Engine(model, rows=2, length=64)
    try:
        assert engine.backend.name == MODULES
        assert worst_error(model, engine.generate(PROMPTS[:3], Sampling(max_tokens=9, seed=1))) < 2e-4
    finally:
        engine.close()


@pytest.mark.parametrize("longest", [64, 1], ids=["always", "after-one-token"])
def test_a_cache_that_is_wrong_is_noticed_and_not_used(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = unusual_model("LFM2")
    own = type(model).forward

    def forgetful(self: Any, *args: Any, past_key_values: Any = None, **more: Any) -> Any:
        if past_key_values is not None and past_key_values.get_seq_length() <= longest:
            more["position_ids"] = torch.zeros_like(more["input_ids"])
        return own(self, *args, past_key_values=past_key_values, **more)

    forgetful.__signature__ = __import__("inspect").signature(own)  # type: ignore[attr-defined]
    monkeypatch.setattr(type(model), "forward", forgetful)
    engine = Engine(model, rows=2, length=64)
    try:
        assert engine.backend.name == UNCACHED
        assert worst_error(model, engine.generate(PROMPTS[:3], Sampling(max_tokens=9, seed=1))) < 2e-4
    finally:
        engine.close()


def test_a_sequence_that_has_ended_holds_no_memory() -> None:
    import gc
    import weakref

    model, caches = unusual_model("Qwen3.5"), []
    engine = Engine(model, rows=3, length=64)
    model.register_forward_hook(lambda _, __, out: caches.append(weakref.ref(out.past_key_values)))
    try:
        futures = engine.submit([5, 6, 7], Sampling(max_tokens=4, seed=1), n=3)
        for future in [*futures, *engine.submit([8, 9], Sampling(max_tokens=1, seed=1))]:
            future.result(60)
    finally:
        engine.close()
    gc.collect()
    assert caches
    assert not [one for one in caches if one() is not None]


def test_the_logprobs_of_a_prompt_after_learned_virtual_tokens_are_those_of_its_own_tokens() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(random_model("Llama"), settings).eval()
    engine = Engine(model, rows=2, length=64)
    try:
        (answer,) = engine.generate([PROMPTS[1]], Sampling(max_tokens=4, temperature=0.0, prompt_logprobs=0))
    finally:
        engine.close()
    ids = [*answer.prompt_ids, *answer.ids]
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor([ids])).logits[0, -len(ids) :]
    logprobs_T = torch.log_softmax(logits_TV[:-1], -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert answer.prompt_logprobs is not None
    scored = [one[0] for one in answer.prompt_logprobs if one is not None]
    assert [*scored, *answer.raw_logprobs] == pytest.approx(logprobs_T, abs=2e-4)


def test_a_longrope_model_is_planned_within_the_length_up_to_which_neighbours_do_not_matter() -> None:
    config = unusual_model("Phi3-longrope").config
    chosen = plan(config, dtype=torch.float32, device="cpu", weights_loaded=True)
    assert chosen.length == LONGROPE["original_max_position_embeddings"]
    asked = plan(config, length=64, dtype=torch.float32, device="cpu", weights_loaded=True)
    assert asked.length == 64
    engine = Engine(unusual_model("Phi3-longrope"), rows=2, length=chosen.length)
    engine.close()
    assert engine.backend.name in BATCHED


def test_a_model_without_attention_heads_can_be_planned() -> None:
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8)
    assert not hasattr(config, "num_attention_heads")
    chosen = plan(config, dtype=torch.float32, device="cpu", weights_loaded=False)
    model = transformers.MambaForCausalLM(config).eval()
    engine = Engine(model, rows=chosen.rows, length=min(chosen.length, 64))
    try:
        assert engine.backend.name == SEQUENTIAL
        assert worst_error(model, engine.generate(PROMPTS[:2], Sampling(max_tokens=5, seed=1))) < 2e-4
    finally:
        engine.close()


def test_attention_functions_are_put_back() -> None:
    model = unusual_model("Qwen3.5")
    before = model.config._attn_implementation
    Engine(model, rows=2, length=64).close()
    assert model.config._attn_implementation == before != NAME
