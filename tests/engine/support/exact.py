"""Tiny random models of many families, and the logprobs that a plain forward pass gives the tokens of a completion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from verifiers.engine.sequence import Generated, Sampling

VOCABULARY = 97
WINDOW = 8
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "Qwen2": ("Qwen2", {}),
    "Qwen2-window": ("Qwen2", {"use_sliding_window": True, **SLIDING}),
    "Qwen3": ("Qwen3", {"head_dim": 16}),
    "SmolLM3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "Gemma": ("Gemma", {"head_dim": 16}),
    "Gemma2": ("Gemma2", {"head_dim": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16, **SLIDING}),
    "Gemma3": ("Gemma3", {"head_dim": 16, "query_pre_attn_scalar": 16, **SLIDING}),
    "Mistral": ("Mistral", {"sliding_window": WINDOW}),
    "GPT2": ("GPT2", {"num_key_value_heads": None}),
    "GPTNeoX": ("GPTNeoX", {"num_key_value_heads": None}),
    "Phi3": ("Phi3", {"sliding_window": WINDOW}),
    "Phi4-mini": ("Phi3", {"partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    "Olmo2": ("Olmo2", {}),
    "Qwen3-MoE": ("Qwen3Moe", {"head_dim": 16, "num_experts": 4, **EXPERTS}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
}
MIXTURES = {"Qwen3-MoE", "Mixtral"}  # which expert a token goes to may turn on the last bit in half precision


def random_model(family: str = "Llama", *, dtype: Any = None, seed: int = 0, **more: Any) -> Any:
    """A model of a few thousand parameters, whose logits are far from flat."""
    name, special = FAMILIES[family]
    settings = {key: value for key, value in {**SMALL, **special, **more}.items() if value is not None}
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}{'Text' if name == 'Gemma3' else ''}Config")(**settings)
    config._attn_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype or torch.float32).eval()


def prompt_of(length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (length,), generator=generator).tolist()


def logits_of(model: Any, prompt: Sequence[int], ids: Sequence[int]) -> Any:
    """The logits that each of ``ids`` was drawn from, by one forward pass over everything: a trainer's."""
    with torch.no_grad():
        text = torch.tensor([[*prompt, *ids]], device=next(model.parameters()).device)
        return model(input_ids=text).logits[0, len(prompt) - 1 : -1].float()


def kept_of(probs: Sequence[float], sampling: Sampling) -> set[int]:
    """What top-k, top-p and min-p leave, by sorting; ties with the last one kept are kept."""
    order = sorted(probs, reverse=True)
    floors = [sampling.min_p * order[0]]
    if 0 < sampling.top_k < len(order):
        floors.append(order[sampling.top_k - 1])
    if sampling.top_p < 1:
        reached = next((i for i in range(len(order)) if math.fsum(order[: i + 1]) >= sampling.top_p), len(order) - 1)
        floors.append(order[reached])
    return {token for token, p in enumerate(probs) if p >= max(floors)}


def expected(model: Any, answer: Generated, sampling: Sampling) -> tuple[list[float], list[float]]:
    """Sampling and raw logprobs of a completion, from the definition."""
    logits_TV = logits_of(model, answer.prompt_ids, answer.ids)
    raw = torch.log_softmax(logits_TV, -1)
    for token, bias in sampling.logit_bias.items():
        logits_TV[:, token] += bias
    tempered = torch.log_softmax(logits_TV / (sampling.temperature or 1.0), -1)
    drawn = []
    for t, token in enumerate(answer.ids):
        mass = 1.0
        if sampling.truncates and sampling.temperature:
            probs = tempered[t].exp().tolist()
            mass = math.fsum(probs[kept] for kept in kept_of(probs, sampling))
        drawn.append(float(tempered[t, token]) - math.log(mass))
    return drawn, [float(raw[t, token]) for t, token in enumerate(answer.ids)]


def assert_exact(model: Any, answer: Generated, sampling: Sampling, *, within: float = 2e-4) -> None:
    drawn, raw = expected(model, answer, sampling)
    assert len(answer.logprobs) == len(answer.raw_logprobs) == len(answer.ids) > 0
    worst = max(abs(a - b) for a, b in zip(answer.logprobs + answer.raw_logprobs, drawn + raw, strict=True))
    assert worst < within, f"{worst} apart: {answer.logprobs} {drawn}"
