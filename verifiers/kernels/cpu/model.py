"""Run a decoder of the common architecture on a CPU with decode.c: logits of new tokens, or sampled tokens.

The matrices are copies of the parameters. Projections of the same input are concatenated, and the weight of the norm
before them is multiplied in. They are copied again after the parameters have changed. A hook, an adapter or a replaced
module is detected before a step; the step then runs the modules instead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiers.kernels.cpu.binding import Cache, CHeadNorms, Heads, Layer, Matrix, Model, decode_functions
from verifiers.kernels.cpu.build import why_none
from verifiers.kernels.cpu.threads import ThreadTeam, is_small, threads_for
from verifiers.kernels.decoder import CommonDecoder, DecoderLayer
from verifiers.kernels.modules import ModuleSnapshot
from verifiers.kernels.sampling import SamplingColumns

STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # angles depend only on the position


def unsupported(decoder: CommonDecoder) -> str | None:
    """Why a model cannot run in C, in a few words; None if it can."""
    model, layers = decoder.model, decoder.layers
    if decoder.was_hooked:
        return "hooks on its modules"
    if any(hasattr(one, "merged_adapters") for one in model.modules()):
        return "adapters"
    if not decoder.is_whole:
        return f"it has more parts than its {len(layers)} layers of the common architecture" if layers else (
            "its layers have another architecture"
        )  # fmt: skip
    linears = [model.lm_head, *(one for layer in layers for one in (*layer.qkv, *_other_linears(layer)))]
    norms = [model.model.norm, *(one for layer in layers for one in (*layer.norms, *(layer.head_norms or ())))]
    kinds = {
        "soft-capped attention scores": any(one.softcap is not None for one in layers),
        "an activation other than SiLU": not all(one.is_silu for one in layers),
        "norms other than RMS": any(one not in decoder.epsilons for one in norms),
        "linear layers other than nn.Linear": any(type(one) is not nn.Linear for one in linears),
        "an embedding other than nn.Embedding": type(model.model.embed_tokens) is not nn.Embedding,
        "weights that are not float32": any(getattr(one.weight, "dtype", 0) is not torch.float32 for one in linears),
        "length-dependent rotary angles": getattr(model.model.rotary_emb, "rope_type", None) not in STATIC_ROPE,
        "layers of different sizes": len({(one.heads, one.kv_heads, one.head_dim, one.inner) for one in layers}) > 1,
    }
    found = next((name for name, is_so in kinds.items() if is_so), None)
    return found or (why_none() if decode_functions() is None else None)


def _other_linears(layer: DecoderLayer) -> tuple[nn.Linear, ...]:
    mlp = layer.layer.mlp
    return layer.layer.self_attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj


class Paged(NamedTuple):
    """The KV cache ``[layers, 2, blocks, kv_heads, block, head_dim]``, and the block tables of some sequences."""

    store: Tensor
    tables: np.ndarray  # [sequences, width], int32
    length: int  # longest possible sequence


class Drawn(NamedTuple):
    """Tokens of K steps for B sequences, with their logprobs under the sampling and the raw distribution."""

    token_KB: np.ndarray
    logprob_KB: np.ndarray
    raw_KB: np.ndarray


class CpuModel:
    """A model whose forward pass runs in C, on a copy of its parameters."""

    def __init__(self, decoder: CommonDecoder) -> None:
        self._decoder, self._model = decoder, decoder.model
        self._snapshot = ModuleSnapshot(self._model)
        self.is_small = is_small(self._model)
        self.runs = 0  # calls of C so far
        self._is_wanted = self.is_small
        self._is_stale = True
        self._matrices: _Matrices | None = None

    @property
    def vocabulary(self) -> int:
        return int(self._model.lm_head.out_features)

    @property
    def is_unchanged(self) -> bool:
        """Whether the model still has the same modules, parameters and settings, and no hooks."""
        return not any(self._snapshot.hooks) and self._snapshot.is_same

    @property
    def is_usable(self) -> bool:
        """Whether the next step may run in C. A larger model needs `lay_out` first."""
        return self._is_wanted and self.is_unchanged

    def lay_out(self) -> None:
        """Copy the parameters before the next step."""
        self._is_wanted = True

    def drop(self) -> None:
        """Mark the copy as stale, because the parameters have changed."""
        self._is_stale = True
        self._is_wanted = self.is_small
        if not self.is_small:  # frees memory for the optimizer
            self._matrices = None

    def run(
        self, ids_T: Tensor, sequence_T: np.ndarray, position_T: np.ndarray, keep_N: np.ndarray, cache: Paged
    ) -> Tensor:
        """The logits ``[N, vocabulary]`` of the tokens in ``keep_N``. Writes all keys and values to the cache."""
        held, functions, n = self._ready(), decode_functions(), len(ids_T)
        model, team = held.model_with(cache), held.team
        hidden, logits = F.embedding(ids_T, held.embedded), torch.empty(len(keep_N), self.vocabulary)
        workspace = torch.empty(functions.run_workspace(model, n, team.parts))
        team.call(
            functions.run, model, n, hidden.data_ptr(), sequence_T.ctypes.data, position_T.ctypes.data,
            keep_N.ctypes.data, len(keep_N), logits.data_ptr(), workspace.data_ptr(),
        )  # fmt: skip
        return logits

    def decode(
        self, token_B: np.ndarray, position_B: np.ndarray, columns: SamplingColumns, steps: int, is_end_V: np.ndarray,
        cache: Paged,
    ) -> Drawn:  # fmt: skip
        """Sample at most ``steps`` tokens per sequence, until a sequence samples an end token or has a NaN.

        C overwrites ``token_B``, ``position_B`` and ``columns.step_B``.
        """
        held, functions, n = self._ready(), decode_functions(), len(token_B)
        model, team, sequence_B = held.model_with(cache), held.team, np.arange(n)
        token_KB = np.empty((steps, n), np.int64)
        logprob_KB, raw_KB = np.empty((2, steps, n), np.float32)
        workspace = np.empty(functions.decode_workspace(model, n, team.parts), np.float32)
        done = team.call(
            functions.decode, model, held.embedded.data_ptr(), n, steps, token_B.ctypes.data,
            position_B.ctypes.data, sequence_B.ctypes.data, ctypes.byref(columns.in_c()), columns.step_B.data_ptr(),
            *(one.ctypes.data for one in (is_end_V, token_KB, logprob_KB, raw_KB, workspace)),
        )  # fmt: skip
        return Drawn(token_KB[:done], logprob_KB[:done], raw_KB[:done])

    def _ready(self) -> _Matrices:
        self.runs += 1
        if self._matrices is None:
            self._matrices = _Matrices(self._decoder)
        elif self._is_stale:
            self._matrices.lay_out()
        self._is_stale = False
        return self._matrices


class _Matrices:
    """The structures that describe a model to C, and the memory that they point to."""

    def __init__(self, decoder: CommonDecoder) -> None:
        inner, layers = decoder.model.model, decoder.layers
        self._inner = inner
        self._angles: tuple[Tensor, ...] = ()  # cosines and sines of the rotary embedding, [positions, head_dim]
        self._panels: list[_Panels] = []
        self._head_norms: list[_HeadNormWeights] = []
        self._layers = (Layer * len(layers))(*map(self._layer, layers))  # kept alive: the structure below points to it
        head = self._matrix([decoder.model.lm_head], inner.norm)
        epsilon = _epsilon_sum(inner.norm, decoder.epsilons)
        heads = Heads(layers[0].heads, layers[0].kv_heads, layers[0].head_dim)
        self._model = Model(self._layers, head, epsilon, len(layers), head.rows, layers[0].inner, heads)
        self.team = ThreadTeam(threads_for(decoder.model))
        self.lay_out()

    def lay_out(self) -> None:
        """Copy the current parameters."""
        self._angles = ()  # may be rounded if the model temporarily had another dtype
        self.embedded = self._inner.embed_tokens.weight.detach().contiguous()
        self.team.share([one.lay_out for one in self._panels])
        for norms in self._head_norms:
            norms.lay_out()

    def model_with(self, cache: Paged) -> Any:
        """A pointer to the model with this KV cache."""
        model, tables = self._model, cache.tables
        if not self._angles or len(self._angles[0]) != cache.length:  # compute them with the model's own module
            found = self._inner.rotary_emb(self.embedded, position_ids=torch.arange(cache.length)[None])
            self._angles = tuple(one[0].contiguous() for one in found)
        cos, sin = self._angles
        model.heads.cos, model.heads.sin, model.heads.length = cos.data_ptr(), sin.data_ptr(), cache.length
        blocks, block = cache.store.shape[2], cache.store.shape[4]
        model.cache = Cache(cache.store.data_ptr(), blocks, block, tables.ctypes.data, tables.strides[0] // 4)
        return ctypes.byref(model)

    def _layer(self, known: DecoderLayer) -> Layer:
        before, after = known.norms
        out, gate, up, down = _other_linears(known)
        return Layer(
            self._matrix(known.qkv, before),
            self._matrix([out]),
            self._matrix([gate, up], after),
            self._matrix([down]),
            self._head_norms_of(known),
            _epsilon_sum(before, known.epsilons),
            _epsilon_sum(after, known.epsilons),
            known.scale,
            known.rotates,
            known.window or 0,
        )

    def _head_norms_of(self, known: DecoderLayer) -> CHeadNorms:
        if known.head_norms is None:
            return CHeadNorms()
        self._head_norms.append(_HeadNormWeights(known.head_norms, known.epsilons))
        return self._head_norms[-1].norms

    def _matrix(self, linears: Sequence[nn.Linear], norm: Any = None) -> Matrix:
        self._panels.append(_Panels(linears, norm))
        return self._panels[-1].matrix


class _Panels:
    """Linear layers of one input, concatenated, with the weight of the norm before them multiplied in."""

    def __init__(self, linears: Sequence[nn.Linear], norm: Any) -> None:
        self._linears, self._norm = linears, norm
        inputs, columns = linears[0].in_features, sum(one.out_features for one in linears)
        self._numbers = np.zeros(decode_functions().panels_size(inputs, columns), np.float32)
        self._bias = None if all(one.bias is None for one in linears) else np.zeros(columns, np.float32)
        bias = None if self._bias is None else self._bias.ctypes.data
        self.matrix = Matrix(self._numbers.ctypes.data, bias, inputs, columns)

    def lay_out(self) -> None:
        inputs, first = self.matrix.rows, 0
        # C divides by a vector's L2 norm, which is √width times its RMS.
        scale = None if self._norm is None else self._norm.weight.detach().float() * inputs**0.5
        for one in self._linears:
            weight, end = one.weight.detach().contiguous(), first + one.out_features
            if (weight.dtype, *weight.shape) != (torch.float32, one.out_features, inputs):  # C would read other memory
                raise TypeError(f"the weights of a linear layer have become {weight.dtype} {list(weight.shape)}")
            decode_functions().lay_out(
                self.matrix.panels, first, one.out_features, inputs, weight.data_ptr(),
                None if scale is None else scale.data_ptr(),
            )  # fmt: skip
            if one.bias is not None and self._bias is not None:
                self._bias[first:end] = one.bias.detach().numpy()
            first = end


class _HeadNormWeights:
    """Weights of the head norms of queries and keys, times √head_dim as in `_Panels`."""

    def __init__(self, norms: Sequence[Any], epsilons: Mapping[Any, float]) -> None:
        self._norms = norms
        self._weights = np.empty((2, norms[0].weight.shape[0]), np.float32)
        q, k = (one.ctypes.data for one in self._weights)
        self.norms = CHeadNorms(q, k, *(_epsilon_sum(one, epsilons) for one in norms))

    def lay_out(self) -> None:
        for to, norm in zip(self._weights, self._norms, strict=True):
            to[:] = (norm.weight.detach().float() * len(to) ** 0.5).numpy()


def _epsilon_sum(norm: Any, epsilons: Mapping[Any, float]) -> float:
    """Epsilon times the width, because C adds it to the sum of a vector's squares, not to their mean."""
    return epsilons[norm] * float(norm.weight.shape[0])
