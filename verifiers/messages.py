"""Messages: joining them, extracting their text, showing them. Content parts are never rewritten."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

from verifiers.types import ChatMessage, Messages


def as_messages(value: Any, *, role: str = "user") -> list[ChatMessage]:
    """Convert a string, a message or a list of either into a list of messages.

    >>> as_messages("hi")
    [{'role': 'user', 'content': 'hi'}]
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict):
        return [value]
    if hasattr(value, "model_dump"):
        return [value.model_dump(exclude_none=True)]
    return [message for item in value for message in ((item,) if type(item) is dict else as_messages(item, role=role))]


def concat_messages(messages_list: Sequence[Messages | ChatMessage]) -> Messages:
    """Join messages in order; strings join to a string.

    >>> concat_messages(["2+2=", "4"])
    '2+2=4'
    """
    if messages_list and all(isinstance(messages, str) for messages in messages_list):
        return "".join(map(str, messages_list))
    return [message for messages in messages_list for message in as_messages(messages)]


_CONTAINERS = (dict, list, tuple, set)


def copied(value: Any) -> Any:
    """A deep copy of dicts, lists, tuples and sets; all other values are shared.

    >>> row = {"seen": {1}, "board": [["x"]]}
    >>> copied(row) == row, copied(row)["seen"] is row["seen"]
    (True, False)
    """
    kind = type(value)
    if kind is dict:
        return {key: copied(item) if type(item) in _CONTAINERS else item for key, item in value.items()}
    if kind is list:
        return [copied(item) if type(item) in _CONTAINERS else item for item in value]
    if kind is tuple:
        return tuple(map(copied, value))
    return set(value) if kind is set else value


def content_text(content: Any) -> str:
    """The text of a message's content: a string, or the text parts of a list.

    >>> content_text([{"type": "text", "text": "a cat"}, {"type": "image_url", "image_url": {"url": "…"}}])
    'a cat'
    """
    if isinstance(content, str):
        return content
    if isinstance(content, Iterable) and not isinstance(content, dict):
        return "".join(_part_text(part) for part in content)
    return ""


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) else getattr(part, "text", None)
    return text if isinstance(text, str) else ""


