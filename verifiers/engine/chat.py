"""Messages and tools become a prompt's text by the model's own template, and its ids: those already known, exactly.

A reply written back into a template and tokenized again may give other tokens than were sampled. So the ids of each
prompt with its reply are remembered by their text: a prompt that begins with that text begins with those ids.
"""

from __future__ import annotations

import json
import threading
import time
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.engine.recent import Recent
from verifiers.engine.text import Codec
from verifiers.engine.tool_calls import CLOSE, OPEN, Style, style_of
from verifiers.errors import RequestRefusedError
from verifiers.types import ChatMessage

REMEMBERED_CHARS = 32_000_000

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
    """How a tokenizer writes conversations, tools included."""

    def __init__(self, tokenizer: Any, *, model: str = "this model") -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._recent: Recent[str] = Recent()

    @property
    def is_there(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def style(self, tools: Any = None) -> Style:
        return style_of(self._source(tools))

    def _source(self, tools: Any) -> str:
        """The template in use: a tokenizer may have several, one of them for tools."""
        templates = getattr(self._tokenizer, "chat_template", None)
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
        """The text of a conversation, ready to be gone on with."""
        if not self.is_there:
            raise RequestRefusedError(
                f"{self._model} has a tokenizer without a chat template: set tokenizer.chat_template, or ask for "
                'plain completions (message_type="completion")'
            )
        plain = [plain_message(message) for message in messages]
        if not plain:
            raise RequestRefusedError("the conversation is empty: give at least one message")
        source = self._source(tools)
        if "tools" not in source and (tools or any("tool_calls" in m or m["role"] == "tool" for m in plain)):
            plain, tools = told_in_text(plain, tools), None
        settings = {
            **kwargs,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
        }
        key = (source, repr(plain), repr(settings), time.localtime()[:3])  # templates may write the day
        text = self._recent.find(key)
        if text is None:
            text = self._write(plain, settings)
            self._recent.keep(key, text)
        return text

    def _write(self, plain: Sequence[ChatMessage], settings: Mapping[str, Any]) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(plain, tokenize=False, **settings))
        except Exception as error:  # the template is a program that came with the model
            raise RequestRefusedError(
                f"the chat template of {self._model} refuses this conversation: {error}"
            ) from error

    def end_of_turn(self, codec: Codec) -> int | None:
        """The special token that the template writes after a reply: a model may end on it and not call it its EOS."""
        if not self.is_there:
            return None
        reply = "q7"
        asked: list[ChatMessage] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": reply}]
        try:
            text = self.render(asked, add_generation_prompt=False)
        except RequestRefusedError:
            return None
        _, found, after = text.rpartition(reply)
        ids = codec.encode(after.lstrip(), special=False) if found and after.strip() else []
        return ids[0] if ids and codec.decode(ids[:1]) == "" else None


# --- messages as templates take them ------------------------------------------------------------------------------


def plain_message(message: Any) -> ChatMessage:
    """A message with text content and with arguments as objects: what templates are written for.

    >>> plain_message({"role": "user", "content": [{"type": "text", "text": "2+2?"}]})
    {'role': 'user', 'content': '2+2?'}
    """
    if hasattr(message, "model_dump"):
        message = message.model_dump(exclude_none=True)
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestRefusedError(f"a message is a dict with a role and content, not {message!r:.100}")
    plain = {**message, "content": _text(message.get("content"))}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_with_object(call) for call in calls]
    else:
        plain.pop("tool_calls", None)
    return plain


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestRefusedError(f"content is a text or a list of parts, not {content!r:.100}")
    return "".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise RequestRefusedError(f"the local engine reads text; a content part of type {kind!r} is not supported")
    return text


def _with_object(call: Any) -> dict[str, Any]:
    if hasattr(call, "model_dump"):
        call = call.model_dump(exclude_none=True)
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestRefusedError(f"a tool call has a function with a name and arguments, not {call!r:.100}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except (ValueError, RecursionError):
            read = arguments
        arguments = read if isinstance(read, dict) else arguments
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def told_in_text(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None) -> list[ChatMessage]:
    """The same conversation for a template that knows nothing of tools: they, their calls and results become text."""
    told = [_as_text(message) for message in messages]
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        said = TOOLS_TEXT.format(tools=listed)
        if told[0]["role"] == "system":
            told[0] = {**told[0], "content": f"{told[0]['content']}\n\n{said}".strip()}
        else:
            told.insert(0, {"role": "system", "content": said})
    return told


def _as_text(message: ChatMessage) -> ChatMessage:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    calls = [call["function"] for call in message["tool_calls"]]
    written = [
        f"{OPEN}\n{json.dumps({'name': c['name'], 'arguments': c['arguments']}, ensure_ascii=False)}\n{CLOSE}"
        for c in calls
    ]
    content = "\n".join([message["content"], *written] if message["content"] else written)
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}


# --- ids already known --------------------------------------------------------------------------------------------


class KnownTexts:
    """Texts whose exact ids were seen; the oldest go once there are too many. From any thread.

    >>> known = KnownTexts(); known.remember("2+2=4", [7, 8, 9])
    >>> known.longest("2+2=4, and 3+3=")
    (5, [7, 8, 9])
    """

    def __init__(self, max_chars: int = REMEMBERED_CHARS) -> None:
        self._max_chars = max_chars
        self._chars = 0
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._sorted: list[str] = []
        self._shortest = max_chars  # no known text is shorter
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._ids)

    def remember(self, text: str, ids: Sequence[int]) -> None:
        if not text or len(text) > self._max_chars:
            return
        with self._lock:
            if text not in self._ids:
                insort(self._sorted, text)
                self._chars += len(text)
                self._shortest = min(self._shortest, len(text))
            self._ids[text] = array("i", ids)
            self._ids.move_to_end(text)
            while self._chars > self._max_chars:
                oldest, _ = self._ids.popitem(last=False)
                del self._sorted[bisect_left(self._sorted, oldest)]
                self._chars -= len(oldest)

    def longest(self, text: str) -> tuple[int, list[int]]:
        """The longest known text that this one begins with: its length and ids; ``(0, [])`` without one."""
        with self._lock:
            head = text
            # Whatever sorts between a beginning of a text and the text itself has that beginning too: so the nearest
            # one before is it, or tells how much shorter it must be.
            while head and (at := bisect_right(self._sorted, head)):
                before = self._sorted[at - 1]
                if head.startswith(before):
                    self._ids.move_to_end(before)
                    return len(before), self._ids[before].tolist()
                if not before.startswith(head[: self._shortest]):
                    break
                head = head[: _shared(before, head)]
        return 0, []


def _shared(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
