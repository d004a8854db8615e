"""A recognised model on the CPU as a few matrices: calling a small model's modules takes as long as what they compute.

What multiplies the same input is laid side by side, with the norm before it multiplied in. These are copies, made from
the parameters when they have changed; those of a larger model are made when that pays. Whoever listens in, adds an
adapter or exchanges a part is noticed before a step, which then goes by the modules. It is all run in C, where that can
be compiled. Otherwise a step is done by NumPy between the multiplications, which takes half as long to start an
operation; large multiplications are left to PyTorch, whose threads are set, and a larger model is packed for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiers.engine import kv_cache as slots
from verifiers.engine import packed, threads
from verifiers.engine.compiled_model import CompiledModel, Drawn, can_run
from verifiers.engine.fused import fusible_norms
from verifiers.engine.projections import HOOKS
from verifiers.engine.structure import Structure

if TYPE_CHECKING:
    from verifiers.engine.lean import LeanLayer
    from verifiers.engine.slot_table import Table

MOST_SEEN_IN_C = 128  # tokens that those of a prompt see on average: attention to more of them is left to PyTorch
MOST_IN_NUMPY = 1 << 17  # multiplications in one product: more may be spread over threads that get in each other's way


class Bare:
    """A model whose every part is known, as its matrices alone."""

    def __init__(self, model: Any, layers: Sequence[LeanLayer]) -> None:
        self._model, self._inner, self._head, self._known = model, model.model, model.lm_head, layers
        self._epsilons = {id(norm): epsilon for norm, epsilon in fusible_norms(model)}
        self._structure = Structure(model)
        self._own = [vars(module) for module in self._structure.modules]
        self._hooks = [own[name] for own in self._own for name in HOOKS]
        is_known = model.lm_head.weight.device.type == "cpu" and self._is_known()
        self._is_compiled = is_known and can_run(model, layers)
        self._is_small = threads.wants_one(model) if self._is_compiled else packed.size_of(model) < packed.WORTH_PACKING
        self._is_simple = is_known and (self._is_small or self._is_compiled or packed.PackedLinears.helps(model))
        self._compiled: CompiledModel | None = None
        self._is_stale = False
        self._rows: int | None = None  # what the matrices of a larger model are packed for
        self._laid_out: tuple[Iterable[_BareLayer], float, _Matrix | _PackedMatrix] | None = None

    def _is_known(self) -> bool:
        linears, norms = [self._head], [self._inner.norm]
        for one in self._known:
            attention, mlp = one.layer.self_attn, one.layer.mlp
            linears += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
            linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
            norms += [one.layer.input_layernorm, one.layer.post_attention_layernorm]
        return (
            all(type(one) is nn.Linear and one.weight.dtype is torch.float32 for one in linears)
            and all(id(norm) in self._epsilons for norm in norms)
            and type(self._inner.embed_tokens) is nn.Embedding
            and all(one.is_silu and not one.has_head_norms and one.softcap is None for one in self._known)
        )

    @property
    def is_usable(self) -> bool:
        """Is there something to run, and may it be?"""
        return (self._is_small or self._rows is not None) and self.is_welcome

    @property
    def is_welcome(self) -> bool:
        """Is the model one of this kind, still made of the same parts, and does nobody listen to it now?"""
        return (
            self._is_simple
            and not any(self._hooks)
            and not any("forward" in own for own in self._own)
            and self._structure.is_same
        )

    def pack(self, rows: int) -> None:
        """Have matrices from here on, those of a larger model laid out for batches of about so many rows."""
        self._rows = None if self._is_small else rows

    def drop(self) -> None:
        """The parameters have changed."""
        self._laid_out = self._rows = None
        self._is_stale = True
        if not self._is_small:  # whoever trains it needs the memory
            self._compiled = None

    def run(self, ids: Tensor, positions: Tensor, attend: slots.Attend, keep: Tensor | int) -> Tensor | None:
        """The logits of the positions in ``keep`` (0: of all); None where the modules are the better way."""
        if isinstance(attend, slots.Decode):
            return self.step(ids, attend)
        if self._is_compiled and isinstance(attend, slots.Prefill) and isinstance(keep, Tensor):
            row_T, position_T = attend.rows_of_tokens(), positions[0].numpy()
            if position_T.mean() <= MOST_SEEN_IN_C:
                return self._in_c().run(ids[0], row_T, position_T, keep.numpy(), attend.cache)[None]
            if not self._is_small:  # of which there is no other copy
                return None
        with slots.attending((), attend):
            return self.forward(ids, positions, keep)

    def decode(
        self, rows: int, steps: int, table: Table, is_end: np.ndarray, cache: slots.SlotCache
    ) -> Drawn | None:  # fmt: skip
        """Several tokens for each of the first rows, drawn one after the other: None if that cannot be done."""
        if not (self._is_compiled and self.is_usable and len(is_end) >= self._head.out_features):
            return None
        return self._in_c().decode(rows, steps if self._is_small else 1, table, is_end, cache)

    def _in_c(self) -> CompiledModel:
        if self._compiled is None:
            self._compiled = CompiledModel(self._model, self._known, self._epsilons)
        elif self._is_stale:
            self._compiled.lay_out()
        self._is_stale = False
        return self._compiled

    def forward(self, ids: Tensor, positions: Tensor, keep: Tensor | int) -> Tensor:
        """The same by PyTorch's operations."""
        inner = self._inner
        layers, floor, head = self._matrices()
        embedded = F.embedding(ids, inner.embed_tokens.weight)
        rotary = inner.rotary_emb(embedded, position_ids=positions)
        hidden = embedded.view(-1, embedded.shape[-1])
        for layer in layers:
            hidden = layer.run(hidden, ids.shape, rotary)
        if not (isinstance(keep, int) and keep == 0):
            hidden = hidden.view(embedded.shape)[:, keep].flatten(0, 1)
        return head.times(_scaled(hidden, floor)).view(len(ids), -1, self._head.out_features)

    def step(self, ids: Tensor, decode: slots.Decode) -> Tensor:
        """The logits of one new token a row, ``[B, 1, vocabulary]``."""
        if self._is_compiled:
            row_B, length_B = decode.rows_B.numpy(), decode.length_B.numpy()
            return self._in_c().run(ids[:, 0], row_B, length_B, row_B, decode.cache)[:, None]
        inner = self._inner
        layers, floor, head = self._matrices()
        hidden = F.embedding(ids, inner.embed_tokens.weight)
        step = _Step(decode, *inner.rotary_emb(hidden, position_ids=decode.length_B[:, None]))
        state = hidden[:, 0].numpy()
        for layer in layers:
            layer.step(state, step)
        return head.times(torch.from_numpy(_scaled_rows(state, floor)))[:, None]

    def _matrices(self) -> tuple[Iterable[_BareLayer], float, _Matrix | _PackedMatrix]:
        if self._laid_out is not None:
            return self._laid_out
        norm, rows = self._inner.norm, self._rows
        layers = (_BareLayer(one, self._epsilons, rows) for one in self._known)
        made = layers, _floor(norm, self._epsilons), _matrix([self._head], norm, rows)
        if not (self._is_small or rows):  # a probe: one layer at a time is enough
            return made
        self._laid_out = list(layers), *made[1:]
        return self._laid_out


