"""ctypes bindings of decode.c and learn.c; None without a compiler."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from verifiers.kernels.cpu import build

FOLDER = Path(__file__).parent
_N, _X, _AT = c_int64, c_float, c_void_p


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Team(Structure):
    """Threads that call one function at the same time and synchronise at barriers."""

    _fields_ = _fields(c_int32, "parts arrived phase is_over")


class CSampling(Structure):
    """Sampling parameters: pointers to arrays with one entry per row."""

    _fields_ = _fields(_AT, "temperature top_p min_p top_k seed step")


class Matrix(Structure):
    """Linear layers of one input, concatenated and laid out in panels."""

    _fields_ = (*_fields(_AT, "panels bias"), *_fields(_N, "rows columns"))


class CHeadNorms(Structure):
    """RMS norms of query and key heads. NULL weights mean no norm. Epsilons are multiplied by head_dim."""

    _fields_ = (*_fields(_AT, "q k"), *_fields(_X, "q_epsilon k_epsilon"))


class Layer(Structure):
    """A decoder layer. Epsilons are multiplied by the hidden size."""

    _fields_ = (
        *_fields(Matrix, "qkv out gate_up down"),
        ("norms", CHeadNorms),
        *_fields(_X, "input_epsilon post_epsilon scale"),
        ("rotates", c_int32),
        ("window", _N),
    )


class Heads(Structure):
    """Sizes of attention, and the cosines and sines of the rotary embedding by position."""

    _fields_ = (*_fields(_N, "heads kv_heads dim length"), *_fields(_AT, "cos sin"))


class Cache(Structure):
    """The blocks of the KV cache, and the block table of each sequence."""

    _fields_ = (("store", _AT), *_fields(_N, "blocks block"), ("tables", _AT), ("width", _N))


class Model(Structure):
    """All layers, the lm_head, and the KV cache."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        ("head", Matrix),
        ("final_epsilon", _X),
        *_fields(_N, "n_layers width inner"),
        ("heads", Heads),
        ("cache", Cache),
    )


_PART = [_N, _AT]  # the index of the calling thread, and the team
_DECODE: dict[str, tuple[list[Any], Any]] = {
    "panels_size": ([_N, _N], _N),
    "lay_out": ([_AT, _N, _N, _N, _AT, _AT], None),
    "run_workspace": ([_AT, _N, _N], _N),
    "run": ([_AT, _N, *[_AT] * 4, _N, _AT, _AT, *_PART], None),
    "draw_workspace": ([_N], _N),
    "draw": ([_N, _N, *[_AT] * 6], None),
    "decode_workspace": ([_AT, _N, _N], _N),
    "decode": ([_AT, _AT, _N, _N, *[_AT] * 10, *_PART], _N),
}
_LEARN: dict[str, tuple[list[Any], Any]] = {
    "norm": ([_N, _N, _AT, _AT, _AT, _X, _AT, _AT, _AT], None),
    "norm_back": ([_N, _N, *[_AT] * 7], None),
    "rotate": ([_N, _N, _N, _AT, _AT, _N, _AT, _AT, c_int], None),
    "gated": ([_N, *[_AT] * 3], None),
    "gated_back": ([_N, *[_AT] * 5], None),
    "logprobs": ([_N, _N, _AT, _AT, _X, _AT, _AT], _N),
    "logprobs_back": ([_N, _N, _AT, _AT, _X, _AT, _AT], None),
    "attention_workspace": ([_N, _N], _N),
    "attention": ([_N, _AT, _N, _N, _N, _X, _N, _N, *[_AT] * 6], None),
    "attention_back": ([_N, _AT, _N, _N, _N, _X, _N, _N, *[_AT] * 10], None),
}


@cache
def decode_functions() -> Any:
    """Inference: the forward pass and sampling."""
    return _typed("decode.c", _DECODE)


@cache
def learn_functions() -> Any:
    """Training: a layer without its matrix products, forward and backward."""
    return _typed("learn.c", _LEARN)


def _typed(name: str, types: dict[str, tuple[list[Any], Any]]) -> Any:
    found = build.library(FOLDER / name)
    if found is not None:
        for function, (arguments, result) in types.items():  # without argtypes, ctypes truncates pointers to 32 bits
            getattr(found, function).argtypes, getattr(found, function).restype = arguments, result
    return found
