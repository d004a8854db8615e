"""Parse the calls that a model writes between its tags: as JSON, as XML elements, or as a name and its arguments.

Arguments that are written as plain text have no types of their own, so the tool's schema decides what they are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Found = list[tuple[str, str]]
"""Names and arguments (as JSON) of calls."""

Tools = Mapping[str, Any]
"""The JSON schema of each tool's arguments, by the tool's name."""

_decoder = json.JSONDecoder(strict=False)  # models write line breaks inside strings
_AS_PYTHON = {"True": True, "False": False, "None": None}  # some templates write these constants so
_JSON_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",), int: ("integer", "number"), float: ("number",), dict: ("object",), list: ("array",),
    type(None): ("null",),
}  # fmt: skip
# The opening of an element, what ends its name, and what closes it: of calls, and of their arguments.
_CALLS = (("<function=", ">", "</function>"), ('<invoke name="', '">', "</invoke>"))
_ARGUMENTS = (("<parameter=", ">", "</parameter>"), ('<parameter name="', '">', "</parameter>"))
# What begins a call, separates its name from its arguments, and ends it (Kimi K2, DeepSeek).
_NAMED = (
    ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
)
_DSML = "｜DSML｜"  # DeepSeek's prefix of every element
_GEMMA, _QUOTE = "call:", '<|"|>'
_BARE_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:")
_BARE_NONE = re.compile(r"(?<=[\[,:])None(?=[\],}])")
_FENCE = "```"


def calls_between(text: str, tools: Tools | None) -> Found | None:
    """The calls in the text between two tags; None if it is anything else.

    >>> calls_between('{"name": "add", "arguments": {"a": 1}}', None)
    [('add', '{"a": 1}')]
    >>> calls_between("<function=add><parameter=a>1</parameter></function>", None)
    [('add', '{"a": 1}')]
    """
    text = text.replace(_DSML, "").strip()
    if text[:1] in ("{", "["):
        return _json_calls(text)
    for marks in _NAMED:
        if text.startswith(marks[0]):
            return _named_calls(text, marks)
    for call, argument in zip(_CALLS, _ARGUMENTS, strict=True):
        if text.startswith(call[0]):
            return _element_calls(text, call, argument, tools)
    return _gemma_calls(text) if text.startswith(_GEMMA) else _pair_call(text, tools)


# --- JSON -------------------------------------------------------------------------------------------------------------


def _json_calls(text: str) -> Found | None:
    """One or more JSON values: calls, or lists of them."""
    found: Found = []
    at = 0
    while at < len(text):
        value, at = value_at(text, at)
        calls = calls_of(value)
        if calls is None:
            return None
        found += calls
        at = skip(text, at)
    return found or None


def value_at(text: str, at: int) -> tuple[Any, int]:
    try:
        return _decoder.raw_decode(text, skip(text, at))
    except (ValueError, RecursionError):
        return None, at


def skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def calls_of(value: Any) -> Found | None:
    values = value if isinstance(value, list) else [value]
    calls = [call_of(item) for item in values]
    known = [call for call in calls if call is not None]
    return known if known and len(known) == len(calls) else None


def call_of(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict):
        return None
    name = value.get("name", value.get("tool_name"))  # Cohere's models write tool_name
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name.isprintable() or not name:
        return None
    if isinstance(arguments, str):  # some models write the arguments as a JSON string
        arguments, _ = value_at(arguments, 0)
    if not isinstance(arguments, dict):
        return None
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()
        name.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which can only be sent escaped
        return (name, json.dumps(arguments)) if name.isascii() else None
    except (ValueError, RecursionError):
        return None
    return name, written


# --- a name and its arguments as JSON ---------------------------------------------------------------------------------


def _named_calls(text: str, marks: Sequence[str]) -> Found | None:
    begin, separator, end = marks
    found: Found = []
    for part in text.split(begin)[1:]:
        name, is_there, written = part.strip().removesuffix(end).partition(separator)
        if name == "function":  # DeepSeek V3 and R1: the arguments are in a fenced block after the name
            name, _, written = written.partition("\n")
            written = written.strip().removeprefix(f"{_FENCE}json").removesuffix(_FENCE)
        name = name.strip().removeprefix("functions.")
        plain, colon, index = name.rpartition(":")  # Kimi numbers its calls
        arguments, at = value_at(written, 0)
        call = call_of({"name": plain if colon and index.isdecimal() else name, "arguments": arguments})
        if not is_there or call is None or skip(written, at) != len(written):
            return None
        found.append(call)
    return found


def _gemma_calls(text: str) -> Found | None:
    """``call:name{key:value}`` with keys without quotes, and texts within quotes of a special token (Gemma 4)."""
    name, brace, written = text.removeprefix(_GEMMA).partition("{")
    parts = (brace + written).split(_QUOTE)
    for i in range(0, len(parts), 2):  # outside of quotes
        parts[i] = _BARE_NONE.sub("null", _BARE_KEY.sub(r'\1"\2":', parts[i]))
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    arguments, end = value_at(joined := "".join(parts), 0)
    call = call_of({"name": name.strip(), "arguments": arguments})
    return [call] if call is not None and skip(joined, end) == len(joined) else None


# --- arguments as text ------------------------------------------------------------------------------------------------


def _element_calls(text: str, call: Sequence[str], argument: Sequence[str], tools: Tools | None) -> Found | None:
    """Any number of ``<function=name><parameter=key>value</parameter></function>`` (Qwen3-Coder, Qwen3.5, Nemotron 3)
    or ``<invoke name="name"><parameter name="key">value</parameter></invoke>`` (MiniMax M2, DeepSeek V3.2)."""
    found: Found = []
    for name, body in _elements(text, call):
        written = list(_elements(body, argument)) if body is not None else [("", None)]
        if any(value is None for _, value in written):
            return None
        pairs = [(key, value) for key, value in written if value is not None]
        if call is _CALLS[0]:  # a value may stand on lines of its own
            pairs = [(key, value[1:-1] if _is_framed(value) else value) for key, value in pairs]
        arguments = {_key(key): _argument(key, value, name, tools) for key, value in pairs}
        one = call_of({"name": name, "arguments": arguments})
        if one is None:
            return None
        found.append(one)
    return found


def _elements(text: str, marks: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """The names and texts of consecutive elements; the text is None where one is not closed."""
    opening, after_name, closing = marks
    parts = text.strip().split(opening)
    if parts[0]:
        yield "", None
    held: list[str] = []
    for i, part in enumerate(parts[1:], start=2):
        held.append(part)
        if not part.rstrip().endswith(closing) and i < len(parts):  # the next opening is part of this value
            continue
        name, is_named, value = opening.join(held).rstrip().partition(after_name)
        yield name, value.removesuffix(closing) if is_named and value.endswith(closing) else None
        held = []


def _is_framed(value: str) -> bool:
    return len(value) > 1 and value[0] == value[-1] == "\n"


def _key(name: str) -> str:
    """The name of an argument, without the attribute that says whether it is a string (DeepSeek)."""
    return name.partition('"')[0]


def _pair_call(text: str, tools: Tools | None) -> Found | None:
    """A name, then any number of ``<arg_key>key</arg_key><arg_value>value</arg_value>`` (GLM)."""
    name, *pairs = text.split("<arg_key>")
    name = name.strip()
    if not pairs and name not in (tools or ()):
        return None
    arguments = {}
    for pair in pairs:
        key, is_there, value = pair.rstrip().partition("</arg_key>")
        value = value.lstrip()
        if not is_there or not (value.startswith("<arg_value>") and value.endswith("</arg_value>")):
            return None
        arguments[key] = _argument(key, value.removeprefix("<arg_value>").removesuffix("</arg_value>"), name, tools)
    call = call_of({"name": name, "arguments": arguments})
    return None if call is None else [call]


def _argument(key: str, text: str, name: str, tools: Tools | None) -> Any:
    """The value of an argument that is written as text: JSON, unless the tool's schema takes it for a string."""
    key, has_said, said = key.partition('" string="')
    if has_said:
        types = ["string"] if said == "true" else []
    else:
        types = _types((tools or {}).get(name), key)
    if types == ["string"]:
        return text
    if text.strip() in _AS_PYTHON:
        value = _AS_PYTHON[text.strip()]
    else:
        value, at = value_at(text, 0)
        is_infinite = isinstance(value, float) and not math.isfinite(value)  # which JSON cannot say
        if at == 0 or skip(text, at) != len(text) or isinstance(value, str) or is_infinite:
            return text
    return text if "string" in types and not set(types) & set(_JSON_TYPES[type(value)]) else value


def _types(schema: Any, key: str) -> list[str]:
    """The JSON types that a tool's argument may have; empty if the schema does not say."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    wanted = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(wanted, Mapping):
        return []
    either = [one for name in ("anyOf", "oneOf") for one in wanted.get(name) or () if isinstance(one, Mapping)]
    written = [one.get("type") for one in (wanted, *either)]
    return [str(one) for some in written if some for one in (some if isinstance(some, list) else [some])]
