"""Python values ↔ the bytes of requests and replies."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from verifiers.errors import RequestRefusedError

MAX_REPLY_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One request, ready to be sent any number of times. Its repr shows no field that may contain a key."""

    url: str = field(repr=False)
    headers: Any = field(repr=False)  # as `transport.prepared` made them
    body: bytes = field(repr=False)
    timeout_s: float
    max_reply_bytes: int = field(default=MAX_REPLY_BYTES, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)


class Reply(NamedTuple):
    """An HTTP reply of any status."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def encode(body: Any) -> bytes:
    """The JSON bytes of a request. A lone surrogate, which endpoints refuse, becomes the replacement character.

    >>> encode({"content": "\\ud83d"}).decode()
    '{"content":"�"}'
    """
    try:
        return _encoder.encode(body)
    except UnicodeEncodeError:
        return _encoder.encode(_mended(_builtin(body)))
    except (TypeError, ValueError, RecursionError) as error:
        reason = str(error)
    raise RequestRefusedError(f"the request cannot be sent as JSON: {reason}")


def decode(body: bytes) -> Any:
    """The JSON value of a reply; raises ValueError if it is not JSON.

    NaN and lone surrogates are accepted: strict JSON forbids them, but Python servers write them. Bytes that are not
    UTF-8 are refused as damaged.

    >>> decode(b'{"logprob": -Infinity}')
    {'logprob': -inf}
    """
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _decode_leniently(body)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _decode_leniently(body: bytes) -> Any:
    try:
        return _mended(json.loads(body.decode("utf-8-sig")))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def checked(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the sampling arguments without those that are None. NaN and infinity are refused.

    >>> checked({"temperature": 0.7, "seed": None})
    {'temperature': 0.7}
    """
    args = {}
    for name, value in sampling.items():
        if value is None:
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestRefusedError(f"sampling argument {name!r} is {value}; it must be a finite number")
        args[name] = value
    if args.get("stream"):
        raise RequestRefusedError("sampling argument 'stream' is not supported (replies are read whole); leave it out")
    return args


def _foreign(value: Any) -> Any:
    """Convert SDK objects, numpy arrays and other mappings to JSON types."""
    if callable(dump := getattr(value, "model_dump", None)):
        return dump(exclude_none=True)
    if callable(to_list := getattr(value, "tolist", None)):
        return to_list()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is not JSON")


def _builtin(value: Any) -> Any:
    return msgspec.to_builtins(value, enc_hook=_foreign, str_keys=True)


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_mended(key): _mended(item) for key, item in value.items()}
    return [_mended(item) for item in value] if isinstance(value, (list, tuple)) else value


_encoder = msgspec.json.Encoder(enc_hook=_foreign)
_decoder = msgspec.json.Decoder()
