"""Render messages and tools as the text of a conversation, with the model's own chat template."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from verifiers.chat.codec import Codec
from verifiers.chat.known import shared_length
from verifiers.chat.lru import LRU
from verifiers.chat.tool_calls import CLOSE, OPEN, Style, parse, style_of
from verifiers.errors import RequestRefusedError
from verifiers.messages import with_argument_objects
from verifiers.types import ChatMessage

logger = logging.getLogger("verifiers.chat")

BOUNDARIES = ("\n", ">", "]")  # the header of a turn ends with one of these
# A reply, a call and its tool, to see what a template writes around them.
REPLY = "q7"
_CALL: dict[str, Any] = {"name": "q7_tool", "arguments": {"text": "q7", "number": 7}}
_PROPERTIES = {"text": {"type": "string", "description": "a"}, "number": {"type": "integer", "description": "b"}}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["text", "number"]}
_TOOL = {"type": "function", "function": {"name": _CALL["name"], "description": "c", "parameters": _PARAMETERS}}

TOOLS_TEXT = """\
You may call one or more of these functions:
<tools>
{tools}
</tools>

For each call, write a JSON object with the function's name and its arguments within <tool_call></tool_call> tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class ChatTemplate:
    """Renders conversations, including tools, with a tokenizer's chat template."""

    def __init__(self, tokenizer: Any, *, model: str = "this model") -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._recent: LRU[str] = LRU()
        self._styles: dict[str, Style] = {}  # by template

    @property
    def is_there(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def style(self, tools: Any = None) -> Style:
        """How the model writes calls: the style in which a call that the template has written can be read again."""
        source = self.source(tools)
        if source not in self._styles:
            self._styles[source] = self._find_style(source)
        return self._styles[source]

    def _find_style(self, source: str) -> Style:
        try:
            written = self._written_call()
        except RequestRefusedError:  # it has no place for calls
            return style_of(source)
        styles: tuple[Style, ...] = get_args(Style)
        for style in styles:
            found = [call["function"] for call in parse(written, style, tools={_CALL["name"]: _PARAMETERS}).calls]
            if found == [{**_CALL, "arguments": json.dumps(_CALL["arguments"])}]:
                return style
        logger.warning(
            "the chat template of %s writes a tool call as %.400r, which is not understood: such calls stay text",
            self._model, written,
        )  # fmt: skip
        return style_of(source)

    def _written_call(self) -> str:
        """What the template writes for a reply that is a call, without the end of the turn."""
        asked: list[ChatMessage] = [{"role": "user", "content": "a"}]
        call = {"id": "q7q7q7q7q", "type": "function", "function": _CALL}
        replies: list[ChatMessage] = [
            {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "assistant", "content": REPLY}
        ]  # fmt: skip
        called, said = (self.render([*asked, one], [_TOOL], add_generation_prompt=False) for one in replies)
        shared = called[: shared_length(called, self.render(asked, [_TOOL]))]
        start = max(shared.rfind(mark) + 1 for mark in BOUNDARIES)
        return called[start:].strip().removesuffix(said.rpartition(REPLY)[2].strip())

    def source(self, tools: Any = None) -> str:
        """The template in use. A tokenizer may have several, one of them for tools."""
        templates = getattr(self._tokenizer, "chat_template", None)
        if isinstance(templates, str):
            return templates
        if isinstance(templates, Mapping):
            named = "tool_use" if tools and "tool_use" in templates else "default"
            templates = templates.get(named) or next(iter(templates.values()), "")
        return templates if isinstance(templates, str) else ""

    def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation, ready for the model to continue."""
        if not self.is_there:
            raise RequestRefusedError(
                f"{self._model} has a tokenizer without a chat template: set tokenizer.chat_template, or use "
                'plain completions (message_type="completion")'
            )
        plain = [plain_message(message) for message in messages]
        if not plain:
            raise RequestRefusedError("the conversation is empty: pass at least one message")
        source = self.source(tools)
        settings = {
            **kwargs,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
        }
        key = (source, repr(plain), repr(tools), repr(settings), today())
        text = self._recent.get(key)
        if text is None:
            text = self._write(list(_forms(plain, tools, source)), settings)
            self._recent.put(key, text)
        return text

    def _write(self, forms: Sequence[tuple[list[ChatMessage], Any]], settings: Mapping[str, Any]) -> str:
        refusal: Exception | None = None
        for messages, tools in forms:
            try:
                return str(self._tokenizer.apply_chat_template(messages, tokenize=False, tools=tools, **settings))
            except Exception as error:  # the template is a program that comes with the model
                refusal = refusal or error
        raise RequestRefusedError(
            f"the chat template of {self._model} refuses this conversation: {refusal}"
        ) from refusal

    def end_of_turn(self, codec: Codec) -> int | None:
        """The special token that the template writes after a reply. It may end replies but not be the model's EOS."""
        if not self.is_there:
            return None
        asked: list[ChatMessage] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": REPLY}]
        try:
            text = self.render(asked, add_generation_prompt=False)
        except RequestRefusedError:
            return None
        _, found, after = text.rpartition(REPLY)
        ids = codec.encode(after.lstrip(), special=False) if found and after.strip() else []
        return ids[0] if ids and codec.decode(ids[:1]) == "" else None


def today() -> tuple[int, ...]:
    """The date, which templates may include."""
    return time.localtime()[:3]


# --- messages as templates take them ------------------------------------------------------------------------------


def plain_message(message: Any) -> ChatMessage:
    """A message with text content and with tool arguments as objects, as templates expect.

    >>> plain_message({"role": "user", "content": [{"type": "text", "text": "2+2?"}]})
    {'role': 'user', 'content': '2+2?'}
    """
    if hasattr(message, "model_dump"):
        message = message.model_dump(exclude_none=True)
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestRefusedError(f"a message must be a dict with a role and content, not {message!r:.100}")
    plain = {key: value for key, value in with_argument_objects(dict(message)).items() if value is not None}
    plain["content"] = _text(message.get("content"))
    if calls := plain.get("tool_calls"):
        _check_calls(calls)
    else:
        plain.pop("tool_calls", None)
    return plain


def _check_calls(calls: Any) -> None:
    if not isinstance(calls, (list, tuple)):
        raise RequestRefusedError(f"tool_calls must be a list of calls, not {calls!r:.100}")
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestRefusedError(f"a tool call must have a function with a name and arguments, not {call!r:.100}")


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestRefusedError(f"content must be a text or a list of parts, not {content!r:.100}")
    return "".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise RequestRefusedError(f"a content part of type {kind!r} is not supported: chat templates render only text")
    return text


def _forms(
    plain: list[ChatMessage], tools: Sequence[Mapping[str, Any]] | None, source: str
) -> Iterator[tuple[list[ChatMessage], Any]]:
    """The forms of a conversation that a template may accept, best first."""
    calls = any("tool_calls" in message for message in plain)
    if "tools" not in source and (tools or calls or any(message["role"] == "tool" for message in plain)):
        yield told_in_text(plain, tools), None
        if tools and plain[0]["role"] == "user":  # some templates refuse a system message
            yield told_in_text(plain, tools, role="user"), None
        return
    offered = list(tools) if tools else None
    if calls and "tool_calls" not in source:  # the template would silently drop the calls
        yield [_calls_as_text(message) for message in plain], offered
        return
    yield plain, offered
    if calls:  # some templates concatenate arguments with text, so they need a string
        yield [_with_argument_texts(message) for message in plain], offered


def _with_argument_texts(message: ChatMessage) -> ChatMessage:
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [f["arguments"] if isinstance(f["arguments"], str) else json.dumps(f["arguments"]) for f in functions]
    calls = [
        {**call, "function": {**call["function"], "arguments": text}}
        for call, text in zip(message["tool_calls"], texts, strict=True)
    ]
    return {**message, "tool_calls": calls}


def told_in_text(
    messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None, role: str = "system"
) -> list[ChatMessage]:
    """The same conversation with tools, calls and results as text, for a template without support for tools."""
    told = [_as_text(message) for message in messages]
    if not tools:
        return told
    said = TOOLS_TEXT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if told[0]["role"] != role:
        return [{"role": role, "content": said}, *told]
    words = told[0]["content"]
    whole = f"{words}\n\n{said}" if role == "system" else f"{said}\n\n{words}"
    return [{**told[0], "content": whole.strip()}, *told[1:]]


def _as_text(message: ChatMessage) -> ChatMessage:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    return _calls_as_text(message)


def _calls_as_text(message: ChatMessage) -> ChatMessage:
    if "tool_calls" not in message:
        return message
    calls = [call["function"] for call in message["tool_calls"]]
    written = [
        f"{OPEN}\n{json.dumps({'name': c['name'], 'arguments': c['arguments']}, ensure_ascii=False)}\n{CLOSE}"
        for c in calls
    ]
    content = "\n".join([message["content"], *written] if message["content"] else written)
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}
