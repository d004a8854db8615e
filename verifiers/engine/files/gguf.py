"""Read the metadata and the tensors (as float32 arrays) of a GGUF file, with numpy and a memory map.

Every length in the file is checked against the remaining bytes before anything is read or allocated. A truncated or
hostile file raises a ``ValueError`` that names it.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verifiers.engine.files.gguf_quants import Kind, kind_of

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_DEPTH = 4  # of nested arrays

_STRING, _ARRAY, _BOOL = 8, 9, 7
_CODES = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
_SMALLEST_PAIR = 8 + 4 + 1  # a key's length, a type, a value
_SMALLEST_TENSOR = 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the file. ``shape`` is in torch's order; ``offset`` is in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    offset: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)


class GGUF:
    """An open GGUF file: ``metadata``, ``tensors``, and ``read(name)``. Close it, or use it in a ``with`` block."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < len(MAGIC) + 4:
                raise ValueError(f"{self.path} is not a GGUF file: it has {size} bytes")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            cursor = _Cursor(self._map, self.path)
            self.version = _read_version(cursor)
            tensor_count = cursor.count("tensors", _SMALLEST_TENSOR)
            pair_count = cursor.count("metadata entries", _SMALLEST_PAIR)
            self.metadata = _read_metadata(cursor, pair_count)
            self.tensors = _read_tensors(cursor, tensor_count, self._alignment())
        except BaseException:
            self.close()
            raise

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise ValueError(f"{self.path} has an invalid alignment of {alignment!r} bytes")
        return alignment

    def read(self, name: str) -> NDArray[np.float32]:
        """A copy of one tensor as float32."""
        info = self.tensors[name]
        stored = np.frombuffer(self._map, info.kind.layout, info.count // info.kind.block, info.offset)
        return info.kind.floats(stored).reshape(info.shape)

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> GGUF:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Cursor:
    """A read position that never moves past the end of the file."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer = buffer
        self.path = path
        self.at = 0
        self.size = len(buffer)

    def corrupt(self, found: str) -> ValueError:
        return ValueError(f"{self.path} is truncated or corrupt: {found}")

    def skip(self, n: int, what: str) -> int:
        """Advance by ``n`` bytes; returns the position before."""
        start = self.at
        if n > self.size - start:
            raise self.corrupt(f"{what} takes {n:,} bytes at byte {start:,}, but the file has only {self.size:,}")
        self.at = start + n
        return start

    def number(self, code: str, what: str) -> Any:
        return struct.unpack_from(code, self.buffer, self.skip(struct.calcsize(code), what))[0]

    def u32(self, what: str) -> int:
        return int(self.number("<I", what))

    def u64(self, what: str) -> int:
        return int(self.number("<Q", what))

    def count(self, what: str, smallest: int) -> int:
        """Read a number of elements that take at least ``smallest`` bytes each."""
        n = self.u64(f"the number of {what}")
        if n * smallest > self.size - self.at:
            raise self.corrupt(f"it declares {n:,} {what}, but has only {self.size:,} bytes")
        return n

    def text(self, what: str) -> str:
        n = self.u64(f"the length of {what}")
        start = self.skip(n, what)
        try:
            return self.buffer[start : start + n].decode()
        except UnicodeDecodeError as error:
            raise self.corrupt(f"{what} at byte {start:,} is not UTF-8") from error

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self._array(what, depth)
        if kind == _BOOL:
            return bool(self.buffer[self.skip(1, what)])
        code = _CODES.get(kind)
        if code is None:
            raise self.corrupt(f"{what} has the unknown type {kind}")
        return self.number(code, what)

    def _array(self, what: str, depth: int) -> Any:
        if depth >= MAX_DEPTH:
            raise self.corrupt(f"{what} nests arrays more than {MAX_DEPTH} deep")
        kind = self.u32(f"the element type of {what}")
        code = _CODES.get(kind)
        smallest = {_STRING: 8, _ARRAY: 12}.get(kind, 1) if code is None else struct.calcsize(code)
        n = self.count(f"elements of {what}", smallest)
        if code is None:
            return [self.value(kind, what, depth + 1) for _ in range(n)]
        start = self.skip(n * smallest, what)
        return np.frombuffer(self.buffer[start : self.at], code).tolist()


def _read_version(cursor: _Cursor) -> int:
    magic = cursor.buffer[: len(MAGIC)]
    if magic != MAGIC:
        raise ValueError(f"{cursor.path} is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    cursor.at = len(MAGIC)
    version = cursor.u32("the version")
    if version not in VERSIONS:
        hint = " (a big-endian file)" if version & 0xFFFF == 0 else ""
        raise ValueError(f"{cursor.path} has GGUF version {version}{hint}; versions 2 and 3 are supported")
    return version


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise cursor.corrupt(f"the metadata key {_short(key)} appears twice")
        metadata[key] = cursor.value(cursor.u32(f"the type of {_short(key)}"), _short(key))
    return metadata


def _short(name: str) -> str:
    """A name for an error message, shortened because a corrupt name may have any length."""
    return repr(name if len(name) <= 80 else f"{name[:80]}…")


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    found: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(count):
        name = cursor.text("a tensor's name")
        dimensions = cursor.u32(f"the dimensions of {_short(name)}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise cursor.corrupt(f"tensor {_short(name)} has {dimensions:,} dimensions")
        shape = tuple(cursor.u64(f"the shape of {_short(name)}") for _ in range(dimensions))
        found.append(
            (name, shape[::-1], cursor.u32(f"the type of {_short(name)}"), cursor.u64(f"the place of {_short(name)}"))
        )
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, number, place in found:
        if name in tensors:
            raise cursor.corrupt(f"the tensor {_short(name)} appears twice")
        tensors[name] = TensorInfo(name, shape, kind_of(number, f"{cursor.path}: tensor {_short(name)}"), base + place)
        _check_place(cursor, tensors[name])
    total = sum(info.kind.size_bytes(info.count) for info in tensors.values())
    if total > cursor.size:
        raise cursor.corrupt(f"its tensors overlap: they have {total:,} bytes, and the file has {cursor.size:,}")
    return tensors


def _check_place(cursor: _Cursor, info: TensorInfo) -> None:
    tensor, kind, width = f"tensor {_short(info.name)}", info.kind, info.shape[-1]
    if not info.count:
        raise cursor.corrupt(f"{tensor} has the shape {info.shape}")
    if width % kind.block:
        raise cursor.corrupt(f"{tensor} has rows of {width:,} weights, but {kind.name} has blocks of {kind.block}")
    if (end := info.offset + kind.size_bytes(info.count)) > cursor.size:
        raise cursor.corrupt(f"{tensor} ends at byte {end:,}, but the file has only {cursor.size:,}")
