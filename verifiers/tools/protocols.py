"""A reply → its tool calls, in both formats: listed by the endpoint, or in ``<tool>`` tags.

Only `read_arguments` raises: a malformed call carries its problem, which is shown to the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from verifiers.errors import Error
from verifiers.tools.faults import BadJSONError, NoCallError
from verifiers.tools.schemas import Schema
from verifiers.types import ChatMessage, Messages

TAG = "tool"
NAMELESS = "unnamed"
EXAMPLE = '<tool>{"name": "<tool name>", "arguments": {"<argument>": <value>}}</tool>'
MAX_OPENINGS = 10_000  # opening tags per reply that are examined
MAX_DEPTH = 1_000  # of brackets in one call; Python's JSON parser does not read much deeper
_SPACES = " \t\r\n"
_MARK = re.compile(r'[][{}"<\\]')
_STRING_MARK = re.compile(r'["\\]')


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call as the model wrote it; ``problem`` says why it cannot be executed."""

    id: str
    name: str
    arguments: Any
    problem: Error | None = None


def read_arguments(arguments: Any) -> dict[str, Any]:
    """The arguments of a call as a dict, from a dict or from JSON; missing arguments are an empty dict.

    >>> read_arguments('{"a": 1}'), read_arguments(""), read_arguments(None)
    ({'a': 1}, {}, {})
    """
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        raise BadJSONError(f"the arguments must be a JSON object, not {_shown(arguments)}")
    try:
        value = json.loads(arguments, strict=False)
        if isinstance(value, str):  # some models write JSON within JSON
            value = json.loads(value, strict=False)
    except (ValueError, RecursionError) as error:
        raise BadJSONError(f"the arguments are not valid JSON ({_reason(error)}): {_shown(arguments)}") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadJSONError(f"the arguments must be a JSON object, not {_shown(value)}")
    return value


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


# --- calls that the endpoint lists --------------------------------------------------------------------------------


def native_calls(message: Any) -> list[Call]:
    """The calls that an assistant message lists, in any shape.

    >>> native_calls({"tool_calls": [{"id": "7", "function": {"name": "add", "arguments": '{"a": 1}'}}]})[0].name
    'add'
    """
    listed = _field(message, "tool_calls")
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        return []
    return [_native_call(call, index) for index, call in enumerate(listed)]


def _native_call(call: Any, index: int) -> Call:
    if isinstance(call, str):  # stored data sets have calls as JSON text
        try:
            call = json.loads(call)
        except (ValueError, RecursionError):
            call = None
    given_id = _field(call, "id")
    call_id = given_id if isinstance(given_id, str) and given_id else f"call_{index}"
    function = _field(call, "function")
    name, arguments = _field(function, "name"), _field(function, "arguments")
    if not isinstance(name, str) or not name:
        problem = BadJSONError("the call has no function name")
        return Call(id=call_id, name="", arguments=arguments, problem=problem)
    return Call(id=call_id, name=name, arguments=arguments)


def as_sent(messages: Messages) -> Messages:
    """Messages in the form that strict endpoints accept: malformed calls are made valid, in a copy.

    >>> cut = {"id": "7", "function": {"name": "add", "arguments": '{"a'}}
    >>> as_sent([{"role": "assistant", "tool_calls": [cut]}])[0]["tool_calls"][0]["function"]
    {'name': 'add', 'arguments': '{"arguments": "{\\\\"a"}'}
    """
    if isinstance(messages, str):
        return messages
    return [_message_as_sent(message) for message in messages]


def _message_as_sent(message: ChatMessage) -> ChatMessage:
    listed = _field(message, "tool_calls")
    if not listed or not isinstance(message, dict):
        return message
    calls = [
        given if _is_strict(given) else _call_as_sent(call)
        for given, call in zip(listed, native_calls(message), strict=False)
    ]
    return {**message, "tool_calls": calls}


def _is_strict(call: Any) -> bool:
    function = _field(call, "function")
    name, arguments = _field(function, "name"), _field(function, "arguments")
    if not _field(call, "id") or not isinstance(name, str) or not name or not isinstance(arguments, str):
        return False
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    return True


def _call_as_sent(call: Call) -> dict[str, Any]:
    try:
        arguments = json.dumps(read_arguments(call.arguments), allow_nan=False)
    except (BadJSONError, TypeError, ValueError):  # kept as text, so that the model sees what it wrote
        arguments = json.dumps({"arguments": str(call.arguments)})
    return {"id": call.id, "type": "function", "function": {"name": call.name or NAMELESS, "arguments": arguments}}


