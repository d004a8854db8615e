"""Whatever the model, what is learned from is what its own forward says, and no layout changes that."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import verifiers as vf  # noqa: E402
from tests.engine.support.exact import VOCABULARY, random_model  # noqa: E402
from tests.engine.support.unusual import CHUNK, PAD, UNUSUAL, reformer, roberta, unusual_model  # noqa: E402
from verifiers.engine.engine import Engine  # noqa: E402
from verifiers.engine.sequence import Sampling  # noqa: E402
from verifiers.kernels import prove  # noqa: E402
from verifiers.samples import Sample  # noqa: E402
from verifiers.trainers.learning.logprobs import TokenScorer  # noqa: E402
from verifiers.trainers.learning.micro_batches import ANY_LENGTH, TrainSample, micro_batches, split_at_rope_bounds  # noqa: E402

FRESH = 0.02


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def sequences(pad: int | None = None) -> list[TrainSample]:
    """Two groups, in which some end before the chunk does, some after, and some go on for long."""
    draw, made = random.Random(2), []
    for prompt, replies in ((5, (4, CHUNK - 2, 3 * CHUNK)), (CHUNK + 3, (6, 20))):
        ids = [draw.randrange(3, VOCABULARY) for _ in range(prompt)]
        for n in replies:
            reply = [draw.randrange(3, VOCABULARY) for _ in range(n)]
            if pad is not None:
                reply = [pad if i % 2 else token for i, token in enumerate(reply)]
            sample = Sample(
                prompt_ids=ids, completion_ids=reply, completion_mask=[1] * n, completion_logprobs=[0.0] * n
            )
            made.append(TrainSample(sample=sample, advantage=1.0))
    return made


def learned(scorer: TokenScorer, pad: int | None = None) -> list[Any]:
    """The logprob of every trained token, in order, as training computes them."""
    parts = split_at_rope_bounds(sequences(pad), scorer.layouts.rope_bounds)
    found: dict[int, Any] = {}
    for batch in micro_batches(sequences(pad), max_tokens=4096, **scorer.layouts.limits()):
        logprobs = scorer.logprobs(batch)
        for i, member in enumerate(batch.members):
            found[member] = logprobs[batch.sequence_N == i]
    assert len(found) == len(parts)
    return [found[i] for i in sorted(found)]


def expected(model: Any, pad: int | None = None) -> list[Any]:
    """The same from the definition: each sequence alone, by the model's own forward."""
    found = []
    for one in sequences(pad):
        reply, ids = one.sample.completion_ids, [*one.sample.prompt_ids, *one.sample.completion_ids]
        logits_TV = prove.plain_logits(model, ids, len(reply) + 1)[:-1]
        found.append(torch.log_softmax(logits_TV, -1)[torch.arange(len(reply)), torch.tensor(reply)])
    return found


@pytest.mark.parametrize("family", [name for name in UNUSUAL if name != "Doge"])
def test_the_logprobs_that_are_learned_from_are_those_of_each_sequence_alone(family: str) -> None:
    model = unusual_model(family)
    scorer = TokenScorer(model)
    with torch.no_grad():
        ours, theirs = torch.cat(learned(scorer)), torch.cat(expected(model))
    assert len(ours) == len(theirs)
    assert float((ours - theirs).abs().max()) < 2e-4


def test_a_model_that_does_not_count_padding_as_positions_learns_exactly_after_it_too() -> None:
    model = roberta()
    scorer = TokenScorer(model)
    with torch.no_grad():
        ours, theirs = torch.cat(learned(scorer, PAD)), torch.cat(expected(model, PAD))
    assert float((ours - theirs).abs().max()) < 2e-4


def test_a_model_whose_own_forward_is_not_the_same_twice_cannot_learn() -> None:
    with pytest.raises(ValueError, match="its own forward is not deterministic"):
        _ = TokenScorer(reformer()).layouts


