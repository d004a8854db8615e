"""What decode.c has to offer, with the types of its arguments."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from verifiers.engine import compiled

SOURCE = Path(__file__).with_name("decode.c")


class Team(Structure):
    """Threads that do a piece of work together."""

    _fields_ = tuple((name, c_int32) for name in ("parts", "here", "turn", "is_over"))


class Knobs(Structure):
    """How rows are sampled."""

    _fields_ = tuple((name, c_void_p) for name in ("temperature", "top_p", "min_p", "top_k", "seed", "step"))


class Matrix(Structure):
    """Linear layers of one input side by side."""

    _fields_ = (("panels", c_void_p), ("bias", c_void_p), ("rows", c_int64), ("columns", c_int64))


class Layer(Structure):
    """A decoder layer."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_float) for name in ("before", "after", "scale")),
        ("window", c_int64),
    )


class Heads(Structure):
    """How many there are of what is queried and what is seen, and how they are turned."""

    _fields_ = (
        *((name, c_int64) for name in ("heads", "groups", "dim", "length")),
        *((name, c_void_p) for name in ("cos", "sin")),
    )


class Model(Structure):
    """All layers, the head, and where the cache is."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        ("head", Matrix),
        ("last", c_float),
        *((name, c_int64) for name in ("n_layers", "width", "inner")),
        ("heads", Heads),
        ("store", c_void_p),
        ("rows", c_int64),
    )


@cache
def functions() -> Any:
    """The functions, if they can be compiled here."""
    found = compiled.library(SOURCE)
    if found is None:
        return None
    part = (c_int64, c_void_p)  # of the work, and the team that does it
    found.panel_columns.argtypes, found.panel_columns.restype = [], c_int64
    found.lay_out.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p]
    found.run.argtypes = [c_void_p, c_int64, *(c_void_p,) * 4, c_int64, c_void_p, c_void_p, *part]
    found.draw.argtypes = [c_int64, c_int64, *(c_void_p,) * 6]
    found.decode.argtypes = [c_void_p, c_void_p, c_int64, c_int64, *(c_void_p,) * 10, *part]
    found.lay_out.restype = found.run.restype = found.draw.restype = None
    found.decode.restype = c_int64
    return found