def _field(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


# --- in tags ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TaggedReply:
    """A parsed reply: its calls, and the text outside of them."""

    calls: list[Call]
    outside: str


def tagged_calls(text: str, tag: str = TAG) -> TaggedReply:
    """All calls between tags; a call that is incomplete or not JSON carries its problem.

    A tag inside a JSON string is part of that string, and text inside a call is not part of the answer.

    >>> reply = tagged_calls('Sum: <tool>{"name": "add", "args": {"a": 1}}</tool>')
    >>> reply.calls[0].name, reply.calls[0].arguments, reply.outside
    ('add', {'a': 1}, 'Sum: ')
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    calls: list[Call] = []
    outside: list[str] = []
    at = n_openings = 0
    start = text.find(opening)
    while start >= 0 and n_openings < MAX_OPENINGS:
        n_openings += 1
        body = start + len(opening)
        following = text.find(opening, body)
        value, end = _json_block(text, body, closing)
        if end < 0:
            limit = len(text) if following < 0 else following
            close = text.find(closing, body, limit)
            if close < 0 and following >= 0:  # the text only mentions the tag, or starts over: the next tag counts
                start = following
                continue
            outside.append(text[at:start])
            calls.append(_broken(text[body : close if close >= 0 else limit], closing, len(calls), is_cut=close < 0))
            at = close + len(closing) if close >= 0 else limit
        else:
            outside.append(text[at:start])
            calls += _calls_of(value, len(calls))
            at = end
        start = following if following >= at or following < 0 else text.find(opening, at)
    outside.append(text[at:])
    return TaggedReply(calls=calls, outside="".join(outside))


def _json_block(text: str, at: int, closing: str) -> tuple[Any, int]:
    """The JSON value that fills a tag, and the position after the tag; -1 if it is not JSON."""
    at = _skip(text, at)
    end = _json_end(text, at) if text[at : at + 1] in ("{", "[") else -1
    after = _skip(text, end)
    if end < 0 or not text.startswith(closing, after):
        return None, -1
    try:
        return json.loads(text[at:end], strict=False), after + len(closing)
    except (ValueError, RecursionError):
        return None, -1


def _json_end(text: str, at: int) -> int:
    """The position after the bracket that closes the one at ``at``; -1 if there is none.

    A ``<`` outside of strings ends the search, because it cannot be JSON; so a reply of nothing but tags takes linear
    time.
    """
    depth = 0
    while found := _MARK.search(text, at):
        mark, at = found[0], found.end()
        if mark in "<\\":
            return -1
        if mark == '"':
            at = _string_end(text, at)
            if at < 0:
                return -1
        else:
            depth += 1 if mark in "{[" else -1
            if depth == 0:
                return at
            if depth > MAX_DEPTH:
                return -1
    return -1


def _string_end(text: str, at: int) -> int:
    while found := _STRING_MARK.search(text, at):
        if found[0] == '"':
            return found.end()
        at = found.end() + 1  # skip the escaped character
    return -1


def _skip(text: str, at: int) -> int:
    while 0 <= at < len(text) and text[at] in _SPACES:
        at += 1
    return at


def _calls_of(value: Any, index: int) -> list[Call]:
    values = value if isinstance(value, list) else [value]
    if not values:
        return [Call(id=f"call_{index}", name="", arguments={}, problem=BadJSONError("the list of calls is empty"))]
    return [_tagged_call(item, index + i) for i, item in enumerate(values)]


def _tagged_call(value: Any, index: int) -> Call:
    call_id = f"call_{index}"
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        problem = BadJSONError(f'a call must be a JSON object with "name" and "arguments", not {_shown(value)}')
        return Call(id=call_id, name="", arguments={}, problem=problem)
    for key in ("arguments", "args", "parameters"):
        if key in value:
            return Call(id=call_id, name=name, arguments=value[key])
    return Call(id=call_id, name=name, arguments={})


def _broken(body: str, closing: str, index: int, *, is_cut: bool) -> Call:
    problem: Error
    if is_cut:
        problem = NoCallError(f"the call is incomplete: {closing} is missing. Write {EXAMPLE}")
    else:
        try:
            json.loads(body, strict=False)
            reason = "it is not an object"
        except (ValueError, RecursionError) as error:
            reason = _reason(error)
        problem = BadJSONError(f"the call is not valid JSON ({reason}): {_shown(body.strip())}. Write {EXAMPLE}")
    return Call(id=f"call_{index}", name="", arguments={}, problem=problem)


# --- describing tools to the model --------------------------------------------------------------------------------


def describe_tools(schemas: Sequence[Schema]) -> str:
    """The tools as text, for a system prompt.

    >>> print(describe_tools([{"type": "function", "function": {"name": "now", "description": "The time."}}]))
    now: The time.
    """
    return "\n\n".join(_described(schema["function"]) for schema in schemas)


def _described(function: Mapping[str, Any]) -> str:
    lines = [f"{function['name']}: {function.get('description', '')}".rstrip(": ")]
    parameters = function.get("parameters") or {}
    properties, required = parameters.get("properties") or {}, parameters.get("required") or ()
    if properties:
        lines.append("Arguments:")
    for name, schema in properties.items():
        kind = {key: value for key, value in schema.items() if key not in ("description", "title")}
        optional = "" if name in required else ", optional"
        text = f": {schema['description']}" if schema.get("description") else ""
        lines.append(f"- {name} ({json.dumps(kind, ensure_ascii=False)}{optional}){text}")
    return "\n".join(lines)
