"""Classic import path: joining, cleaning and showing messages."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from verifiers.message_types import AnyMessage, TextMessage, readable
from verifiers.messages import (
    concat_messages,
    messages_to_printable,
    readable_messages,
    sanitize_tool_calls,
    strip_nones_from_content,
)
from verifiers.types import ChatMessage
from verifiers.views import View

__all__ = [
    "concat_messages",
    "from_raw_content_part",
    "from_raw_message",
    "maybe_normalize_messages",
    "message_to_printable",
    "messages_to_printable",
    "normalize_messages",
    "sanitize_tool_calls",
    "strip_nones_from_content",
]


def message_to_printable(message: ChatMessage) -> Any:
    """One message with images and sounds replaced by a short placeholder."""
    return messages_to_printable([message])[0]


def from_raw_message(message: ChatMessage) -> AnyMessage:
    """A message as an object of the class of its role."""
    return readable(dict(message))


def from_raw_content_part(part: dict[str, Any]) -> View:
    """A part of a message's content, readable by attribute."""
    made: View = from_raw_message({"role": "user", "content": [part]})["content"][0]
    return made


def normalize_messages(value: str | Iterable[Any], *, field_name: str = "messages") -> list[Any]:
    """A list of messages that can be read by key and by attribute; a text becomes one message."""
    if isinstance(value, str):
        return [TextMessage(content=value)]
    for one in value:
        if not isinstance(one, dict) and not (hasattr(one, "role") and hasattr(one, "content")):
            raise TypeError(f"{field_name} has {one!r:.100}, which is not a message")
    made: list[Any] = readable_messages(list(value))
    return made


maybe_normalize_messages = normalize_messages


def __getattr__(name: str) -> Any:
    if name not in ("ChatCompletion", "ChatCompletionMessage"):  # OpenAI's, which environments of 0.1.5 take from here
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("openai.types.chat"), name)
