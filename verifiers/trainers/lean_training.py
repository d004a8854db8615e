"""Decoder layers of the common kind learn in fewer operations: the engine's lean layers, with a way back.

A layer is recognised as the engine recognises it, and proven again by its numbers: its own forward and the lean one are
run on the same probe, and results and gradients must agree. Whatever is unusual when it runs (a mask, a hook, dropout
in attention, another attention than PyTorch's) is left to the layer's own forward. Projections are called as modules,
so adapters on them work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verifiers.engine import slots
from verifiers.engine.fused import Fused, fusible_norms
from verifiers.engine.lean import LeanLayer, _has_parts, recognise
from verifiers.engine.projections import HOOKS, is_touched

logger = logging.getLogger("verifiers.trainers")

HARMLESS = {"position_ids", "use_cache", "cache_position"}  # what a layer may be told besides, without a cache
CHECKPOINTING = "_gradient_checkpointing_func"  # where transformers keeps the function that checkpoints a layer
WIDEST_GROUPED = 256  # the widest heads that fused attention takes in groups, and in half precision only
PROBE_SHAPE = (2, 7)


@dataclass(frozen=True, slots=True)
class LearningLayer:
    """One layer, as the engine knows it, and the norms of it that are one kernel (by their epsilon)."""

    known: LeanLayer
    epsilons: tuple[float | None, float | None]

    @property
    def layer(self) -> Any:
        return self.known.layer

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        attention_mask: Any = None,
        position_embeddings: Any = None,
        **more: Any,
    ) -> Any:
        """As the layer's own."""
        is_told_more = bool(args) or any(name not in HARMLESS and value for name, value in more.items())
        if is_told_more or attention_mask is not None or not self._is_usual(hidden_states, position_embeddings):
            own = partial(type(self.layer).forward, self.layer)
            told = {"attention_mask": attention_mask, "position_embeddings": position_embeddings, **more}
            return own(hidden_states, *args, **told)
        return self._run(hidden_states, position_embeddings)

    def _is_usual(self, hidden_states: Tensor, rotary: Any) -> bool:
        known, attention = self.known, self.layer.self_attn
        return (
            rotary is not None
            and rotary[0].shape[-1] == known.head_dim
            and rotary[0].dtype == hidden_states.dtype == self.layer.input_layernorm.weight.dtype
            and known.softcap is None
            and (known.window is None or hidden_states.shape[1] <= known.window)
            and attention.config._attn_implementation == "sdpa"
            and not (attention.training and getattr(attention, "attention_dropout", 0.0))
        )

    def _run(self, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        layer, (first, second) = self.layer, self.epsilons
        hidden, normed = _add_norm(hidden, None, layer.input_layernorm, first)
        hidden, normed = _add_norm(hidden, self._attended(normed, rotary), layer.post_attention_layernorm, second)
        return hidden + layer.mlp.down_proj(self._fed_forward(normed))

    def _attended(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        from verifiers.trainers import fused_functions

        known, attention = self.known, self.layer.self_attn
        shape = (*x.shape[:-1], -1, known.head_dim)
        projected = (attention.q_proj(x), attention.k_proj(x), attention.v_proj(x))
        q, k, v = (one.view(shape) for one in projected)
        if known.has_head_norms:
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k = fused_functions.rotated(q, k, *rotary)
        out = _attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), known.scale)
        projected_out: Tensor = attention.o_proj(out.transpose(1, 2).flatten(2))
        return projected_out

    def _fed_forward(self, x: Tensor) -> Tensor:
        from verifiers.trainers import fused_functions

        mlp = self.layer.mlp
        if not self.known.is_silu:
            result: Tensor = mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
            return result
        return fused_functions.gated(mlp.gate_proj(x), mlp.up_proj(x))


def _add_norm(x: Tensor, more: Tensor | None, norm: Any, epsilon: float | None) -> tuple[Tensor, Tensor]:
    """``x`` plus ``more``, and the norm of that."""
    from verifiers.trainers import fused_functions

    if epsilon is None or any(vars(norm)[name] for name in HOOKS):
        total = x if more is None else x + more
        return total, norm(total)
    flat = x.reshape(-1, x.shape[-1])
    total, normed = fused_functions.add_norm(
        flat, None if more is None else more.reshape(flat.shape), norm.weight, epsilon
    )
    return total.view(x.shape), normed.view(x.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    share = q.shape[1] // k.shape[1]
    is_grouped = share > 1 and q.element_size() == 2 and q.shape[-1] <= WIDEST_GROUPED
    if share > 1 and not is_grouped:  # in groups it would be done by plain operations
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped)


