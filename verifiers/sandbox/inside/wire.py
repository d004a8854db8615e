"""Encodes and decodes requests and replies on the socket, as length-prefixed JSON. Both sides use it."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from itertools import accumulate
from math import isfinite
from typing import Any

HEADER = struct.Struct("<I")
MAX_FILES, LIST_BYTES = 10_000, 1 << 20
"""The maximum number of listed file names, and the maximum length of that list."""
PIECE_BYTES = 256 << 10
"""Files are read in pieces of this many bytes."""
MAX_LISTS, DEEPEST = 100_000, 200
"""The maximum number and depth of lists and objects in a value; more would exceed limits of later encoders."""
# Matches from a quotation mark to its end, or to the end of the message, without backtracking.
TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DECODER, _ENCODER = json.JSONDecoder(), json.JSONEncoder()


def framed(message: Mapping[str, Any]) -> bytes:
    """A message with its header.

    >>> framed({"do": "run", "timeout_s": 1.5})[HEADER.size :]
    b'{"do": "run", "timeout_s": 1.5}'
    """
    fields = [f'"{name}": {_encoded(value)}' for name, value in message.items()]
    text = f"{{{', '.join(fields)}}}".encode()
    return HEADER.pack(len(text)) + text


def unframed(message: bytes | bytearray) -> Any:
    """The value of a message without its header; ValueError if it is not exactly one JSON value.

    >>> unframed(framed({"value": [None, "é"]})[HEADER.size :])
    {'value': [None, 'é']}
    """
    text = message.decode()
    value, end = _DECODER.raw_decode(text)
    if end < len(text):
        raise ValueError(f"{len(text) - end} characters follow the message")
    return value


def outline(message: bytes | bytearray) -> bytes:
    """JSON without its strings, to measure its structure before decoding it.

    >>> outline(b'{"a": [1, "]", {}]}')
    b'{: [1, , {}]}'
    """
    return TEXT.sub(b"", bytes(message))


def depth(signs: bytes) -> int:
    """The nesting depth of an outline.

    >>> depth(outline(b'{"a": [1, "]", {}]}'))
    3
    """
    brackets = signs.translate(None, NOT_BRACKETS)
    return max(accumulate(1 if sign in b"[{" else -1 for sign in brackets), default=0)


def _encoded(value: Any) -> str:
    """The JSON of a value; numbers, which are frequent, without the overhead of the encoder."""
    kind = type(value)
    if kind is int or (kind is float and isfinite(value)):
        return repr(value)
    return "null" if value is None else _ENCODER.encode(value)