class _BareLayer:
    """One layer: its matrices, the floors of its norms, and what its own forward passes to attention."""

    def __init__(self, known: LeanLayer, epsilons: Mapping[int, float], rows: int | None) -> None:
        layer, attention, mlp = known.layer, known.layer.self_attn, known.layer.mlp
        before, after = layer.input_layernorm, layer.post_attention_layernorm
        self.index, self.head_dim = known.index, known.head_dim
        self.scale, self.window = known.scale, known.window
        self._before, self._after = _floor(before, epsilons), _floor(after, epsilons)
        self._qkv = _matrix([attention.q_proj, attention.k_proj, attention.v_proj], before, rows)
        self._out = _matrix([attention.o_proj], None, rows)
        self._gate_up = _matrix([mlp.gate_proj, mlp.up_proj], after, rows)
        self._down = _matrix([mlp.down_proj], None, rows)
        self.groups: int = attention.k_proj.out_features // known.head_dim

    def run(self, hidden: Tensor, shape: Sequence[int], rotary: tuple[Tensor, Tensor]) -> Tensor:
        """As the lean layer's; the hidden states it is given are its to overwrite."""
        qkv = self._qkv.times(_scaled(hidden, self._before)).view(*shape, -1, self.head_dim)
        heads = qkv.shape[2] - 2 * self.groups
        q, k, v = (one.transpose(1, 2) for one in qkv.split([heads, self.groups, self.groups], 2))
        settings: Any = {"scale": self.scale, "window": self.window, "softcap": None}
        out = slots.attend_rotated(self.index, q, k, v, *rotary, **settings)
        hidden = self._out.add_to(hidden, out.transpose(1, 2).reshape(len(hidden), -1))
        gate, up = self._gate_up.times(_scaled(hidden, self._after)).chunk(2, -1)
        return self._down.add_to(hidden, F.silu(gate).mul_(up))

    def step(self, state: np.ndarray, step: _Step) -> None:
        """The same of one token a row; its hidden states ``[B, width]`` are overwritten."""
        total = torch.from_numpy(state)
        qkv = self._qkv.times(torch.from_numpy(_scaled_rows(state, self._before)))
        self._out.add_to(total, step.attended(qkv, self))
        both = self._gate_up.times(torch.from_numpy(_scaled_rows(state, self._after)))
        gate, up = both.chunk(2, -1)
        self._down.add_to(total, F.silu(gate).mul_(up))


