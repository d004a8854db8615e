"""Recognise decoder layers of the common architecture by their submodules, and verify them numerically.

The common architecture is norm, rotary attention, norm, gated feed-forward, with residual connections (Llama, Qwen,
Mistral, SmolLM, Gemma 1). Queries and keys may be normed per head (Qwen3). A recognised layer is described once, as
plain data, for all backends, and runs here in fewer operations than in transformers. Both implementations run on the
same probe input: queries, keys, values and the result must agree. All other layers, and layers with hooks, run as in
transformers. Parameters and projections belong to the layer and are looked up in every step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verifiers.kernels import reference
from verifiers.kernels.attention import attend_rotated, attending, current
from verifiers.kernels.cuda import projections
from verifiers.kernels.modules import is_hooked, recomputes_buffers, replaced_forwards, without_dropout
from verifiers.kernels.norms import HeadNorms, fusible_norms
from verifiers.kernels.prove import agree, is_nonzero

logger = logging.getLogger("verifiers.kernels")

WHOLE = {"model", "lm_head"}
INNER = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "act_fn"}
# RMS of the normed hidden states in the probe. The first is large enough to trigger clamps within a layer. The second
# is used if the first overflows (float16).
PROBE_NORMED_RMS = (30.0, 1.0)
PROBED_POSITIONS = 64
PROBE_RMS = 1e-2  # of the hidden states: small compared to what a layer adds to them, so that this dominates the result


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer of the common architecture: its module, its sizes, and the arguments of its attention."""

    layer: Any
    index: int
    head_dim: int
    is_silu: bool
    epsilons: Mapping[Any, float]  # of the model's RMS norms
    head_norms: tuple[Any, Any] | None  # of queries and keys, per head (Qwen3)
    rotates: bool  # False without rotary embedding, as in every fourth layer of SmolLM3
    scale: float
    window: int | None
    softcap: float | None

    @property
    def qkv(self) -> tuple[Any, Any, Any]:
        attention = self.layer.self_attn
        return attention.q_proj, attention.k_proj, attention.v_proj

    @property
    def norms(self) -> tuple[Any, Any]:
        return self.layer.input_layernorm, self.layer.post_attention_layernorm

    @property
    def fusible_head_norms(self) -> HeadNorms | None:
        """Weights and epsilons of the head norms; None if there are none or they must be called as modules."""
        if self.head_norms is None or not all(one in self.epsilons for one in self.head_norms):
            return None
        attention, (q, k) = self.layer.self_attn, self.head_norms
        if attention.q_norm is not q or attention.k_norm is not k or is_hooked(q) or is_hooked(k):
            return None
        if torch.is_autocast_enabled(q.weight.device.type):  # autocast rounds between the operations of the modules
            return None
        return HeadNorms(q.weight, k.weight, self.epsilons[q], self.epsilons[k])

    def angles(self, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Cosines and sines of this layer. If it does not rotate, those of angle 0, which leave all bits unchanged."""
        return rotary if self.rotates else (torch.ones_like(rotary[0]), torch.zeros_like(rotary[1]))

    @property
    def heads(self) -> int:
        return int(self.layer.self_attn.q_proj.out_features) // self.head_dim

    @property
    def kv_heads(self) -> int:
        return int(self.layer.self_attn.k_proj.out_features) // self.head_dim

    @property
    def inner(self) -> int:
        return int(self.layer.mlp.up_proj.out_features)

    def forward(self, hidden_states: Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any) -> Any:
        """Like the layer's own forward, but overwrites the hidden states."""
        if position_embeddings is None or position_embeddings[0].shape[-1] != self.head_dim:
            own = partial(type(self.layer).forward, self.layer)
            return own(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
        shape = hidden_states.shape
        hidden = hidden_states.reshape(-1, shape[-1])
        hidden, fed_forward = self.run(hidden, self.layer.input_layernorm(hidden), shape[:-1], position_embeddings)
        return projections.add_projected(hidden, self.layer.mlp.down_proj, fed_forward).view(shape)

    def run(
        self, hidden: Tensor, normed: Tensor, shape: Sequence[int], rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Run the layer up to its last projection. Returns the hidden states ``[tokens, width]`` and its input.

        ``hidden`` may be overwritten. ``normed`` are the hidden states after the first norm; ``shape`` is (sequences,
        tokens per sequence).
        """
        layer = self.layer
        attended = self._attended(normed, shape, rotary)
        hidden, normed = projections.add_projected_and_norm(
            hidden, layer.self_attn.o_proj, attended, layer.post_attention_layernorm
        )
        return hidden, self._fed_forward(normed)

    def _attended(self, x: Tensor, shape: Sequence[int], rotary: tuple[Tensor, Tensor]) -> Tensor:
        attention = self.layer.self_attn
        shape = (*shape, -1, self.head_dim)
        q, k, v = (one.view(shape) for one in projections.project(x, self.qkv))
        norms = self.fusible_head_norms
        if self.head_norms is not None and norms is None:
            q, k = attention.q_norm(q), attention.k_norm(k)
        out = attend_rotated(
            self.index, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *self.angles(rotary),
            norms=norms, scale=self.scale, window=self.window, softcap=self.softcap,
        )  # fmt: skip
        return out.transpose(1, 2).reshape(x.shape[0], -1)

    def _fed_forward(self, x: Tensor) -> Tensor:
        mlp = self.layer.mlp
        if not self.is_silu:
            return mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
        return projections.project_gated(x, mlp.gate_proj, mlp.up_proj, _gated)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    if not gate.is_cuda:
        return reference.gated(gate, up)
    from verifiers.kernels.cuda import decode

    return decode.gated(gate, up)


class CommonDecoder:
    """The layers of a model that have the common architecture, and whether the whole model has it."""

    def __init__(self, model: Any, configs: Sequence[Any]) -> None:
        self.model = model
        # The probe would call hooks, so a model with hooks runs unchanged.
        self.was_hooked = any(map(is_hooked, model.modules()))
        modules = [] if self.was_hooked else list(model.modules())
        self.epsilons = fusible_norms(model)
        found = [recognise(layer, configs, self.epsilons) for layer in modules if has_parts(layer)]
        self.layers = [one for one in found if one is not None]
        self._watched = [part for one in self.layers for part in (one.layer, one.layer.self_attn, one.layer.mlp)]
        known = {id(one.layer) for one in self.layers}
        holders = [
            one for one in modules if any(id(part) in known for part in one.modules())
        ]  # including the layers themselves
        self._parts = [(one._modules, list(one._modules.values())) for one in holders]
        self.is_whole = self._is_whole(configs)

    @property
    def is_unhooked(self) -> bool:
        """Whether the layers' forwards may be replaced: none has a hook or was replaced by another module."""
        is_same = all(list(held.values()) == parts for held, parts in self._parts)
        return bool(self.layers) and is_same and not any(map(is_hooked, self._watched))

    @property
    def may_run_whole(self) -> bool:
        return self.is_whole and not is_hooked(self.model) and not is_hooked(self.model.model)

    @property
    def fused_norms(self) -> set[Any]:
        """The norms that are fused with attention. They are called as modules only if they have hooks."""
        return {norm for layer in self.layers for norm in layer.head_norms or ()}

    @property
    def forwards(self) -> list[tuple[Any, Callable[..., Any]]]:
        return [(one.layer, one.forward) for one in self.layers]

    def forward(self, ids: Tensor, positions: Tensor, keep: Tensor | int) -> Tensor:
        """The logits at the positions ``keep`` (0: all). Requires `is_whole`."""
        inner = self.model.model
        first, *others = (one.layer.input_layernorm for one in self.layers)
        hidden, normed = projections.embed_and_norm(ids, inner.embed_tokens, first)
        rotary = getattr(current(), "angles", None)
        if rotary is None:
            rotary = inner.rotary_emb(hidden.view(*ids.shape, -1), position_ids=positions)
        for layer, norm in zip(self.layers, [*others, inner.norm], strict=True):
            hidden, fed_forward = layer.run(hidden, normed, ids.shape, rotary)
            hidden, normed = projections.add_projected_and_norm(hidden, layer.layer.mlp.down_proj, fed_forward, norm)
        hidden = normed.view(*ids.shape, -1)
        logits: Tensor = self.model.lm_head(hidden if isinstance(keep, int) and keep == 0 else hidden[:, keep])
        return logits

    def angles(self, positions: int) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of all positions ``[positions, dim]``; None if they depend on more than the position."""
        if not (self.is_unhooked and self.may_run_whole and all(one.rotates for one in self.layers)):
            return None
        inner = self.model.model
        if recomputes_buffers(inner.rotary_emb) or is_hooked(inner.rotary_emb):
            return None
        like, all_T = inner.embed_tokens.weight[:1], torch.arange(positions, device=inner.embed_tokens.weight.device)
        some_N = all_T[:: max(1, positions // PROBED_POSITIONS)]
        given = [one[0].contiguous() for one in inner.rotary_emb(like, position_ids=all_T[None])]
        alone = inner.rotary_emb(like, position_ids=some_N[:, None])
        is_same = all(torch.equal(one[some_N], two[:, 0]) for one, two in zip(given, alone, strict=True))
        return (given[0], given[1]) if is_same else None

    def _is_whole(self, configs: Sequence[Any]) -> bool:
        """Whether the model is only an embedding, these layers, a norm and a head, and `forward` reproduces it."""
        model, inner = self.model, self.model._modules.get("model")
        if model._modules.keys() != WHOLE or inner is None or inner._modules.keys() != INNER:
            return False
        if [one.layer for one in self.layers] != list(inner.layers) or not self.layers:
            return False
        weight = inner.embed_tokens.weight
        ids = torch.arange(6, device=weight.device).view(2, 3) % weight.shape[0]
        positions = torch.tensor([[0, 1, 2], [4, 5, 6]], device=weight.device)
        theirs, ours = _Probe(), _Probe()
        try:
            with torch.no_grad(), without_dropout(model), attending(configs, theirs):
                expected = model(input_ids=ids, position_ids=positions, use_cache=False, return_dict=True).logits
            with torch.no_grad(), without_dropout(model), attending(configs, ours):
                given = self.forward(ids, positions, 0)
        except Exception as error:  # foreign code, which may not take these arguments
            logger.debug("%s runs unchanged: %r", type(model).__name__, error)
            return False
        return _is_same([*theirs.seen, expected], [*ours.seen, given], layers=len(self.layers))


# --- recognising ------------------------------------------------------------------------------------------------------


def recognise(layer: Any, configs: Sequence[Any], epsilons: Mapping[Any, float]) -> DecoderLayer | None:
    """The description of a layer, if it reproduces the layer's own results; otherwise None."""
    attention = layer.self_attn
    weight = layer.input_layernorm.weight
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    make = partial(
        DecoderLayer, layer, attention.layer_idx, attention.head_dim, _is_silu(layer.mlp.act_fn, weight), epsilons,
        None if q_norm is None else (q_norm, k_norm),
    )  # fmt: skip
    hidden, rotary = _probe_input(weight, attention.head_dim)
    try:
        for rms in PROBE_NORMED_RMS:
            theirs, norm = _Probe(), partial(_normed, rms)
            scaled = [(layer.input_layernorm, norm), (layer.post_attention_layernorm, norm)]
            with torch.no_grad(), without_dropout(layer), replaced_forwards(scaled), attending(configs, theirs):
                expected = type(layer).forward(layer, hidden.clone(), position_embeddings=rotary, attention_mask=None)
            if bool(expected.isfinite().all()):
                break
        for rotates in (True, False):
            found, ours = make(rotates, **theirs.settings), _Probe()
            with torch.no_grad(), without_dropout(layer), replaced_forwards(scaled), attending(configs, ours):
                given = found.forward(hidden.clone(), position_embeddings=rotary)
            if theirs.settings == ours.settings and _is_same([*theirs.seen, expected], [*ours.seen, given]):
                return found
    except Exception as error:  # foreign code, which may not take these arguments: another architecture
        logger.debug("layer %s runs unchanged: %r", attention.layer_idx, error)
    return None


class _Probe:
    """Attention that records its arguments and returns a tensor of the right shape."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.settings: dict[str, Any] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
        self.seen += [q.clone(), k.clone(), v.clone()]
        self.settings = settings
        return q.flip(-1).contiguous()


def _normed(rms: float, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:]) * rms


def _probe_input(like: Tensor, head_dim: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((2, 3, like.shape[0]), generator=generator) * PROBE_RMS
    angle = torch.rand((2, 3, head_dim), generator=generator) * 6.0
    hidden, cos, sin = (x.to(like.device, like.dtype) for x in (hidden, angle.cos(), angle.sin()))
    return hidden, (cos, sin)


def _is_same(theirs: Sequence[Any], ours: Sequence[Any], layers: int = 1) -> bool:
    return is_nonzero(theirs) and agree(theirs, ours, layers)


def has_parts(layer: Any) -> bool:
    """Whether a module has exactly the submodules of the common architecture. Others would be ignored."""
    if layer._modules.keys() != LAYER:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    head_dim = getattr(attention, "head_dim", None)
    return (
        attention._modules.keys() - HEAD_NORMS == PROJECTIONS
        and len(attention._modules.keys() & HEAD_NORMS) != 1
        and mlp._modules.keys() == FEED_FORWARD
        and isinstance(getattr(attention, "layer_idx", None), int)
        and isinstance(head_dim, int)
        and head_dim % 2 == 0
        and isinstance(getattr(layer.input_layernorm, "weight", None), Tensor)
    )


def _is_silu(function: Any, like: Tensor) -> bool:
    x = torch.linspace(-8, 8, 64, device=like.device, dtype=like.dtype)
    with torch.no_grad():
        return bool(torch.equal(function(x), F.silu(x)))
