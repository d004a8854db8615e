"""Decoder layers of the common architecture with fused forward and backward passes.

The operations between the projections run in the kernels of the device (`verifiers.kernels.autograd`). In a packed
batch, the last layer computes only the keys and values of shared prefixes.

Layers are recognised as in the engine. Before they are used, the model's numbers and gradients are compared with those
of its own forward and backward pass (`learning.proof`). In unusual cases (a mask, a hook, dropout in attention, an
attention implementation other than PyTorch's), the layer's own forward runs. Projections that are neither plain linear
layers nor have a plain adapter are called as modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verifiers.kernels import autograd
from verifiers.kernels.attention import register
from verifiers.kernels.decoder import DecoderLayer, has_parts, recognise
from verifiers.kernels.modules import HOOKS, is_hooked, replaced_forwards
from verifiers.kernels.norms import fusible_norms
from verifiers.trainers.learning import packing
from verifiers.trainers.learning.packing import PackedForward, dense_attention

IGNORED = {"position_ids", "use_cache", "cache_position"}  # arguments of a layer that have no effect without a cache
CHECKPOINTING = "_gradient_checkpointing_func"  # the attribute of transformers that checkpoints a layer


@dataclass(frozen=True, slots=True)
class LearningLayer:
    """A recognised decoder layer that runs with fused forward and backward passes."""

    known: DecoderLayer
    is_last: bool

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
        """Replaces the layer's own forward, and calls it in cases that the fused one does not support."""
        has_more = bool(args) or any(name not in IGNORED and value for name, value in more.items())
        if has_more or attention_mask is not None or not self._is_usual(hidden_states, position_embeddings):
            more |= {"attention_mask": attention_mask, "position_embeddings": position_embeddings}
            return type(self.layer).forward(self.layer, hidden_states, *args, **more)
        return self._run(hidden_states, position_embeddings)

    def is_recomputed(self) -> bool:
        """Whether gradient checkpointing computes this layer again in the backward pass."""
        return self.layer.training and getattr(self.layer, "gradient_checkpointing", False)

    def checkpointed_forward(self, *args: Any, **more: Any) -> Any:
        return getattr(self.layer, CHECKPOINTING)(partial(self.forward, **more), *args)

    def _is_usual(self, hidden_states: Tensor, rotary: Any) -> bool:
        known, attention, packed = self.known, self.layer.self_attn, packing.current()
        longest = hidden_states.shape[1] if packed is None else packed.packing.longest
        return (
            rotary is not None
            and rotary[0].shape[-1] == known.head_dim
            and rotary[0].dtype == hidden_states.dtype == self.layer.input_layernorm.weight.dtype
            and (hidden_states.is_cuda or hidden_states.dtype is torch.float32)
            and known.softcap is None
            and (known.window is None or longest <= known.window)
            and attention.config._attn_implementation == ("sdpa" if packed is None else packing.NAME)
            and not (attention.training and getattr(attention, "attention_dropout", 0.0))
        )

    def _run(self, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        packed = packing.current()
        skipped = packed.packing.prefix_tokens if packed is not None and self.is_last else 0
        hidden, q, k, v = self._projected(hidden, self.known.angles(rotary))
        if packed is None:
            out = dense_attention(q, k, v, self.known.scale)
        else:
            settings: dict[str, Any] = {"scale": self.known.scale, "window": self.known.window}
            out = packed.attend(q[0], k[0], v[0], **settings, suffixes_only=skipped > 0)[None]
        (attended,) = autograd.projected(out.flatten(2), (self.layer.self_attn.o_proj,))
        hidden = self._fed_forward(hidden[:, skipped:] if skipped else hidden, attended)
        return F.pad(hidden, (0, 0, skipped, 0)) if skipped else hidden

    def _projected(self, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The hidden states, and their queries, keys and values."""
        attention, linears, norm = self.layer.self_attn, self.known.qkv, self.layer.input_layernorm
        epsilon = self.known.epsilons.get(norm)
        head_norms = self.known.fusible_head_norms
        must_call_norms = self.known.head_norms is not None and head_norms is None
        is_whole = not (must_call_norms or _has_hooks(norm)) and autograd.are_plain(hidden, linears)
        if epsilon is not None and is_whole:
            return autograd.projected_heads(
                hidden, norm.weight, epsilon, linears, self.known.head_dim, rotary, head_norms
            )
        hidden, normed = _add_norm(hidden, None, norm, epsilon)
        shape = (*normed.shape[:-1], -1, self.known.head_dim)
        q, k, v = (one.view(shape) for one in autograd.projected(normed, linears))
        if must_call_norms:
            q, k = attention.q_norm(q), attention.k_norm(k)
        return hidden, *autograd.rotated(q, k, *rotary, head_norms), v

    def _fed_forward(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The hidden states plus the output of attention, plus the output of the feed-forward network."""
        mlp, norm = self.layer.mlp, self.layer.post_attention_layernorm
        epsilon = self.known.epsilons.get(norm)
        linears = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        is_whole = self.known.is_silu and not _has_hooks(norm) and autograd.are_plain(hidden, linears)
        if epsilon is not None and is_whole and all(one.bias is None for one in linears):
            return autograd.fed_forward(hidden, attended, norm.weight, epsilon, *(one.weight for one in linears))
        hidden, normed = _add_norm(hidden, attended, norm, epsilon)
        gate, up = autograd.projected(normed, linears[:2])
        product = autograd.gated(gate, up) if self.known.is_silu else mlp.act_fn(gate) * up
        (more,) = autograd.projected(product, linears[2:])
        return hidden + more


def _has_hooks(norm: Any) -> bool:
    return any(vars(norm)[name] for name in HOOKS)


def _add_norm(x: Tensor, more: Tensor | None, norm: Any, epsilon: float | None) -> tuple[Tensor, Tensor]:
    """The sum of ``x`` and ``more``, and the norm of this sum."""
    if epsilon is None or _has_hooks(norm):
        total = x if more is None else x + more
        return total, norm(total)
    flat = x.reshape(-1, x.shape[-1])
    total, normed = autograd.add_norm(flat, None if more is None else more.reshape(flat.shape), norm.weight, epsilon)
    return total.view(x.shape), normed.view(x.shape)


class DecoderTraining:
    """Runs a model with fused norms and fused recognised layers.

    Layers that gradient checkpointing recomputes in the backward pass run in the same way there, with the packed batch
    of their forward pass.
    """

    def __init__(self, model: Any) -> None:
        text = model.config.get_text_config()
        self._model, self._configs = model, [model.config] if text is model.config else [model.config, text]
        self._checkpointing = [one for one in model.modules() if hasattr(one, "gradient_checkpointing")]
        self._is_on = False

    @cached_property
    def _epsilons(self) -> dict[Any, float]:
        return fusible_norms(self._model)

    @cached_property
    def layers(self) -> list[LearningLayer]:
        """The layers of the common architecture."""
        register()
        last = self._configs[-1].num_hidden_layers - 1
        found = []
        for layer in filter(has_parts, self._model.modules()):
            if any(map(is_hooked, layer.modules())):  # recognising the layer would call the hooks
                continue
            if (known := recognise(layer, self._configs, self._epsilons)) is not None:
                found.append(LearningLayer(known, known.index == last))
        return found

    @cached_property
    def _norms(self) -> list[tuple[Any, Callable[..., Any]]]:
        fused = {norm for one in self.layers for norm in one.known.head_norms or ()}
        return [
            (one, partial(autograd.normed, one, epsilon)) for one, epsilon in self._epsilons.items() if one not in fused
        ]

    @contextmanager
    def learning(self, packed: PackedForward | None = None, *, fused: bool = True) -> Iterator[None]:
        """During the block, the model runs these layers (if ``fused``), on a packed batch if one is given."""
        if self._is_on:  # called for a checkpointed layer, during the forward pass
            yield
            return
        with ExitStack() as stack:
            self._is_on = True
            stack.callback(self.__dict__.update, _is_on=False)
            if packed is not None:
                stack.enter_context(packing.computing(self._configs, packed))
            if fused:
                layers = [one for one in self.layers if not _is_watched(one.layer)]
                recomputed = {one.layer for one in layers if one.is_recomputed()}
                stack.enter_context(_without_checkpointing(recomputed))
                forwards = [
                    (one.layer, one.checkpointed_forward if one.layer in recomputed else one.forward) for one in layers
                ]
                norms = [pair for pair in self._norms if "forward" not in vars(pair[0])]
                stack.enter_context(replaced_forwards([*forwards, *norms]))
            stack.enter_context(self._replaced_checkpoints(packed, fused))
            yield

    @contextmanager
    def _replaced_checkpoints(self, packed: PackedForward | None, fused: bool) -> Iterator[None]:
        replaced = [(one, vars(one)[CHECKPOINTING]) for one in self._checkpointing if CHECKPOINTING in vars(one)]

        def checkpointed(own: Callable[..., Any], function: Callable[..., Any], *args: Any, **more: Any) -> Any:
            def run(*args: Any, **more: Any) -> Any:
                with self.learning(packed, fused=fused):
                    return function(*args, **more)

            return own(run, *args, **more)

        for one, own in replaced:
            one.__dict__[CHECKPOINTING] = partial(checkpointed, own)
        try:
            yield
        finally:
            for one, own in replaced:
                one.__dict__[CHECKPOINTING] = own


@contextmanager
def _without_checkpointing(layers: Collection[Any]) -> Iterator[None]:
    """Keep transformers from checkpointing these layers within the block. Since 5.23 it does so in the layer's own
    forward, before that around it."""
    try:
        for layer in layers:
            layer.__dict__["gradient_checkpointing"] = False
        yield
    finally:
        for layer in layers:
            layer.__dict__["gradient_checkpointing"] = True


def _is_watched(layer: Any) -> bool:
    return any(map(is_hooked, (layer, layer.self_attn, layer.mlp, layer.mlp.act_fn)))
