"""The metadata and tensors of a GGUF become a transformers configuration and state dict, for the Llama family.

Shapes are all checked before anything is built, so a file whose numbers do not agree is refused at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from verifiers.engine.files.gguf import GGUF

if TYPE_CHECKING:
    import torch

_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ROPE_TABLE = "rope_freqs.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The numbers of a Llama-like model."""

    architecture: str
    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int


class _Metadata:
    """The metadata of one file, asked for by the last part of a key."""

    def __init__(self, file: GGUF) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{file.path} holds a model of the architecture {self.architecture!r}; GGUF files of "
                f"{', '.join(ARCHITECTURES)} are read: take the model's safetensors instead"
            )

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def count(self, key: str, default: int | None = None) -> int:
        return int(self._positive(key, default, int))

    def real(self, key: str, default: float | None = None) -> float:
        return float(self._positive(key, default, (int, float)))

    def _positive(self, key: str, default: Any, kinds: Any) -> Any:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
            raise ValueError(f"{self.file.path} has {self.architecture}.{key} = {value!r}; a positive number is needed")
        return value


def sizes_of(file: GGUF) -> Sizes:
    """Read the sizes of the model, and check every tensor against them."""
    metadata = _Metadata(file)
    if metadata.get("expert_count"):
        raise ValueError(f"{file.path} is a mixture of experts, which is not read from GGUF")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{file.path} has no tensor 'token_embd.weight': it holds no whole language model")
    width, heads = metadata.count("embedding_length"), metadata.count("attention.head_count")
    sizes = Sizes(
        architecture=metadata.architecture,
        layers=metadata.count("block_count"),
        width=width,
        hidden=metadata.count("feed_forward_length"),
        heads=heads,
        kv_heads=metadata.count("attention.head_count_kv", heads),
        head_dim=metadata.count("attention.key_length", metadata.get("rope.dimension_count") or width // heads),
        vocab=embedding.shape[0],
        context=metadata.count("context_length"),
    )
    if metadata.get("rope.dimension_count", sizes.head_dim) != sizes.head_dim:
        raise ValueError(f"{file.path} turns only a part of each head's dimensions, which is not read from GGUF")
    _check_shapes(file, sizes)
    return sizes


def _check_shapes(file: GGUF, sizes: Sizes) -> None:
    if sizes.layers > len(file.tensors):
        raise ValueError(f"{file.path} is corrupt: {sizes.layers:,} layers, but {len(file.tensors):,} tensors")
    known = dict(_expected(file, sizes))
    if unknown := sorted(file.tensors.keys() - known.keys()):
        raise ValueError(
            f"{file.path} has tensors that a {sizes.architecture} model does not have: {', '.join(unknown[:5])}"
        )
    for name, shape in known.items():
        info = file.tensors.get(name)
        if info is None:
            raise ValueError(f"{file.path} lacks the tensor {name!r}")
        if info.shape != shape:
            raise ValueError(f"{file.path}: tensor {name!r} has the shape {info.shape}; its metadata ask for {shape}")


def _expected(file: GGUF, sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the model with its shape; an optional one where the file has it."""
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    matrices = {
        "attn_q": (queries, sizes.width),
        "attn_k": (keys, sizes.width),
        "attn_v": (keys, sizes.width),
        "attn_output": (sizes.width, queries),
        "ffn_gate": (sizes.hidden, sizes.width),
        "ffn_up": (sizes.hidden, sizes.width),
        "ffn_down": (sizes.width, sizes.hidden),
    }
    norms = {"attn_norm": sizes.width, "ffn_norm": sizes.width}
    if sizes.architecture == "qwen3":
        norms |= {"attn_q_norm": sizes.head_dim, "attn_k_norm": sizes.head_dim}
    yield "token_embd.weight", (sizes.vocab, sizes.width)
    yield "output_norm.weight", (sizes.width,)
    if "output.weight" in file.tensors:
        yield "output.weight", (sizes.vocab, sizes.width)
    if _ROPE_TABLE in file.tensors:
        yield _ROPE_TABLE, (sizes.head_dim // 2,)
    for layer in range(sizes.layers):
        for name, shape in matrices.items():
            yield f"blk.{layer}.{name}.weight", shape
            if name in _biased(file, sizes):
                yield f"blk.{layer}.{name}.bias", shape[:1]
        for name, size in norms.items():
            yield f"blk.{layer}.{name}.weight", (size,)


def _biased(file: GGUF, sizes: Sizes) -> tuple[str, ...]:
    if sizes.architecture == "qwen2":
        return ("attn_q", "attn_k", "attn_v")
    has_bias = sizes.architecture == "llama" and "blk.0.attn_q.bias" in file.tensors
    return ("attn_q", "attn_k", "attn_v", "attn_output") if has_bias else ()


def model_of(file: GGUF, *, dtype: torch.dtype, **options: Any) -> Any:
    """The model in the file, in eval mode on the CPU: it trains and saves like any other."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config, state = config_of(file), state_of(file)
    with quietly():
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype, **options).eval()


@contextmanager
def quietly() -> Iterator[None]:
    """No progress bar for what takes a second."""
    from transformers.utils import logging as chatter

    was_on = chatter.is_progress_bar_enabled()
    chatter.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            chatter.enable_progress_bar()


# --- configuration ------------------------------------------------------------------------------------------------


def config_of(file: GGUF) -> Any:
    """The transformers configuration of the model in the file."""
    from transformers import AutoConfig

    metadata, sizes = _Metadata(file), sizes_of(file)
    extra: dict[str, Any] = {}
    if sizes.architecture == "llama":
        extra = {"attention_bias": "attn_q" in _biased(file, sizes)}
    elif sizes.architecture == "qwen2" and sizes.head_dim * sizes.heads != sizes.width:
        raise ValueError(f"{file.path}: {sizes.heads} heads of {sizes.head_dim} do not make a width of {sizes.width}")
    ids = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKEN_IDS.items()}
    return AutoConfig.for_model(
        sizes.architecture,
        vocab_size=sizes.vocab,
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=sizes.context,
        rms_norm_eps=metadata.real("attention.layer_norm_rms_epsilon"),
        rope_parameters=_rope(file, metadata, sizes),
        tie_word_embeddings="output.weight" not in file.tensors,
        architectures=[f"{sizes.architecture.capitalize()}ForCausalLM"],
        **{name: value for name, value in ids.items() if isinstance(value, int) and value < sizes.vocab},
        **extra,
    )