class _Step:
    """What the layers of one step have in common: where its rows are, their angles, and what they see."""

    def __init__(self, decode: slots.Decode, cos: Tensor, sin: Tensor) -> None:
        self._store = decode.cache.store.numpy()
        self._rows, self._length, self._span = decode.rows_B.numpy(), decode.length_B.numpy(), decode.span
        self._half = half = cos.shape[-1] // 2
        turned = sin.numpy()
        self._cos, self._sin = cos.numpy(), np.concatenate((-turned[..., :half], turned[..., half:]), -1)
        self._masks: dict[int | None, np.ndarray] = {}

    def attended(self, qkv: Tensor, layer: _BareLayer) -> Tensor:
        """What the queries see, keys and values put into the cache."""
        batch, dim, groups, span = len(qkv), layer.head_dim, layer.groups, self._span
        heads = qkv.numpy().reshape(batch, -1, dim)
        qk = self._turned(heads[:, :-groups])
        keys, values = self._store[layer.index]
        keys[self._rows, :, self._length] = qk[:, -groups:]
        values[self._rows, :, self._length] = heads[:, -groups:]
        q = qk[:, :-groups].reshape(batch, groups, -1, dim)
        keys, values = keys[:batch, :, :span], values[:batch, :, :span]
        multiply = np.matmul if q.shape[2] * dim * span <= MOST_IN_NUMPY else _multiply
        scores = multiply(q, keys.swapaxes(2, 3))
        scores *= layer.scale
        scores += self._mask(layer.window)
        weights = torch.softmax(torch.from_numpy(scores), -1).numpy()
        return torch.from_numpy(multiply(weights, values).reshape(batch, -1))

    def _turned(self, x: np.ndarray) -> np.ndarray:
        """Queries and keys, turned by the angles of their positions."""
        half = self._half
        partner = np.empty_like(x)
        partner[..., :half], partner[..., half:] = x[..., half:], x[..., :half]
        partner *= self._sin
        partner += x * self._cos
        return partner

    def _mask(self, window: int | None) -> np.ndarray:
        if window not in self._masks:
            position_S, length_B = np.arange(self._span), self._length[:, None]
            is_hidden = position_S > length_B
            if window is not None:
                is_hidden |= position_S <= length_B - window
            self._masks[window] = np.where(is_hidden, np.float32(-np.inf), np.float32(0))[:, None, None]
        return self._masks[window]


def _multiply(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    product: np.ndarray = torch.matmul(torch.from_numpy(one), torch.from_numpy(other)).numpy()
    return product


class _Matrix:
    """Linear layers of one input side by side, with the norm before them multiplied in."""

    def __init__(self, linears: Sequence[nn.Linear], norm: Any = None) -> None:
        weight = torch.cat([one.weight.detach() for one in linears])
        if norm is not None:
            weight *= norm.weight.detach() * math.sqrt(weight.shape[1])  # see `_scaled`
        biases = [torch.zeros(one.out_features) if one.bias is None else one.bias.detach() for one in linears]
        self.turned = weight.t()
        self.bias = torch.cat(biases) if any(one.bias is not None for one in linears) else None

    def times(self, x: Tensor) -> Tensor:
        return x @ self.turned if self.bias is None else torch.addmm(self.bias, x, self.turned)

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        total.addmm_(x, self.turned)
        return total if self.bias is None else total.add_(self.bias)


class _PackedMatrix:
    """The same, laid out as the CPU likes it for batches of about so many rows."""

    def __init__(self, matrix: _Matrix, rows: int) -> None:
        self.times = packed.multiplication(matrix.turned.t(), matrix.bias, rows)

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        return total.add_(self.times(x))


def _matrix(linears: Sequence[nn.Linear], norm: Any, rows: int | None) -> _Matrix | _PackedMatrix:
    matrix = _Matrix(linears, norm)
    return matrix if rows is None else _PackedMatrix(matrix, rows)


def _floor(norm: Any, epsilons: Mapping[int, float]) -> float:
    """What keeps the length of a vector from being zero where the norm divides by it."""
    return math.sqrt(epsilons[id(norm)] * norm.weight.shape[0])


def _scaled(x: Tensor, floor: float) -> Tensor:
    """An RMS norm, but for its weight and the root of the width: those are in the matrix."""
    return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), torch.tensor(floor))


def _scaled_rows(x: np.ndarray, floor: float) -> np.ndarray:
    """The same of rows of numbers."""
    length: np.ndarray = np.einsum("ij,ij->i", x, x)
    length += np.float32(floor * floor)
    scaled: np.ndarray = x / np.sqrt(length, out=length)[:, None]
    return scaled
