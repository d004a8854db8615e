"""Parse tool calls in a reply's text into OpenAI's format, and keep the text around them. Parsing never raises.

A call that is cut off or malformed remains text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from verifiers.chat.call_syntax import Found, Tools, call_of, calls_between, calls_of, skip, value_at

Style = Literal[
    "hermes", "llama3", "mistral", "minimax", "seed", "deepseek", "deepseek-v3.2", "deepseek-v4", "kimi", "cohere",
    "nemotron", "calls", "gemma4", "harmony",
]  # fmt: skip
OPEN, CLOSE = "<tool_call>", "</tool_call>"
# What opens and closes one or more calls within text.
TAGS: dict[Style, tuple[str, str]] = {
    "minimax": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "seed": ("<seed:tool_call>", "</seed:tool_call>"),
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek-v3.2": ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    "deepseek-v4": ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    "kimi": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "cohere": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
    "calls": ("<tool_calls>", "</tool_calls>"),
    "gemma4": ("<|tool_call>", "<tool_call|>"),
    "hermes": (OPEN, CLOSE),
}
HARMONY, HARMONY_MESSAGE = "to=functions", "<|message|>"
_HARMONY_START, _HARMONY_ENDS = "<|start|>", ("<|call|>", "<|end|>")
MISTRAL, MISTRAL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
LLAMA_TAG = "<|python_tag|>"
ID_CHARS = "0123456789abcdefghijklmnopqrstuvwxyz"
ID_LENGTH = 9  # required by Mistral's templates

ToolCall = dict[str, Any]


class Reply(NamedTuple):
    """A parsed reply: its text (None if there are only calls) and its calls."""

    content: str | None
    calls: list[ToolCall]


def style_of(template: str) -> Style:
    """How a model writes tool calls, detected from its chat template. The default is Hermes' tags.

    >>> style_of("… {{ '<tool_call>' }} …"), style_of("… [TOOL_CALLS] …"), style_of("… Environment: ipython …")
    ('hermes', 'mistral', 'llama3')
    """
    if MISTRAL in template:
        return "mistral"
    if HARMONY in template:
        return "harmony"
    tagged = next((style for style, (opening, _) in TAGS.items() if opening in template), None)
    if tagged is not None:
        return tagged
    if LLAMA_TAG in template or "ipython" in template or '"parameters": dictionary' in template:
        return "llama3"
    return "hermes"


def parse(text: str, style: Style, *, tools: Tools | None = None, salt: str = "") -> Reply:
    """Parse a reply. ``tools`` are the schemas of the existing tools' arguments, by name: a bare JSON object is a call
    only if it names one of them, and arguments that are written as text have the types of the schema.

    Call ids are hashes of the text and ``salt``, so the same reply has the same ids.

    >>> reply = parse('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "hermes")
    >>> reply.content, reply.calls[0]["function"]
    ('Let me see.', {'name': 'add', 'arguments': '{"a": 1}'})
    >>> parse('<tool_call>{"name": "add", "arg', "hermes")
    Reply(content='<tool_call>{"name": "add", "arg', calls=[])
    """
    if style in TAGS:
        content, found = _tagged(text, tools, *TAGS[style])
    else:
        content, found = {"llama3": _llama3, "mistral": _mistral, "harmony": _harmony}[style](text, tools)
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


# --- where calls are in a reply ---------------------------------------------------------------------------------------


def _tagged(text: str, tools: Tools | None, opening: str, closing: str) -> tuple[str, Found]:
    """Any number of calls between tags, within text. A pair of tags may contain several calls."""
    outside: list[str] = []
    found: Found = []
    at = 0
    for start, end in _blocks(text, opening, closing):
        calls = calls_between(text[start + len(opening) : end], tools)
        if calls is not None:
            outside.append(text[at:start])
            found += calls
            at = end + len(closing)
    outside.append(text[at:])
    return "".join(outside), found


def _blocks(text: str, opening: str, closing: str) -> Iterator[tuple[int, int]]:
    at = 0
    while (end := text.find(closing, at)) >= 0:
        start = text.rfind(opening, at, end)
        if start >= 0:
            yield start, end
        at = end + len(closing)


def _llama3(text: str, tools: Tools | None) -> tuple[str, Found]:
    """The whole reply is ``{"name": …, "parameters": …}``, or several of these separated by ``;``."""
    body = text.strip().removeprefix(LLAMA_TAG)
    found: Found = []
    at = 0
    while True:
        value, at = value_at(body, at)
        calls = None if isinstance(value, list) else calls_of(value)
        if calls is None or (tools is not None and calls[0][0] not in tools):
            return text, []
        found += calls
        at = skip(body, at)
        if at == len(body):
            return "", found
        if body[at] != ";":
            return text, []
        at += 1


def _mistral(text: str, tools: Tools | None) -> tuple[str, Found]:
    """``[TOOL_CALLS][{"name": …, "arguments": …}]``, or ``[TOOL_CALLS]name[ARGS]{…}`` any number of times.

    Mistral Small 3.2 writes ``[CALL_ID]`` and an id after the name.
    """
    before, marker, body = text.partition(MISTRAL)
    if not marker:
        return text, []
    if body.lstrip()[:1] in ("[", "{"):
        calls = calls_between(body, tools)
        return (before, calls) if calls else (text, [])
    found: Found = []
    for part in _parts(body, MISTRAL):
        brace = part.find("{")
        if brace < 0:
            return text, []
        name = part[:brace].strip().removesuffix(MISTRAL_ARGS).partition(MISTRAL_ID)[0].strip()
        arguments, end = value_at(part, brace)
        call = call_of({"name": name, "arguments": arguments})
        if call is None or arguments is None or skip(part, end) != len(part):
            return text, []
        found.append(call)
    return before, found


def _parts(text: str, mark: str) -> Iterator[str]:
    """Like `str.split`, one part at a time: a reply is text as soon as one part is not a call."""
    at = 0
    while (end := text.find(mark, at)) >= 0:
        yield text[at:end]
        at = end + len(mark)
    yield text[at:]


def _harmony(text: str, tools: Tools | None) -> tuple[str, Found]:
    """Messages to ``functions.name`` with JSON arguments, among messages of other channels (gpt-oss).

    A message to ``functions`` itself is a whole call as JSON, as a forced call is.
    """
    outside: list[str] = []
    found: Found = []
    for message in text.split(_HARMONY_START):
        header, _, body = message.partition(HARMONY_MESSAGE)
        words = header.partition(HARMONY)[2].replace("<", " ").split(maxsplit=1)
        name = words[0].removeprefix(".") if words and header.partition(HARMONY)[2][:1] == "." else ""
        for end in _HARMONY_ENDS:
            body = body.removesuffix(end)
        value, end_at = value_at(body, 0)
        call = call_of({"name": name, "arguments": value} if name else value)
        if HARMONY in header and call is not None and value is not None and skip(body, end_at) == len(body):
            found.append(call)
        else:
            outside.append(message)
    return _HARMONY_START.join(outside), found


def shown_length(text: str, style: Style) -> int:
    """How many characters of an unfinished reply are certainly text. What may be a call, or the beginning of one, is
    held back with the space before it."""
    if style not in TAGS:
        return 0  # the whole reply is either a call or not
    opening = TAGS[style][0]
    end = text.find(opening)
    if end < 0:
        partial = (n for n in range(min(len(opening) - 1, len(text)), 0, -1) if text.endswith(opening[:n]))
        end = len(text) - next(partial, 0)
    return len(text[:end].rstrip())


def opens_call(text: str, style: Style) -> bool:
    """Whether a call may begin with or within this token."""
    return style in TAGS and bool(text) and (text in TAGS[style][0] or TAGS[style][0] in text)
