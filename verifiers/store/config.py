"""The configuration of a run → its fingerprint, and a description of its differences from another one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from verifiers.store.plain import to_json

ROWS = "rows"  # the key of a digest of the data set's rows
_SECRET = re.compile(
    r"(api[_-]?key|secret|password|authorization|cookie|credentials?|^token|(access|api|auth|bearer|hf|session)[_-]?token)$",
    re.IGNORECASE,
)
_ADDRESS = re.compile(rb" at 0x[0-9a-fA-F]+")  # in the repr of a function; it differs between processes


def normalise(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as it is stored: plain JSON data, without secrets.

    >>> normalise({"seeds": (1, 2), "env_args": {"judge_api_key": "sk-1"}})
    {'seeds': [1, 2], 'env_args': {'judge_api_key': '***'}}
    """
    stored: dict[str, Any] = msgspec.json.decode(_ADDRESS.sub(b"", to_json(stable(dict(config)))))
    shown: dict[str, Any] = without_secrets(stored)
    return shown


def fingerprint(config: Mapping[str, Any]) -> str:
    """16 hex digits that are equal for equal configurations; None counts as absent.

    >>> fingerprint({"t": 1.0, "seed": None}) == fingerprint({"t": 1})
    True
    """
    flat = sorted((key, repr(_number(value))) for key, value in _flat(normalise(config)))
    return hashlib.blake2b(to_json(flat), digest_size=8).hexdigest()


def stable(value: Any) -> Any:
    """A value whose JSON is the same in every process: sets are sorted, and reprs of objects have no addresses.

    >>> stable({"tags": {"b", "a"}, "n": (1, 2)})
    {'tags': ['a', 'b'], 'n': [1, 2]}
    """
    try:
        return _stable(value)
    except RecursionError:  # it contains itself
        return value


def _stable(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {key: _stable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_stable(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(_stable, value), key=to_json)
    return msgspec.json.decode(_ADDRESS.sub(b"", to_json(value)))


def differences(made_with: Mapping[str, Any], asked_for: Mapping[str, Any]) -> list[str]:
    """One sentence for each key that differs, with both values.

    >>> differences({"sampling_args": {"temperature": 0.7}}, {"sampling_args": {"temperature": 1.0}})
    ['this run was made with sampling_args.temperature=0.7, you ask for 1.0']
    """
    made, asked = dict(_flat(normalise(made_with))), dict(_flat(normalise(asked_for)))
    differing = [key for key in {**made, **asked} if made.get(key) != asked.get(key)]
    return [
        "this run was made with other rows: prompts, answers or info were changed, or the order of the rows"
        if key == ROWS and key in made and key in asked
        else f"this run was made with {key}={_short(made.get(key))}, you ask for {_short(asked.get(key))}"
        for key in differing
    ]


def is_same_environment(a: Any, b: Any) -> bool:
    """Whether two ids name the same environment. Runs of earlier versions store the id as the user typed it.

    >>> is_same_environment("my_env", "my-env")
    True
    """
    return str(a).replace("_", "-") == str(b).replace("_", "-")


def without_secrets(value: Any, key: str = "") -> Any:
    """Plain data in which texts under keys that name secrets, and all environment variables, are masked.

    >>> without_secrets({"extra_headers": {"X-Api-Key": "sk-1", "X-Title": "mine"}, "max_tokens": 8})
    {'extra_headers': {'X-Api-Key': '***', 'X-Title': 'mine'}, 'max_tokens': 8}
    """
    if isinstance(value, dict):
        return {inner: without_secrets(item, "secret" if key == "env" else str(inner)) for inner, item in value.items()}
    if isinstance(value, list):
        return [without_secrets(item, key) for item in value]
    return "***" if isinstance(value, str) and _SECRET.search(key) else value


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _flat(item, f"{prefix}{key}.")
        elif item is not None:
            yield prefix + key, item


def _number(value: Any) -> Any:
    """Whole floats as ints: 1.0 == 1, so both must have the same fingerprint."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    if isinstance(value, dict):
        return {key: _number(item) for key, item in sorted(value.items())}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