class LeanTraining:
    """A model that learns leanly while this lasts: its norms, and the layers that were recognised.

    Layers that are computed again on the way back (gradient checkpointing) are lean then too, although that is later.
    """

    def __init__(self, model: Any) -> None:
        self._fused = Fused(model)
        self.layers = recognised(model)
        self._checkpointing = [one for one in model.modules() if hasattr(one, "gradient_checkpointing")]
        self._in_use: list[LearningLayer] = []
        self._replaced: list[tuple[Any, Any]] = []
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._in_use = [one for one in self.layers if not _is_watched(one.layer)]
        for one in self._in_use:
            one.layer.__dict__["forward"] = one.forward
        self._replaced = [(one, vars(one)[CHECKPOINTING]) for one in self._checkpointing if CHECKPOINTING in vars(one)]
        for one, checkpoint in self._replaced:
            one.__dict__[CHECKPOINTING] = partial(self._checkpointed, checkpoint)
        self._fused.__enter__()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._fused.__exit__()
        for module, checkpoint in self._replaced:
            module.__dict__[CHECKPOINTING] = checkpoint
        for one in self._in_use:
            del one.layer.__dict__["forward"]

    def _checkpointed(
        self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **more: Any
    ) -> Any:
        def run(*args: Any, **more: Any) -> Any:
            with self:
                return function(*args, **more)

        return checkpoint(run, *args, **more)


# --- recognising ------------------------------------------------------------------------------------------------------


def recognised(model: Any) -> list[LearningLayer]:
    """The layers whose lean way gives their own numbers, and their own gradients."""
    slots.register()
    text = model.config.get_text_config()
    configs = [model.config] if text is model.config else [model.config, text]
    epsilons = {id(norm): epsilon for norm, epsilon in fusible_norms(model) if "forward" not in vars(norm)}
    found = []
    for layer in filter(_has_parts, model.modules()):
        if any(map(is_touched, layer.modules())):  # whoever listens in now would hear the probe
            continue
        known = recognise(layer, configs)
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        first, second = (epsilons.get(id(norm)) for norm in norms)
        if known is not None and _is_proven(one := LearningLayer(known, (first, second))):
            found.append(one)
    return found


def _is_watched(layer: Any) -> bool:
    return any(map(is_touched, (layer, layer.self_attn, layer.mlp, layer.mlp.act_fn)))


def _is_proven(one: LearningLayer) -> bool:
    layer = one.layer
    was_training = [module for module in layer.modules() if module.training]
    for module in was_training:
        module.training = False
    try:
        theirs = _answers(layer, partial(type(layer).forward, layer))
        ours = _answers(layer, one.forward)
    except Exception as error:  # foreign code, asked in a way it may not know: then it is not the kind we know
        logger.debug("layer %s learns as it is: %r", one.known.index, error)
        return False
    finally:
        for module in was_training:
            module.training = True
    return _agree(theirs, ours)


def _answers(layer: Any, forward: Callable[..., Any]) -> list[Tensor]:
    """What a layer makes of a probe, and the gradients of that."""
    like = layer.input_layernorm.weight
    head_dim = layer.self_attn.head_dim
    generator = torch.Generator().manual_seed(0)  # the caller's random numbers are not ours to draw
    hidden, seed = (torch.randn((*PROBE_SHAPE, like.shape[0]), generator=generator) for _ in range(2))
    angle = torch.rand((*PROBE_SHAPE, head_dim), generator=generator) * 6.0
    hidden, seed, cos, sin = (x.to(like.device, like.dtype) for x in (hidden, seed, angle.cos(), angle.sin()))
    with torch.enable_grad():
        hidden.requires_grad_()
        out = forward(hidden, attention_mask=None, position_embeddings=(cos, sin))
        learned = [hidden, *(one for one in layer.parameters() if one.requires_grad)]
        grads = torch.autograd.grad(out, learned, seed, allow_unused=True)
    return [out.detach(), *(one for one in grads if one is not None)]


def _agree(theirs: Sequence[Tensor], ours: Sequence[Tensor]) -> bool:
    if len(theirs) != len(ours):
        return False
    for one, other in zip(theirs, ours, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        within = 2e-3 if one.dtype is torch.float32 else 4e-2
        size, apart = one.float().abs().max(), (one.float() - other.float()).abs().max()
        if not bool(apart <= within * size):
            return False
    return True