@pytest.mark.parametrize("scale", [FRESH, 0.3])
def test_sequences_longer_than_a_chunk_of_attention_are_not_packed(scale: float) -> None:
    layouts = TokenScorer(unusual_model("Llama4", initializer_range=scale)).layouts
    assert layouts.longest_packed <= CHUNK
    assert layouts.longest_batched == ANY_LENGTH, "side by side its own masks are right"


@pytest.mark.parametrize("scale", [FRESH, 0.3])
def test_sequences_past_the_bound_of_longrope_learn_alone(scale: float) -> None:
    layouts = TokenScorer(unusual_model("Phi3-longrope", initializer_range=scale)).layouts
    assert layouts.longest_batched == CHUNK
    assert layouts.longest_packed <= CHUNK


def test_a_window_too_wide_to_be_tried_out_costs_no_time_and_longer_sequences_learn_alone() -> None:
    wide = 1 << 20
    layouts = TokenScorer(random_model("Mistral", sliding_window=wide, max_position_embeddings=2 * wide)).layouts
    assert (layouts.longest_packed, layouts.longest_batched) == (wide, wide)
    layouts = TokenScorer(random_model("Mistral", sliding_window=wide)).layouts
    assert layouts.longest_batched == ANY_LENGTH, "no sequence is as long as that"


def test_a_model_on_which_nothing_can_be_proven_learns_one_sequence_at_a_time() -> None:
    config = transformers.NanoChatConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.002, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.NanoChatForCausalLM(config)  # its norms have no weights that could be scaled
    with prove.realistic(model) as is_telling:
        assert not is_telling
    assert TokenScorer(model).layouts.longest_batched == 0


def test_a_reply_that_grows_past_the_bound_of_longrope_learns_what_it_was_sampled_from() -> None:
    model = unusual_model("Phi3-longrope")
    engine = Engine(model, rows=2, length=64)
    try:
        (reply,) = engine.generate([[5, 6, 7, 8]], Sampling(max_tokens=30, seed=1))
    finally:
        engine.close()
    sample = Sample(
        prompt_ids=reply.prompt_ids,
        completion_ids=reply.ids,
        completion_mask=[1] * len(reply.ids),
        completion_logprobs=reply.logprobs,
    )
    scorer = TokenScorer(model)
    made = micro_batches([TrainSample(sample=sample, advantage=1.0)], max_tokens=4096, **scorer.layouts.limits())
    with torch.no_grad():
        apart = [float((scorer.logprobs(batch) - batch.old_N).abs().max()) for batch in made]
    assert len(apart) == 2
    assert max(apart) < 2e-4


def test_a_cap_on_logits_is_found_in_a_model_that_was_never_trained() -> None:
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(config).eval()
    assert config.final_logit_softcapping == 30.0
    with torch.no_grad():
        assert model(input_ids=torch.arange(8)[None]).logits.abs().max() < 1.0, "where the cap does not show"
    scorer = TokenScorer(model)
    with torch.no_grad():  # as training would make it: certain of itself
        model.model.norm.weight.add_(200.0)
        ours, theirs = torch.cat(learned(scorer)), torch.cat(expected(model))
    assert float((ours - theirs).abs().max()) < 2e-4


def test_a_model_that_is_not_causal_is_refused_before_it_learns() -> None:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        initializer_range=0.3,
    )  # fmt: skip
    with pytest.raises(ValueError, match="BertLMHeadModel is not causal"):
        _ = TokenScorer(transformers.BertLMHeadModel(config).eval()).layouts


@pytest.mark.parametrize("family", ["DeepseekV32", "GlmMoeDsa"])
def test_a_model_that_is_not_causal_past_a_bound_is_refused_before_it_learns(family: str) -> None:
    """One that selects the keys a token attends to, in transformers among those after it too."""
    config = getattr(transformers, f"{family}Config", None)
    if config is None:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(0)
    made = config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=VOCABULARY, max_position_embeddings=512, initializer_range=0.3, moe_intermediate_size=32,
        n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, n_shared_experts=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=16, index_topk=8, index_head_dim=16, index_n_heads=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="is not causal"):
        _ = TokenScorer(getattr(transformers, f"{family}ForCausalLM")(made).eval()).layouts


