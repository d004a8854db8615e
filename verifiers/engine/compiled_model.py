"""A model's parameters become matrices that decode.c runs: the logits of new tokens, or the tokens themselves."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiers.engine import threads
from verifiers.engine.c_functions import Heads, Knobs, Layer, Matrix, Model, Team, functions
from verifiers.engine.kv_cache import SlotCache
from verifiers.engine.slot_table import Table

if TYPE_CHECKING:
    from verifiers.engine.lean import LeanLayer

SPARE = 16  # numbers after the scores of a query, for whole vectors of them
STEADY = {"default", "linear", "llama3", "yarn"}  # rotary embeddings whose angles depend on the position alone


def can_run(model: Any, known: Sequence[LeanLayer]) -> bool:
    """Can a model whose layers are all known be run so?"""
    is_steady = getattr(model.model.rotary_emb, "rope_type", None) in STEADY
    return is_steady and len(set(map(_sizes, known))) == 1 and functions() is not None


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens of several steps and their logprobs, under what they were drawn from and raw: ``[steps, rows]``."""

    token_KB: np.ndarray
    logprob_KB: np.ndarray
    raw_KB: np.ndarray


class CompiledModel:
    """The matrices of a model as its parameters were when they were last laid out."""

    def __init__(self, model: Any, known: Sequence[LeanLayer], epsilons: Mapping[int, float]) -> None:
        self._functions = functions()
        self._embedding, self._angles = model.model.embed_tokens, Angles(model.model)
        self._panels: list[_Panels] = []
        self._layers = (Layer * len(known))(*(self._layer(one, epsilons) for one in known))
        head, floor = self._matrix([model.lm_head], model.model.norm), _floor(model.model.norm, epsilons)
        width, (heads, groups, dim, inner) = head.rows, _sizes(known[0])
        self._model = Model(self._layers, head, floor, len(known), width, inner, Heads(heads, groups, dim))
        self._vocabulary: int = head.columns
        self._share = heads // groups
        self._together = _Together(1 if threads.wants_one(model) else torch.get_num_threads())
        self._room = max(width, heads * dim, inner) + max(2 * inner, (heads + 2 * groups) * dim)
        self.lay_out()

    def lay_out(self) -> None:
        """Take the parameters as they are now."""
        self._embedded = self._embedding.weight.detach().contiguous()
        self._together.share([partial(one.lay_out, self._functions) for one in self._panels])

    def run(self, ids: Tensor, row: np.ndarray, position: np.ndarray, keep: np.ndarray, cache: SlotCache) -> Tensor:
        """The logits of the tokens in ``keep``; all are put where the cache has their rows and positions."""
        hidden = F.embedding(ids, self._embedded)
        logits = torch.empty(len(keep), self._vocabulary)
        room = torch.empty(len(ids) * self._room + self._scores(cache))
        self._together.call(
            self._functions.run, self._with(cache), len(ids), hidden.data_ptr(), row.ctypes.data,
            position.ctypes.data, keep.ctypes.data, len(keep), logits.data_ptr(), room.data_ptr(),
        )  # fmt: skip
        return logits

    def decode(self, rows: int, steps: int, table: Table, is_end: np.ndarray, cache: SlotCache) -> Drawn:
        """Tokens for the first rows of the cache, until one of them has to be looked at; at most so many of each."""
        token_B, position_B, step_B = (one[:rows].copy() for one in (table.token, table.length, table.steps))
        row_B = np.arange(rows)
        columns = (table.temperature, table.top_p, table.min_p, table.top_k, table.seed, step_B)
        knobs = Knobs(*(one.ctypes.data for one in columns))
        token_KB = np.empty((steps, rows), np.int64)
        logprob_KB, raw_KB = np.empty((2, steps, rows), np.float32)
        width, vocabulary = self._embedded.shape[1], self._vocabulary
        spare = self._together.parts * 2 * vocabulary + self._scores(cache)
        room = np.empty(rows * (width + vocabulary + self._room) + spare, np.float32)
        done = self._together.call(
            self._functions.decode, self._with(cache), self._embedded.data_ptr(), rows, steps, token_B.ctypes.data,
            position_B.ctypes.data, row_B.ctypes.data, ctypes.byref(knobs),
            *(one.ctypes.data for one in (step_B, is_end, token_KB, logprob_KB, raw_KB, room)),
        )  # fmt: skip
        return Drawn(token_KB[:done], logprob_KB[:done], raw_KB[:done])

    def _scores(self, cache: SlotCache) -> int:
        """Numbers that attention needs besides, of queries that share keys, for each thread."""
        return self._together.parts * self._share * (cache.length + SPARE)

    def _with(self, cache: SlotCache) -> Any:
        """The model as C sees it, reading from and writing to this cache."""
        model = self._model
        cos, sin = self._angles.up_to(cache.length)
        model.heads.cos, model.heads.sin, model.heads.length = cos.data_ptr(), sin.data_ptr(), cache.length
        model.store, model.rows = cache.store.data_ptr(), cache.rows
        return ctypes.byref(model)

    def _layer(self, known: LeanLayer, epsilons: Mapping[int, float]) -> Layer:
        layer, attention, mlp = known.layer, known.layer.self_attn, known.layer.mlp
        before, after = layer.input_layernorm, layer.post_attention_layernorm
        return Layer(
            self._matrix([attention.q_proj, attention.k_proj, attention.v_proj], before),
            self._matrix([attention.o_proj]),
            self._matrix([mlp.gate_proj, mlp.up_proj], after),
            self._matrix([mlp.down_proj]),
            _floor(before, epsilons),
            _floor(after, epsilons),
            known.scale,
            known.window or 0,
        )

    def _matrix(self, linears: Sequence[nn.Linear], norm: Any = None) -> Matrix:
        self._panels.append(_Panels(linears, norm, self._functions.panel_columns()))
        return self._panels[-1].matrix


