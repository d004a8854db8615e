"""Any Python value → plain JSON data; a value that cannot be converted becomes text and never fails the rollout."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

MAX_DEPTH = 100  # deeper values are stored as text, so that readers do not exceed their recursion limit
_SCALARS = (str, int, float, bool, type(None))


def plain(value: Any) -> Any:
    """A copy of a value that contains builtins only: SDK objects, arrays, dates and sets are converted.

    >>> plain({"seen": {1}, 3: b"hi", "where": {"x": complex(0, 1)}})
    {'seen': [1], '3': 'aGk=', 'where': {'x': '1j'}}
    """
    try:
        return msgspec.to_builtins(value, enc_hook=as_builtin, str_keys=True)
    except Exception:  # this calls foreign code (model_dump, __repr__), which may raise anything
        return sanitise(value)


def to_json(value: Any) -> bytes:
    """The JSON of any value, on one line: encoded directly if possible, otherwise value by value."""
    line = _to_json_directly(value)
    return _direct.encode(sanitise(value)) if line is None else line


def _to_json_directly(value: Any) -> bytes | None:
    try:
        line = _direct.encode(value)
        return None if b"\n" in line or _is_deep(line) else line
    except Exception:  # foreign code again; the caller falls back to `sanitise`
        return None


def as_builtin(value: Any) -> Any:
    """Convert one object that JSON does not support (an SDK object, an array, a path, an error) one step."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, deque):
        return list(value)
    # Compare types exactly: a mock returns another mock from every method, without end.
    if hasattr(value, "model_dump") and type(dumped := value.model_dump(exclude_none=True)) is dict:
        return dumped
    if hasattr(value, "tolist") and type(listed := value.tolist()) in (list, int, float, bool, str):
        return listed
    return str(value) if hasattr(value, "__fspath__") else describe_object(value)


def describe_object(value: Any) -> str:
    """The repr of an object, or the name of its type if repr raises."""
    try:
        return repr(value)
    except Exception:  # foreign __repr__
        return f"<{type(value).__name__} without a repr>"


def sanitise(value: Any, _above: tuple[int, ...] = ()) -> Any:
    """Convert value by value (slow): surrogates, keys that are not strings, cycles and deep nesting become text."""
    kind = type(value)
    if kind is str:
        return sanitise_text(value)
    if kind is int:
        return value if value.bit_length() < 10_000 else hex(value)  # Python's int() refuses more than 4,300 digits
    if kind in _SCALARS:
        return value
    if id(value) in _above:
        return "<circular>"
    if len(_above) >= MAX_DEPTH:
        return sanitise_text(describe_object(value))
    try:
        return _sanitise_inside(value, (*_above, id(value)))
    except Exception:  # foreign iterators and properties, or the recursion limit
        return sanitise_text(describe_object(value))


def sanitise_text(text: str) -> str:
    r"""Text that UTF-8 can encode: split surrogate pairs are joined, lone surrogates are escaped.

    >>> sanitise_text("\ud83d\ude00 \udc80")
    '😀 \\udc80'
    """
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return joined.encode("utf-8", "backslashreplace").decode()


def _sanitise_inside(value: Any, above: tuple[int, ...]) -> Any:
    if isinstance(value, dict):
        return {_key(key): sanitise(item, above) for key, item in list(value.items())}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [sanitise(item, above) for item in list(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        return sanitise(fields, above)
    try:
        nearer = msgspec.to_builtins(value, str_keys=True)  # dates, bytes, enums, decimals
    except (TypeError, RecursionError):
        nearer = as_builtin(value)
    return sanitise(nearer, above)


def _key(key: Any) -> str:
    return sanitise_text(key if type(key) is str else describe_object(key))


def _is_deep(line: bytes) -> bool:
    # A cheap test first: split stops after MAX_DEPTH brackets, while count reads the whole line.
    if len(line.split(b"[", MAX_DEPTH)) + len(line.split(b"{", MAX_DEPTH)) - 2 <= MAX_DEPTH:
        return False
    return not _fits(msgspec.json.decode(line), MAX_DEPTH)


def _fits(value: Any, levels: int) -> bool:
    if type(value) is dict:
        return levels > 0 and all(_fits(item, levels - 1) for item in value.values())
    if type(value) is list:
        return levels > 0 and all(_fits(item, levels - 1) for item in value)
    return True


_direct = msgspec.json.Encoder(enc_hook=as_builtin)
