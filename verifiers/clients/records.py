"""Requests and completions ↔ JSON: a canonical key for each request, and a lossless record of each completion."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import msgspec

from verifiers.clients.protocol import Completion, Request, Tokens
from verifiers.types import Usage, VersionSpan

# These change how a request is sent, not its content, and they may contain API keys.
UNRECORDED = frozenset(("extra_headers", "headers", "api_key", "timeout"))


def request_record(request: Request) -> dict[str, Any]:
    """The content of a request as plain JSON values, without headers and API keys.

    >>> request_record(Request(model="m", prompt="2+2=", sampling={"temperature": 0.0, "stop": None}))["sampling"]
    {'temperature': 0}
    """
    sampling = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in request.sampling.items()
        if value is not None and name not in UNRECORDED
    }
    record: dict[str, Any] = plain(
        {
            "model": request.model,
            "message_type": request.message_type,
            "prompt": request.prompt,
            "tools": request.tools or None,
            "sampling": sampling,
        }
    )
    return record


def record_key(record: dict[str, Any], *, salt: str = "") -> str:
    """A hash of a request record that does not depend on the order of its fields.

    >>> record_key({"a": 1, "b": 2}) == record_key({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(salt.encode() + b"\n" + write_json(record)).hexdigest()


def completion_record(completion: Completion) -> dict[str, Any]:
    """A completion as plain JSON values; `read_completion` reverses this."""
    tokens, usage = completion.tokens, completion.usage
    record: dict[str, Any] = {
        "message": completion.message,
        "finish_reason": completion.finish_reason,
        "model": completion.model,
        "raw": _raw(completion.raw),
    }
    if tokens is not None:
        record["tokens"] = {
            "prompt_ids": tokens.prompt_ids,
            "completion_ids": tokens.completion_ids,
            "logprobs": [x if math.isfinite(x) else repr(x) for x in tokens.logprobs],
            **({} if tokens.sampling is None else {"sampling": tokens.sampling}),
            **({"weight_versions": list(map(list, tokens.weight_versions))} if tokens.weight_versions else {}),
        }
    if usage is not None:
        record["usage"] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cost_usd": usage.cost_usd,
        }
    plain_record: dict[str, Any] = plain(record)
    return plain_record


def read_completion(record: dict[str, Any]) -> Completion:
    """The recorded completion. Raises ``ValueError`` if the record has a different shape."""
    try:
        tokens, usage = record.get("tokens"), record.get("usage")
        return Completion(
            message=dict(record["message"]),
            finish_reason=record["finish_reason"],
            model=record["model"],
            raw=record["raw"],
            tokens=None if tokens is None else _read_tokens(tokens),
            usage=None if usage is None else Usage(**usage),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a recorded completion: {error!r}") from error


def _read_tokens(tokens: dict[str, Any]) -> Tokens:
    return Tokens(
        prompt_ids=list(tokens["prompt_ids"]),
        completion_ids=list(tokens["completion_ids"]),
        logprobs=[float(x) for x in tokens["logprobs"]],
        sampling=tokens.get("sampling"),
        weight_versions=tuple(VersionSpan(*span) for span in tokens.get("weight_versions") or ()),
    )


def _raw(raw: Any) -> Any:
    """The endpoint's raw reply as JSON values; None if it is not a JSON object."""
    dump = getattr(raw, "model_dump", None)
    dumped = dump() if callable(dump) else raw
    try:
        return plain(dumped) if isinstance(dumped, dict) else None
    except TypeError:
        return None


def write_json(value: Any) -> bytes:
    """One line of JSON with sorted keys. A lone surrogate, which models do produce, is kept as an escape.

    >>> read_json(write_json({"content": "\\ud83d"}))
    {'content': '\\ud83d'}
    """
    try:
        return msgspec.json.encode(value, order="sorted", enc_hook=_plain)
    except UnicodeEncodeError:
        return json.dumps(value, sort_keys=True, default=_plain).encode()


def read_json(line: bytes) -> Any:
    """The value of a line of JSON; raises ValueError if it is not JSON."""
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(line)


def plain(value: Any) -> Any:
    """Convert to JSON values: SDK objects become dicts, arrays become lists; anything else raises TypeError.

    >>> plain({"content": ("a", 1.5)})
    {'content': ['a', 1.5]}
    """
    return read_json(write_json(value))


def _plain(value: Any) -> Any:
    for name in ("model_dump", "tolist", "to_dict"):
        convert = getattr(value, name, None)
        if callable(convert):
            return convert()
    raise TypeError(f"a {type(value).__name__} in a request or reply cannot be written as JSON: {value!r:.80}")
