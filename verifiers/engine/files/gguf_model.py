"""Convert a GGUF file of the Llama family to a transformers configuration and state dict.

The expected tensors are those of the transformers model that the metadata describe. A file with other tensors is
refused before any weights are read.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from verifiers.engine.files.gguf import GGUF

if TYPE_CHECKING:
    import torch

# Module names: transformers → GGUF.
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_OF_A_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_ROPE_TABLE = "rope_freqs.weight"
ARCHITECTURES = ("llama", "qwen2", "qwen3")


class _Metadata:
    """The metadata of one file, by keys without the architecture's prefix."""

    def __init__(self, file: GGUF) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{file.path} has the architecture {self.architecture!r}; GGUF files are supported for "
                f"{', '.join(ARCHITECTURES)}. Use the model's safetensors instead"
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
            raise ValueError(f"{self.file.path} has {self.architecture}.{key} = {value!r}; it needs a positive number")
        return value


def model_of(file: GGUF, *, dtype: torch.dtype, **options: Any) -> Any:
    """The model in the file, in eval mode on the CPU. It can be trained and saved like any other model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config, state = config_of(file), state_of(file)
    with quietly():
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype, **options).eval()


@contextmanager
def quietly() -> Iterator[None]:
    """Disable the progress bars of transformers within this block."""
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
    """The transformers configuration of the model in the file. Checks all tensors against it."""
    from transformers import AutoConfig

    metadata = _Metadata(file)
    sizes = _sizes(file, metadata)
    described = partial(
        AutoConfig.for_model,
        metadata.architecture,
        **sizes,
        rms_norm_eps=metadata.real("attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in file.tensors,
        architectures=[f"{metadata.architecture.capitalize()}ForCausalLM"],
        **({"attention_bias": "blk.0.attn_q.bias" in file.tensors} if metadata.architecture == "llama" else {}),
    )
    _check_tensors(file, described)
    ids = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKEN_IDS.items()}
    return described(
        rope_parameters=_rope(file, metadata, sizes["head_dim"]),
        **{name: value for name, value in ids.items() if isinstance(value, int) and value < sizes["vocab_size"]},
    )


def _sizes(file: GGUF, metadata: _Metadata) -> dict[str, int]:
    if metadata.get("expert_count"):
        raise ValueError(f"{file.path} is a mixture of experts, which is not supported as GGUF")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{file.path} has no tensor 'token_embd.weight': it is not a complete language model")
    width, heads, layers = map(metadata.count, ("embedding_length", "attention.head_count", "block_count"))
    if layers > len(file.tensors):
        raise ValueError(f"{file.path} is corrupt: {layers:,} layers, but {len(file.tensors):,} tensors")
    head_dim = metadata.count("attention.key_length", metadata.get("rope.dimension_count") or width // heads)
    if metadata.get("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"{file.path} applies RoPE to only a part of each head, which is not supported as GGUF")
    if metadata.architecture == "qwen2" and head_dim * heads != width:
        raise ValueError(f"{file.path}: {heads} heads of {head_dim} dimensions do not match a width of {width}")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.count("context_length"),
    }


def _check_tensors(file: GGUF, described: Callable[[], Any]) -> None:
    try:
        config = described()
        shapes = {_name_of(key): shape for key, shape in _shapes(config).items()}
    except Exception as error:  # foreign code, called with sizes that may be invalid
        raise ValueError(f"{file.path} is corrupt: its metadata do not describe a valid model: {error}") from error
    if _ROPE_TABLE in file.tensors:
        shapes[_ROPE_TABLE] = (config.head_dim // 2,)
    if unknown := sorted(file.tensors.keys() - shapes.keys()):
        raise ValueError(
            f"{file.path} has tensors that a {config.model_type} model does not have: {', '.join(unknown[:5])}"
        )
    for name, shape in shapes.items():
        info = file.tensors.get(name)
        if info is None:
            raise ValueError(f"{file.path} lacks the tensor {name!r}")
        if info.shape != shape:
            raise ValueError(f"{file.path}: tensor {name!r} has the shape {info.shape}; its metadata require {shape}")


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a configuration's parameters, derived from a model with one layer on the meta device."""
    from verifiers.engine.plan import on_meta

    of_one_layer = copy.deepcopy(config)
    of_one_layer.num_hidden_layers = 1
    found = {}
    for key, parameter in on_meta(of_one_layer).named_parameters():
        for layer in range(config.num_hidden_layers if ".layers.0." in key else 1):
            found[key.replace(".layers.0.", f".layers.{layer}.")] = tuple(parameter.shape)
    return found


def _rope(file: GGUF, metadata: _Metadata, head_dim: int) -> dict[str, Any]:
    base = metadata.real("rope.freq_base", 10000.0)
    if _ROPE_TABLE in file.tensors:
        return _llama3_rope(file, base, head_dim)
    scaling = metadata.get("rope.scaling.type", "none")
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": base}
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": base, "factor": metadata.real("rope.scaling.factor")}
    raise ValueError(f"{file.path} uses the RoPE scaling {scaling!r}, which is not supported as GGUF")


def _llama3_rope(file: GGUF, base: float, head_dim: int) -> dict[str, Any]:
    """The published RoPE scaling of Llama 3 that matches the file's table of factors. A GGUF has only the table."""
    table = file.read(_ROPE_TABLE)
    for factor in (8.0, 32.0):
        rope = {"rope_type": "llama3", "rope_theta": base, "factor": factor, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        if np.allclose(table, _llama3_factors(base, head_dim, factor), rtol=1e-4):
            return rope
    raise ValueError(f"{file.path} has a table of RoPE factors ({_ROPE_TABLE}) that does not match any Llama 3 model")


def _llama3_factors(base: float, head_dim: int, factor: float) -> NDArray[np.float64]:
    waves = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / waves - 1) / 3, 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


# --- weights ------------------------------------------------------------------------------------------------------


def state_of(file: GGUF) -> dict[str, torch.Tensor]:
    """The float32 weights, under the names used in transformers."""
    import torch

    config, state = config_of(file), {}
    rotated = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for key in _shapes(config):
        weights, module = file.read(_name_of(key)), key.split(".")[-2]
        if config.model_type == "llama" and module in rotated:
            weights = _unpermute(weights, rotated[module])
        state[key] = torch.from_numpy(weights)
    return state


def _name_of(key: str) -> str:
    """The GGUF name of a parameter of transformers.

    >>> _name_of("model.layers.3.self_attn.q_proj.weight"), _name_of("model.norm.weight")
    ('blk.3.attn_q.weight', 'output_norm.weight')
    """
    module, _, suffix = key.rpartition(".")
    if module in _OUTER:
        return f"{_OUTER[module]}.{suffix}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{_OF_A_LAYER[part]}.{suffix}"


def _unpermute(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder rows for RoPE: llama.cpp pairs adjacent dimensions of a head, transformers pairs its two halves."""
    pairs = weights.reshape(heads, weights.shape[0] // heads // 2, 2, *weights.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weights.shape)
