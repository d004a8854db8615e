"""A small recognised model on the CPU as a few matrices: calling its modules takes as long as what they compute.

What multiplies the same input is laid side by side, with the norm before it multiplied in. These are copies, made from
the parameters when they have changed. Whoever listens in, adds an adapter or exchanges a part is noticed before a step,
which then goes by the modules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiers.engine import packed, slots
from verifiers.engine.fused import fusible_norms
from verifiers.engine.projections import HOOKS

if TYPE_CHECKING:
    from verifiers.engine.lean import LeanLayer


class Bare:
    """A model whose every part is known, as its matrices alone."""

    def __init__(self, model: Any, layers: Sequence[LeanLayer]) -> None:
        self._inner, self._head, self._known = model.model, model.lm_head, layers
        self._epsilons = {id(norm): epsilon for norm, epsilon in fusible_norms(model)}
        modules = list(model.modules())
        self._own = [vars(module) for module in modules]
        self._hooks = [own[name] for own in self._own for name in HOOKS]
        self._parts = [
            (module._modules, name, part, type(part)) for module in modules for name, part in module._modules.items()
        ]
        self._is_simple = self._head.weight.device.type == "cpu" and self._is_made_of_known_parts()
        self._laid_out: tuple[list[_BareLayer], Tensor, _Matrix] | None = None

    def _is_made_of_known_parts(self) -> bool:
        linears, norms = [self._head], [self._inner.norm]
        for one in self._known:
            attention, mlp = one.layer.self_attn, one.layer.mlp
            linears += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
            linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
            norms += [one.layer.input_layernorm, one.layer.post_attention_layernorm]
        return (
            all(type(one) is nn.Linear and one.weight.dtype is torch.float32 for one in linears)
            and sum(one.weight.numel() for one in linears) < packed.WORTH_PACKING
            and all(id(norm) in self._epsilons for norm in norms)
            and type(self._inner.embed_tokens) is nn.Embedding
            and all(one.is_silu and not one.has_head_norms for one in self._known)
        )

    @property
    def is_usable(self) -> bool:
        """Is the model one of this kind, still made of the same parts, and does nobody listen to it now?"""
        return (
            self._is_simple
            and not any(self._hooks)
            and not any("forward" in own for own in self._own)
            and all(parts.get(name) is part and type(part) is kind for parts, name, part, kind in self._parts)
        )

    def drop(self) -> None:
        """The parameters have changed."""
        self._laid_out = None

    def forward(self, ids: Tensor, positions: Tensor, keep: Tensor | int) -> Tensor:
        """The logits of the positions in ``keep`` (0: of all)."""
        inner = self._inner
        layers, floor, head = self._laid_out = self._laid_out or self._lay_out()
        embedded = F.embedding(ids, inner.embed_tokens.weight)
        rotary = inner.rotary_emb(embedded, position_ids=positions)
        hidden = embedded.view(-1, embedded.shape[-1])
        for layer in layers:
            hidden = layer.run(hidden, ids.shape, rotary)
        if not (isinstance(keep, int) and keep == 0):
            hidden = hidden.view(embedded.shape)[:, keep].flatten(0, 1)
        return head.times(_scaled(hidden, floor)).view(len(ids), -1, head.turned.shape[1])

    def _lay_out(self) -> tuple[list[_BareLayer], Tensor, _Matrix]:
        norm = self._inner.norm
        with torch.no_grad():
            layers = [_BareLayer(one, self._epsilons) for one in self._known]
            return layers, _floor(norm, self._epsilons), _Matrix([self._head], norm)


class _BareLayer:
    """One layer: its matrices, the floors of its norms, and what its own forward passes to attention."""

    def __init__(self, known: LeanLayer, epsilons: Mapping[int, float]) -> None:
        layer, attention, mlp = known.layer, known.layer.self_attn, known.layer.mlp
        before, after = layer.input_layernorm, layer.post_attention_layernorm
        self._index, self._head_dim = known.index, known.head_dim
        self._settings = {"scale": known.scale, "window": known.window, "softcap": known.softcap}
        self._before, self._after = _floor(before, epsilons), _floor(after, epsilons)
        self._qkv = _Matrix([attention.q_proj, attention.k_proj, attention.v_proj], before)
        self._out = _Matrix([attention.o_proj])
        self._gate_up = _Matrix([mlp.gate_proj, mlp.up_proj], after)
        self._down = _Matrix([mlp.down_proj])
        self._groups: int = attention.k_proj.out_features // known.head_dim

    def run(self, hidden: Tensor, shape: Sequence[int], rotary: tuple[Tensor, Tensor]) -> Tensor:
        """As the lean layer's; the hidden states it is given are its to overwrite."""
        qkv = self._qkv.times(_scaled(hidden, self._before)).view(*shape, -1, self._head_dim)
        out = slots.attend_joined(self._index, qkv, self._groups, *rotary, **self._settings)
        hidden = self._out.add_to(hidden, out.reshape(len(hidden), -1))
        gate, up = self._gate_up.times(_scaled(hidden, self._after)).chunk(2, -1)
        return self._down.add_to(hidden, F.silu(gate).mul_(up))


class _Matrix:
    """Linear layers of one input side by side, with the norm before them multiplied in."""

    def __init__(self, linears: Sequence[nn.Linear], norm: Any = None) -> None:
        weight = torch.cat([one.weight for one in linears])
        if norm is not None:
            weight *= norm.weight * math.sqrt(weight.shape[1])  # see `_scaled`
        self.turned = weight.t()
        biases = [torch.zeros(one.out_features) if one.bias is None else one.bias for one in linears]
        self.bias = torch.cat(biases) if any(one.bias is not None for one in linears) else None

    def times(self, x: Tensor) -> Tensor:
        return x @ self.turned if self.bias is None else torch.addmm(self.bias, x, self.turned)

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        total.addmm_(x, self.turned)
        return total if self.bias is None else total.add_(self.bias)


def _floor(norm: Any, epsilons: Mapping[int, float]) -> Tensor:
    """What keeps the length of a vector from being zero where the norm divides by it."""
    return torch.tensor(math.sqrt(epsilons[id(norm)] * norm.weight.shape[0]))


def _scaled(x: Tensor, floor: Tensor) -> Tensor:
    """An RMS norm in three operations, but for its weight and the root of the width: those are in the matrix."""
    return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor)