class _Together:
    """Threads that call a function of C at the same time, each for its part of the work."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self._others = ThreadPoolExecutor(max(parts - 1, 1), "verifiers-engine")
        here = threading.Barrier(parts)
        try:
            self.share([here.wait] * parts)
        except RuntimeError:  # no more threads: whoever waited for them in C would wait for ever
            here.abort()
            self.parts = 1

    def share(self, tasks: Sequence[Callable[[], object]]) -> None:
        """Do these, each some of them."""
        others = [self._others.submit(_do, tasks[part :: self.parts]) for part in range(1, self.parts)]
        _do(tasks[:: self.parts])
        for other in others:
            other.result()

    def call(self, function: Any, *args: Any) -> Any:
        """One function, by all at once."""
        team = Team(self.parts)
        shared = ctypes.byref(team)
        others = [self._others.submit(partial(function, *args, part, shared)) for part in range(1, self.parts)]
        found = function(*args, 0, shared)
        for other in others:
            other.result()
        return found


def _do(tasks: Iterable[Callable[[], object]]) -> None:
    for task in tasks:
        task()


class _Panels:
    """Linear layers of one input side by side, with the norm before them multiplied in, but for its division."""

    def __init__(self, linears: Sequence[nn.Linear], norm: Any, panel: int) -> None:
        self._linears, self._norm = linears, norm
        inputs, columns = linears[0].in_features, sum(one.out_features for one in linears)
        self._numbers = np.zeros(-(-columns // panel) * panel * inputs, np.float32)
        self._bias = None if all(one.bias is None for one in linears) else np.zeros(columns, np.float32)
        bias = None if self._bias is None else self._bias.ctypes.data
        self.matrix = Matrix(self._numbers.ctypes.data, bias, inputs, columns)

    def lay_out(self, functions: Any) -> None:
        inputs, first = self.matrix.rows, 0
        scale = None if self._norm is None else self._norm.weight.detach() * inputs**0.5
        for one in self._linears:
            weight, end = one.weight.detach().contiguous(), first + one.out_features
            functions.lay_out(
                self.matrix.panels, first, one.out_features, inputs, weight.data_ptr(),
                None if scale is None else scale.data_ptr(),
            )  # fmt: skip
            if one.bias is not None and self._bias is not None:
                self._bias[first:end] = one.bias.detach().numpy()
            first = end


class Angles:
    """By how much a model turns what is at each position."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._known: tuple[int, Tensor, Tensor] | None = None

    def up_to(self, length: int) -> tuple[Tensor, Tensor]:
        if self._known is None or self._known[0] != length:
            like = self._inner.embed_tokens.weight
            cos, sin = self._inner.rotary_emb(like, position_ids=torch.arange(length)[None])
            self._known = length, cos.contiguous(), sin.contiguous()
        return self._known[1:]


def _sizes(known: LeanLayer) -> tuple[int, int, int, int]:
    """Heads, groups of them that have keys in common, the size of one, and the width of the feed-forward."""
    attention, dim = known.layer.self_attn, known.head_dim
    heads, groups = attention.q_proj.out_features // dim, attention.k_proj.out_features // dim
    return heads, groups, dim, known.layer.mlp.up_proj.out_features


def _floor(norm: Any, epsilons: Mapping[int, float]) -> float:
    """What keeps the sum of a vector's squares from being zero where the norm divides by its root."""
    return epsilons[id(norm)] * float(norm.weight.shape[0])
