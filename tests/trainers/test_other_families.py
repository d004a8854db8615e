"""Families that no code here knows: what is sampled and what is learned are transformers' own numbers for them, too."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.engine.support.exact import SMALL, VOCABULARY, WINDOW, assert_exact, prompt_of  # noqa: E402
from tests.trainers.test_families import assert_same, expected, learned  # noqa: E402
from verifiers.engine.engine import Engine  # noqa: E402
from verifiers.engine.sequence import Sampling  # noqa: E402

pytestmark = pytest.mark.slow

LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.02,
    "logits_scaling": 8.0,
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention sinks": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "latent attention": ("DeepseekV3", {**LATENT, **EXPERTS, "first_k_dense_replace": 1}),
    "states alone": ("Mamba", {"state_size": 8}),
    "states and attention": (
        "Jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 2},
    ),
    "convolutions and attention": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "position biases": ("Falcon", {"alibi": True}),
    "multipliers": ("Granite", MULTIPLIERS),
    "parallel layers": ("Cohere2", {"sliding_window": WINDOW, "logit_scale": 0.5}),
    "normed heads": ("StableLm", {"use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.5}),
    "differences of attention": ("DiffLlama", {}),
    "chunked attention": (
        "Llama4Text",
        {"attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 16},
    ),
    "learned positions": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": None}),
}


def made(name: str) -> Any:
    family, special = OTHERS[name]
    torch.manual_seed(0)
    settings = {key: value for key, value in {**SMALL, **special}.items() if value is not None}
    config = getattr(transformers, f"{family}Config")(**settings)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


@pytest.mark.parametrize("name", OTHERS)
def test_tokens_of_a_family_that_is_not_known_have_the_logprobs_of_its_own_forward(name: str) -> None:
    torch.set_num_threads(1)
    model = made(name)
    engine = Engine(model, rows=4, length=128)
    try:
        for way in (Sampling(max_tokens=20, temperature=0.0), Sampling(max_tokens=20, seed=3)):
            asked = [prompt_of(n, seed=n, vocabulary=VOCABULARY) for n in (1, WINDOW + 1, 40)]
            for answer in engine.generate(asked, way):
                with engine.lock:
                    assert_exact(model, answer, way, within=1e-3)
        first = engine.generate([asked[-1]], way)[0]
        second = engine.generate([[*first.prompt_ids, *first.ids, *prompt_of(5)]], way)[0]
        with engine.lock:
            assert_exact(model, second, way, within=1e-3)
    finally:
        engine.close()


@pytest.mark.parametrize("name", OTHERS)
def test_a_family_that_is_not_known_learns_from_the_numbers_of_each_sequence_alone(name: str) -> None:
    torch.set_num_threads(1)
    model = made(name)
    ours, theirs = learned(model)[1], expected(model)
    largest = max(float(one.abs().max()) for key, one in theirs.items() if key != "logprobs")
    # Gradients that are rounding alone (a bias on keys) say nothing.
    told = {key for key, one in theirs.items() if key == "logprobs" or float(one.abs().max()) > 1e-4 * largest}
    assert told <= ours.keys()
    assert_same({key: ours[key] for key in told}, {key: theirs[key] for key in told}, within=1e-3)