def test_a_head_that_only_multiplies_is_still_run_apart() -> None:
    assert TokenScorer(random_model("Llama", initializer_range=FRESH))._is_split


def test_a_gradient_that_is_zero_by_definition_keeps_no_model_from_learning_side_by_side() -> None:
    """A bias that is added to every key alike changes no attention: its gradient is rounding, never twice the same."""
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=32, init_std=0.3, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    layouts = TokenScorer(transformers.OPTForCausalLM(config)).layouts
    assert layouts.longest_batched == layouts.longest_packed == ANY_LENGTH


def test_a_model_whose_body_is_of_another_type_than_its_head_learns_by_its_own_forward() -> None:
    model = unusual_model("Mamba").to(torch.bfloat16)
    with torch.no_grad():
        assert model.backbone(torch.tensor([[5, 6]])).last_hidden_state.dtype is torch.float32
        ours, theirs = torch.cat(learned(TokenScorer(model))), torch.cat(expected(model))
    assert float((ours - theirs).abs().max()) < 0.2


def test_layers_that_are_frozen_as_they_are_evaluated_stay_so() -> None:
    model = random_model().train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    assert TokenScorer(model).layouts.longest_batched
    assert [module.training for module in model.modules()] == before


def test_a_hybrid_model_trains_with_ratios_of_one_where_nothing_moves(tmp_path: Any) -> None:
    _, tokenizer = vf.tiny_model(texts=["0123456789+= "], hidden_size=16)
    model = unusual_model("Qwen3.5", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    env = vf.SingleTurnEnv(
        dataset=[{"question": f"{a}+{a}=", "answer": str(2 * a)} for a in range(4)],
        rubric=vf.Rubric([lambda completion: float(len(str(completion)) % 3)]),
    )
    config = vf.GRPOConfig(
        batch_size=8, group_size=4, max_new_tokens=8, max_steps=2, learning_rate=0.0, output_dir=str(tmp_path / "out")
    )
    trainer = vf.GRPOTrainer(model=model, tokenizer=tokenizer, env=env, config=config)
    report = trainer.train()
    assert report.steps
    for step in report.steps:
        assert step["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
        assert step["ratio_max"] == pytest.approx(1.0, abs=1e-3)
        assert step["clip_fraction"] == 0.0


def test_an_engine_that_is_made_during_a_backward_pass_waits_with_its_proof(tmp_path: Any) -> None:
    """A backward pass reads weights without the model's lock, and a proof scales them for the moment."""
    _, tokenizer = vf.tiny_model(texts=["0123456789+= "], hidden_size=16)
    model = random_model("GPT2", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    env = vf.SingleTurnEnv(
        dataset=[{"question": f"{a}+{a}=", "answer": str(2 * a)} for a in range(4)],
        rubric=vf.Rubric([lambda completion: float(len(str(completion)) % 3)]),
    )
    config = vf.GRPOConfig(
        batch_size=8, group_size=4, max_new_tokens=8, max_steps=1, learning_rate=1e-3, output_dir=str(tmp_path / "out")
    )
    trainer = vf.GRPOTrainer(model=model, tokenizer=tokenizer, env=env, config=config)
    makers: list[threading.Thread] = []

    def make_engine(_: Any) -> None:
        if not makers:
            makers.append(threading.Thread(target=lambda: Engine(model, rows=1, length=32).close()))
            makers[0].start()
            makers[0].join(1.0)  # time enough to spoil what the rest of this pass reads

    model.transformer.ln_f.weight.register_hook(make_engine)
    assert trainer.train().steps
    makers[0].join()
