"""Dequantise blocks of weights to float32 with ggml's formulas; bitwise equal to the values in llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Kind:
    """A storage format. ``layout`` describes one block of ``block`` weights."""

    name: str
    block: int
    layout: np.dtype[Any]
    floats: Callable[[NDArray[Any]], Floats]

    def size_bytes(self, count: int) -> int:
        return count // self.block * self.layout.itemsize


def _f32(values: NDArray[Any]) -> Floats:
    return values.astype(np.float32)


def _bf16(values: NDArray[Any]) -> Floats:
    return (values.astype(np.uint32) << 16).view(np.float32)


def _column(blocks: NDArray[Any], name: str) -> Floats:
    return _f32(blocks[name])[:, None]


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Low halves first, then high halves, along the last axis."""
    return np.concatenate([packed & 15, packed >> 4], -1)


def _fifth_bits(blocks: NDArray[Any]) -> NDArray[np.uint8]:
    bits = blocks["high"][:, None] >> np.arange(32, dtype=np.uint32)
    return ((bits & 1) << 4).astype(np.uint8)


def _q8_0(blocks: NDArray[Any]) -> Floats:
    return _column(blocks, "d") * _f32(blocks["q"])


def _q4_0(blocks: NDArray[Any]) -> Floats:
    return _column(blocks, "d") * (_f32(_nibbles(blocks["q"])) - np.float32(8))


def _q4_1(blocks: NDArray[Any]) -> Floats:
    return _column(blocks, "d") * _f32(_nibbles(blocks["q"])) + _column(blocks, "m")


def _q5_0(blocks: NDArray[Any]) -> Floats:
    return _column(blocks, "d") * (_f32(_nibbles(blocks["q"]) | _fifth_bits(blocks)) - np.float32(16))


def _q5_1(blocks: NDArray[Any]) -> Floats:
    return _column(blocks, "d") * _f32(_nibbles(blocks["q"]) | _fifth_bits(blocks)) + _column(blocks, "m")


def _six_bit_scales(packed: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Unpack eight scales and eight minima of 6 bits each from 12 bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], 1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], 1)
    return scales, minima


def _scaled_k(blocks: NDArray[Any], values: NDArray[Any]) -> Floats:
    """``values`` is [blocks, 8, 32]. Each group of 32 has a scale and a minimum."""
    scales, minima = _six_bit_scales(blocks["scales"])
    steps = (_column(blocks, "d") * _f32(scales))[:, :, None]
    offsets = (_column(blocks, "dmin") * _f32(minima))[:, :, None]
    return steps * _f32(values) - offsets


def _q4_k(blocks: NDArray[Any]) -> Floats:
    return _scaled_k(blocks, _nibbles(blocks["q"].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: NDArray[Any]) -> Floats:
    low = _nibbles(blocks["q"].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = (blocks["high"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _scaled_k(blocks, low | (high << 4))


def _q6_k(blocks: NDArray[Any]) -> Floats:
    low = blocks["q"].reshape(-1, 2, 1, 64) >> np.array([[0], [4]], np.uint8) & 15
    high = blocks["high"].reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    values = low.reshape(-1, 2, 4, 32) | (high << 4)
    steps = _column(blocks, "d") * _f32(blocks["scales"])
    return steps[:, :, None] * (_f32(values.reshape(-1, 16, 16)) - np.float32(32))


def _layout(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype[Any]:
    return np.dtype(list(fields))


KINDS = {
    0: Kind("F32", 1, np.dtype("<f4"), _f32),
    1: Kind("F16", 1, np.dtype("<f2"), _f32),
    2: Kind("Q4_0", 32, _layout(("d", "<f2"), ("q", "u1", 16)), _q4_0),
    3: Kind("Q4_1", 32, _layout(("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)), _q4_1),
    6: Kind("Q5_0", 32, _layout(("d", "<f2"), ("high", "<u4"), ("q", "u1", 16)), _q5_0),
    7: Kind("Q5_1", 32, _layout(("d", "<f2"), ("m", "<f2"), ("high", "<u4"), ("q", "u1", 16)), _q5_1),
    8: Kind("Q8_0", 32, _layout(("d", "<f2"), ("q", "i1", 32)), _q8_0),
    12: Kind("Q4_K", 256, _layout(("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("q", "u1", 128)), _q4_k),
    13: Kind(
        "Q5_K",
        256,
        _layout(("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("high", "u1", 32), ("q", "u1", 128)),
        _q5_k,
    ),
    14: Kind("Q6_K", 256, _layout(("q", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("d", "<f2")), _q6_k),
    30: Kind("BF16", 1, np.dtype("<u2"), _bf16),
}

UNREAD = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Types that are not supported, so that the error message can name them."""


def kind_of(number: int, tensor: str) -> Kind:
    """The storage format of a tensor; ValueError if it is not supported."""
    kind = KINDS.get(number)
    if kind is not None:
        return kind
    name = UNREAD.get(number, f"number {number}")
    readable = ", ".join(kind.name for kind in KINDS.values())
    raise ValueError(f"{tensor} is stored as {name}, which is not supported; the supported types are {readable}")
