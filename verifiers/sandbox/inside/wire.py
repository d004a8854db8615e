"""Requests and replies → bytes on a socket, and back: JSON behind its length. Both sides use it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import isfinite
from typing import Any

HEADER = struct.Struct("<I")
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


def _said(value: Any) -> str:
    """JSON of a value; texts and numbers, as most are, without the encoder's preparations for what holds others."""
    kind = type(value)
    if kind is int or (kind is float and isfinite(value)):
        return repr(value)
    return "null" if value is None else _ENCODER.encode(value)
