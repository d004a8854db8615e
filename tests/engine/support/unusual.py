"""Tiny models that do not attend as common decoders do: state outside attention, chunks, biases of their own."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.engine.support.exact import SMALL

HYBRID = ["linear_attention", "full_attention", "linear_attention"]
CONVOLUTIONS = ["conv", "full_attention", "conv"]
LINEAR = {
    "layer_types": HYBRID,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CHUNK = 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 6.0],
    "original_max_position_embeddings": CHUNK,
}
GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}

UNUSUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5": ("Qwen3_5Text", LINEAR),
    "Qwen3-Next": ("Qwen3Next", {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "LFM2": ("Lfm2", {"layer_types": CONVOLUTIONS}),
    "Llama4": (
        "Llama4Text",
        {
            "attention_chunk_size": CHUNK,
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
            "no_rope_layers": [1, 0, 1],
            "moe_layers": [1],
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "head_dim": 8,
        },
    ),
    "GPT-J": ("GPTJ", {**GPT, "rotary_dim": 4}),
    "GPT-Neo": (
        "GPTNeo",
        {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "num_heads": 4, "window_size": 8},
    ),
    "Doge": ("Doge", {"keep_window_size": CHUNK}),
    "Bloom": ("Bloom", {"n_layer": 3, "n_head": 4}),
    "Phi3-longrope": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": CHUNK, "sliding_window": None},
    ),
    "Mamba": ("Mamba", {"state_size": 8, "num_hidden_layers": 3}),
}
CLASSES = {"Qwen3.5": "Qwen3_5", "Llama4": "Llama4"}
NOT_TAKEN = {
    "GPTJ": ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings"),
    "GPTNeo": ("num_hidden_layers", "num_attention_heads"),
    "Bloom": ("num_hidden_layers", "num_attention_heads"),
}


def unusual_model(family: str, *, seed: int = 0, **more: Any) -> Any:
    """A model of this family; with ``initializer_range=0.02`` one that was never trained."""
    name, special = UNUSUAL[family]
    given = {key: value for key, value in SMALL.items() if key not in NOT_TAKEN.get(name, ())}
    config = getattr(transformers, f"{name}Config")(**{**given, **special, **more})
    torch.manual_seed(seed)
    kind = getattr(transformers, f"{CLASSES.get(family, name)}ForCausalLM")
    return kind(config).eval()


PAD = 1


def roberta(seed: int = 0) -> Any:
    """A decoder that does not count tokens of padding as positions, wherever they are."""
    config = transformers.RobertaConfig(
        vocab_size=SMALL["vocab_size"], hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=260, is_decoder=True, pad_token_id=PAD, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(seed)
    return transformers.RobertaForCausalLM(config).eval()


def reformer() -> Any:
    """A decoder whose attention hashes at random."""
    config = transformers.ReformerConfig(
        vocab_size=SMALL["vocab_size"], hidden_size=32, attention_head_size=8, num_attention_heads=4, num_buckets=4,
        is_decoder=True, axial_pos_embds=False, max_position_embeddings=256, attn_layers=["local", "lsh"],
        num_hashes=2, lsh_attn_chunk_length=8, local_attn_chunk_length=8, feed_forward_size=32,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.ReformerModelWithLMHead(config).eval()
