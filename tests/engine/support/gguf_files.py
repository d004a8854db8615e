"""GGUF files for tests: a writer of the format, and a tiny model and tokenizer to write with it."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(item: Any) -> bytes:
    """A value with its type in front."""
    if isinstance(item, bool):
        return struct.pack("<I?", BOOL, item)
    if isinstance(item, int):
        return struct.pack("<II", U32, item) if 0 <= item < 1 << 32 else struct.pack("<IQ", U64, item)
    if isinstance(item, float):
        return struct.pack("<If", F32, item)
    if isinstance(item, str):
        return struct.pack("<I", STRING) + text(item)
    if isinstance(item, bytes):  # as it is, type and all
        return item
    kind = STRING if not item or isinstance(item[0], str) else I32
    body = [text(x) if kind == STRING else struct.pack("<i", x) for x in item]
    return struct.pack("<IIQ", ARRAY, kind, len(item)) + b"".join(body)


def write(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], int, bytes]], version: int = 3
) -> Path:
    """``tensors`` maps a name to its shape (slowest first), its type number and its bytes."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(text(key) + value(item) for key, item in metadata.items())
    data = b""
    for name, (shape, number, stored) in tensors.items():
        data += bytes(-len(data) % 32)
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], number, len(data))
        data += stored
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a query or key matrix in llama.cpp's order, as its converter puts them."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def tensors_of(model: Any) -> dict[str, tuple[tuple[int, ...], int, bytes]]:
    """The weights of a transformers model as llama.cpp's converter would write them, in float32."""
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weights = tensor.detach().float().numpy()
        if key in OUTER:
            name = OUTER[key]
        else:
            _, _, layer, rest = key.split(".", 3)
            part, suffix = rest.rsplit(".", 1)
            name = f"blk.{layer}.{NAMES[part]}.{suffix}"
            if config.model_type == "llama" and NAMES[part] in heads:
                weights = permuted(weights, heads[NAMES[part]])
        tensors[name] = (weights.shape, 0, np.ascontiguousarray(weights, "<f4").tobytes())
    return tensors


def model_metadata(config: Any) -> dict[str, Any]:
    kind = config.model_type
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if kind == "qwen3":
        sizes["attention.key_length"] = config.head_dim
    return {"general.architecture": kind} | {f"{kind}.{key}": size for key, size in sizes.items()}


def tokenizer_metadata(pre: str = "smollm", template: str | None = "{{ messages[0]['content'] }}") -> dict[str, Any]:
    """Three special tokens, every byte, and a few merges, among them one of two digits that is never to be used."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "h e", "l l", "he ll", "hell o", "Ġ hello"]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *alphabet, *(merge.replace(" ", "") for merge in merges), "<user>"]
    types = [3] * len(special) + [1] * (len(tokens) - len(special) - 1) + [4]
    metadata: dict[str, Any] = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}
    metadata |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "padding_token_id": 2}
    found = {f"tokenizer.ggml.{key}": item for key, item in metadata.items()}
    return found | ({} if template is None else {"tokenizer.chat_template": template})


def tiny_model(kind: str = "llama", *, is_tied: bool = True, **options: Any) -> Any:
    """A random model of a few thousand weights of the family."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=272,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=is_tied,
        initializer_range=0.3,
        **options,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def write_model(path: Path, model: Any, **metadata: Any) -> Path:
    """A whole GGUF of a tiny model with a tokenizer; further metadata replace or (None) remove entries."""
    entries = model_metadata(model.config) | tokenizer_metadata() | metadata
    return write(path, {key: item for key, item in entries.items() if item is not None}, tensors_of(model))