_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def _rope(file: GGUF, metadata: _Metadata, sizes: Sizes) -> dict[str, Any]:
    base = metadata.real("rope.freq_base", 10000.0)
    if _ROPE_TABLE in file.tensors:
        return _llama3_rope(file, base, sizes)
    scaling = metadata.get("rope.scaling.type", "none")
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": base}
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": base, "factor": metadata.real("rope.scaling.factor")}
    raise ValueError(f"{file.path} scales its positions by {scaling!r}, which is not read from GGUF")


def _llama3_rope(file: GGUF, base: float, sizes: Sizes) -> dict[str, Any]:
    """Which of Llama 3's published scalings the file's table of factors is; a GGUF keeps only the table."""
    table = file.read(_ROPE_TABLE)
    for factor in (8.0, 32.0):
        rope = {"rope_type": "llama3", "rope_theta": base, "factor": factor, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        if np.allclose(table, _llama3_factors(base, sizes.head_dim, factor), rtol=1e-4):
            return rope
    raise ValueError(f"{file.path} scales its positions by a table ({_ROPE_TABLE}) that is none of Llama 3's")


def _llama3_factors(base: float, head_dim: int, factor: float) -> NDArray[np.float64]:
    waves = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / waves - 1) / 3, 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


# --- weights ------------------------------------------------------------------------------------------------------


def state_of(file: GGUF) -> dict[str, torch.Tensor]:
    """The float32 weights under the names that transformers gives them."""
    import torch

    sizes = sizes_of(file)
    turned = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads} if sizes.architecture == "llama" else {}
    state = {}
    for name in file.tensors:
        if name == _ROPE_TABLE:
            continue
        key, part = _name_of(name)
        weights = file.read(name)
        if part in turned:
            weights = _unpermute(weights, turned[part])
        state[key] = torch.from_numpy(weights)
    return state


_OUTER: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def _name_of(name: str) -> tuple[str, str]:
    """The name in transformers, and which part of a layer it is.

    >>> _name_of("blk.3.attn_q.weight")
    ('model.layers.3.self_attn.q_proj.weight', 'attn_q')
    """
    if name in _OUTER:
        return _OUTER[name], ""
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{_BLOCK[part]}.{suffix}", part


def _unpermute(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp turns neighbouring dimensions of a head together, transformers the two halves; put the rows back."""
    pairs = weights.reshape(heads, weights.shape[0] // heads // 2, 2, *weights.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weights.shape)
