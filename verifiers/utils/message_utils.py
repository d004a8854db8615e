"""Classic import path: joining, cleaning and showing messages."""

from __future__ import annotations

import importlib
from typing import Any

from verifiers.messages import concat_messages, messages_to_printable, sanitize_tool_calls, strip_nones_from_content
from verifiers.types import ChatMessage

__all__ = [
    "concat_messages",
    "message_to_printable",
    "messages_to_printable",
    "sanitize_tool_calls",
    "strip_nones_from_content",
]


def message_to_printable(message: ChatMessage) -> Any:
    """One message with images and sounds replaced by a short placeholder."""
    return messages_to_printable([message])[0]


def __getattr__(name: str) -> Any:
    if name not in ("ChatCompletion", "ChatCompletionMessage"):  # OpenAI's, which environments of 0.1.5 take from here
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("openai.types.chat"), name)
