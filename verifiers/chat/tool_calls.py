"""Parse tool calls in a reply's text into OpenAI's format, and keep the text around them. Parsing never raises.

A call that is cut off or is not JSON remains text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from typing import Any, Literal, NamedTuple

Style = Literal["hermes", "llama3", "mistral"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
MISTRAL, MISTRAL_ARGS = "[TOOL_CALLS]", "[ARGS]"
LLAMA_TAG = "<|python_tag|>"
ID_CHARS = "0123456789abcdefghijklmnopqrstuvwxyz"
ID_LENGTH = 9  # required by Mistral's templates

ToolCall = dict[str, Any]
_decoder = json.JSONDecoder(strict=False)  # models write line breaks inside strings


class Reply(NamedTuple):
    """A parsed reply: its text (None if there are only calls) and its calls."""

    content: str | None
    calls: list[ToolCall]


def style_of(template: str) -> Style:
    """How a model writes tool calls, detected from its chat template. The default is Hermes' format.

    >>> style_of("… {{ '<tool_call>' }} …"), style_of("… [TOOL_CALLS] …"), style_of("… Environment: ipython …")
    ('hermes', 'mistral', 'llama3')
    """
    if MISTRAL in template:
        return "mistral"
    if OPEN in template:
        return "hermes"
    if LLAMA_TAG in template or "ipython" in template or '"parameters": dictionary' in template:
        return "llama3"
    return "hermes"


def parse(text: str, style: Style, *, names: Collection[str] | None = None, salt: str = "") -> Reply:
    """Parse a reply. ``names`` are the existing tools: a bare JSON object is a call only if it names one of them.

    Call ids are hashes of the text and ``salt``, so the same reply has the same ids.

    >>> reply = parse('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "hermes")
    >>> reply.content, reply.calls[0]["function"]
    ('Let me see.', {'name': 'add', 'arguments': '{"a": 1}'})
    >>> parse('<tool_call>{"name": "add", "arg', "hermes")
    Reply(content='<tool_call>{"name": "add", "arg', calls=[])
    """
    reader = {"hermes": _hermes, "llama3": _llama3, "mistral": _mistral}[style]
    content, found = reader(text, names)
    if not found:
        return Reply(text, [])
    seal = f"{salt}\0{text}"
    calls = [
        {"id": call_id(seal, i), "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(found)
    ]
    return Reply(content.rstrip() or None, calls)


def call_id(seal: str, index: int) -> str:
    """An id of nine letters and digits for the call at ``index`` of a reply."""
    digest = hashlib.blake2b(f"{index}\0{seal}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    number = int.from_bytes(digest, "big")
    chars = []
    for _ in range(ID_LENGTH):
        number, char = divmod(number, len(ID_CHARS))
        chars.append(ID_CHARS[char])
    return "".join(chars)


# --- the three formats --------------------------------------------------------------------------------------------

Found = list[tuple[str, str]]


def _hermes(text: str, names: Collection[str] | None) -> tuple[str, Found]:
    """Any number of ``<tool_call>{"name": …, "arguments": …}</tool_call>`` within text. A tag may contain a list."""
    outside: list[str] = []
    found: Found = []
    at = 0
    for start, end in _blocks(text):
        calls = _calls_in(text[start + len(OPEN) : end])
        if calls is not None:
            outside.append(text[at:start])
            found += calls
            at = end + len(CLOSE)
    outside.append(text[at:])
    return "".join(outside), found


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    at = 0
    while (end := text.find(CLOSE, at)) >= 0:
        start = text.rfind(OPEN, at, end)
        if start >= 0:
            yield start, end
        at = end + len(CLOSE)


def _llama3(text: str, names: Collection[str] | None) -> tuple[str, Found]:
    """The whole reply is ``{"name": …, "parameters": …}``, or several of these separated by ``;``."""
    body = text.strip().removeprefix(LLAMA_TAG)
    found: Found = []
    at = 0
    while True:
        value, at = _value_at(body, at)
        calls = None if isinstance(value, list) else _calls_of(value)
        if calls is None or (names is not None and calls[0][0] not in names):
            return text, []
        found += calls
        at = _skip(body, at)
        if at == len(body):
            return "", found
        if body[at] != ";":
            return text, []
        at += 1


def _mistral(text: str, names: Collection[str] | None) -> tuple[str, Found]:
    """``[TOOL_CALLS][{"name": …, "arguments": …}]``, or ``[TOOL_CALLS]name[ARGS]{…}`` any number of times."""
    before, marker, body = text.partition(MISTRAL)
    if not marker:
        return text, []
    if body.lstrip()[:1] in ("[", "{"):
        calls = _calls_in(body)
        return (before, calls) if calls else (text, [])
    found: Found = []
    for part in body.split(MISTRAL):
        brace = part.find("{")
        if brace < 0:
            return text, []
        name = part[:brace].strip().removesuffix(MISTRAL_ARGS).strip()
        arguments, end = _value_at(part, brace)
        call = _call_of({"name": name, "arguments": arguments})
        if call is None or arguments is None or _skip(part, end) != len(part):
            return text, []
        found.append(call)
    return before, found


# --- JSON ---------------------------------------------------------------------------------------------------------


def _calls_in(text: str) -> Found | None:
    """The calls in a text that consists of one JSON value; None if it does not."""
    value, at = _value_at(text, 0)
    return _calls_of(value) if _skip(text, at) == len(text) else None


def _value_at(text: str, at: int) -> tuple[Any, int]:
    try:
        return _decoder.raw_decode(text, _skip(text, at))
    except (ValueError, RecursionError):
        return None, at


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _calls_of(value: Any) -> Found | None:
    values = value if isinstance(value, list) else [value]
    calls = [_call_of(item) for item in values]
    known = [call for call in calls if call is not None]
    return known if known and len(known) == len(calls) else None


def _call_of(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name.isprintable() or not name:
        return None
    if isinstance(arguments, str):  # some models write the arguments as a JSON string
        arguments, _ = _value_at(arguments, 0)
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


def shown_length(text: str, style: Style) -> int:
    """How many characters of an unfinished reply are certainly text. What may be a call, or the beginning of one, is
    held back with the space before it."""
    if style != "hermes":
        return 0  # the whole reply is either a call or not
    end = text.find(OPEN)
    if end < 0:
        partial = (n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if text.endswith(OPEN[:n]))
        end = len(text) - next(partial, 0)
    return len(text[:end].rstrip())


def opens_call(text: str, style: Style) -> bool:
    """Whether a call may begin with or within this token."""
    return style == "hermes" and bool(text) and (text in OPEN or OPEN in text)