def has_audio(messages: Any) -> bool:
    """Whether any message contains audio. Endpoints then require the request to ask for text output."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(isinstance(p, dict) and p.get("type") == "input_audio" for p in content):
            return True
    return False


def role_of(message: Any) -> str | None:
    """The role of a message (a dict or an SDK object)."""
    role = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
    return role if isinstance(role, str) else None


def text_of(message: Any) -> str:
    """The text of one message (a dict or an SDK object)."""
    if isinstance(message, str):
        return message
    return content_text(message.get("content") if isinstance(message, dict) else getattr(message, "content", None))


def last_reply(completion: Any) -> str:
    """The text of the last assistant message; a string is returned as it is.

    >>> last_reply([{"role": "assistant", "content": "4"}, {"role": "user", "content": "Correct!"}])
    '4'
    """
    if isinstance(completion, str):
        return completion
    for message in reversed(completion or ()):
        if role_of(message) == "assistant":
            return text_of(message)
    return ""


def messages_to_printable(messages: Messages) -> Messages:
    """The same messages with each image or audio part replaced by a short placeholder."""
    if isinstance(messages, str):
        return messages
    return [{**message, "content": _printable_content(message.get("content"))} for message in messages]


def _printable_content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    lines = []
    for part in content:
        kind = part.get("type", "") if isinstance(part, dict) else ""
        lines.append("[image]" if kind.startswith("image") else "[audio]" if "audio" in kind else _part_text(part))
    return "\n".join(lines)


def strip_nones_from_content(messages: list[Any]) -> list[Any]:
    """Drop None-valued keys inside content parts (data sets add them when parts have different keys).

    Token ids, which may be the prompt of a completion, stay as they are."""
    return [
        {**message, "content": _without_nones(message)}
        if not isinstance(message, int) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _without_nones(message: ChatMessage) -> list[Any]:
    return [
        {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else part
        for part in message["content"]
    ]


def with_argument_objects(message: ChatMessage) -> ChatMessage:
    """The same message with the arguments of its tool calls as objects instead of JSON text, and content None as "".

    Chat templates expect this form: one with ``arguments | tojson`` would encode a text twice.
    Arguments that are not a JSON object stay text.

    >>> call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    >>> with_argument_objects({"role": "assistant", "content": None, "tool_calls": [call]})["tool_calls"][0]["function"]
    {'name': 'add', 'arguments': {'a': 1}}
    """
    calls = _decoded(message.get("tool_calls"))
    if not isinstance(calls, (list, tuple)) or not calls:
        return message
    content = message.get("content")
    return {**message, "content": "" if content is None else content, "tool_calls": [_with_object(c) for c in calls]}


def _with_object(call: Any) -> Any:
    call = call.model_dump(exclude_none=True) if hasattr(call, "model_dump") else _decoded(call)
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    given = function.get("arguments")
    read = _decoded(given)
    arguments = read if isinstance(read, dict) else {} if given is None else given
    return {**call, "function": {**function, "arguments": arguments}}


def called_functions(message: ChatMessage) -> list[dict[str, Any]]:
    """The functions that a message calls: their names, and their arguments as objects."""
    calls = with_argument_objects(message).get("tool_calls") or []
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    return [function for function in functions if isinstance(function, dict)]


def _decoded(value: Any) -> Any:
    """The value of a JSON text; anything else, and invalid JSON, is returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def tools_of(row: Any) -> list[dict[str, Any]] | None:
    """The tools that were offered to the model, according to a row, a record or a state; None if there were none.

    >>> tools_of({"info": '{"oai_tools": [{"type": "function"}]}'}), tools_of({"info": {}})
    ([{'type': 'function'}], None)
    """
    info = _decoded(row.get("info"))
    given = (row.get("oai_tools"), row.get("tools"), info.get("oai_tools") if isinstance(info, dict) else None)
    return next((list(tools) for tools in map(_decoded, given) if _is_tools(tools)), None)


def _is_tools(value: Any) -> bool:
    """Whether this is a list of tool schemas, not a user's column of the same name."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(tool, dict) for tool in value)


def template_settings(row: Any) -> dict[str, Any]:
    """The variables of the chat template (``chat_template_kwargs``) of a row, a record or a state.

    >>> template_settings({"sampling_args": {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}})
    {'enable_thinking': False}
    """
    sampling = row.get("sampling_args")
    asked = {**sampling, **(sampling.get("extra_body") or {})} if isinstance(sampling, dict) else {}
    given = _decoded(row.get("chat_template_kwargs")) or asked.get("chat_template_kwargs")
    return dict(given) if isinstance(given, dict) else {}


def sanitize_tool_calls(messages: Messages) -> Messages:
    """The same messages with tool calls as JSON strings, so that rows with different tools fit into one column."""
    import msgspec

    if isinstance(messages, str):
        return messages
    clean = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            dumped = [c.model_dump() if hasattr(c, "model_dump") else c for c in calls]
            message = {**message, "tool_calls": [msgspec.json.encode(c).decode() for c in dumped]}
        clean.append(message)
    return clean


LEAVES = frozenset((NoneType, bool, int, float))


def chars_in(value: Any, *, stop_after: int) -> int:
    """The size of a request: the characters of its texts plus one per other value or item. Stops above ``stop_after``.

    >>> chars_in(["2+2?", {"role": "user"}], stop_after=100), chars_in(["a" * 50, "b" * 50], stop_after=10)
    (16, 53)
    """
    waiting, found = [value], 0
    while waiting and found <= stop_after:
        one = waiting.pop()
        found += 1
        kind = type(one)
        if kind is str or isinstance(one, str):
            found += len(one) - 1
        elif kind in LEAVES:
            continue
        elif isinstance(one, (list, tuple)):
            found += len(one)
            waiting += one if found <= stop_after else ()
        elif isinstance(one, (dict, Mapping)):
            waiting += one.keys()
            waiting += one.values()
    return found
