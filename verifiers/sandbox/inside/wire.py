"""Requests and replies → bytes on a socket, and back: JSON behind its length. Both sides use it."""

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
"""The most names of files that are listed, and the length of that list."""
PIECE_BYTES = 256 << 10
"""A file is read in pieces of this many bytes."""
MAX_LISTS, DEEPEST = 100_000, 200
"""The most lists and objects in a value, and how deep they may lie in one another: more breaks who writes it down."""
# Matches whatever follows a quotation mark, to the end of the message if need be, and never goes back.
TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DECODER, _ENCODER = json.JSONDecoder(), json.JSONEncoder()


def framed(message: Mapping[str, Any]) -> bytes:
    """A message with its header.

    >>> framed({"do": "run", "timeout_s": 1.5})[HEADER.size :]
    b'{"do": "run", "timeout_s": 1.5}'
    """
    fields = [f'"{name}": {_said(value)}' for name, value in message.items()]
    text = f"{{{', '.join(fields)}}}".encode()
    return HEADER.pack(len(text)) + text


def unframed(message: bytes | bytearray) -> Any:
    """What a message without its header says; a ValueError if it is not JSON, and nothing but that.

    >>> unframed(framed({"value": [None, "é"]})[HEADER.size :])
    {'value': [None, 'é']}
    """
    text = message.decode()
    value, end = _DECODER.raw_decode(text)
    if end < len(text):
        raise ValueError(f"{len(text) - end} characters follow the message")
    return value


def outline(message: bytes | bytearray) -> bytes:
    """JSON without its texts: what it is made of, before anything is made of it.

    >>> outline(b'{"a": [1, "]", {}]}')
    b'{: [1, , {}]}'
    """
    return TEXT.sub(b"", bytes(message))


def depth(signs: bytes) -> int:
    """How deep an outline is nested.

    >>> depth(outline(b'{"a": [1, "]", {}]}'))
    3
    """
    brackets = signs.translate(None, NOT_BRACKETS)
    return max(accumulate(1 if sign in b"[{" else -1 for sign in brackets), default=0)


def _said(value: Any) -> str:
    """JSON of a value; texts and numbers, as most are, without the encoder's preparations for what holds others."""
    kind = type(value)
    if kind is int or (kind is float and isfinite(value)):
        return repr(value)
    return "null" if value is None else _ENCODER.encode(value)
