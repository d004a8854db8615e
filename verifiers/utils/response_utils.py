"""Classic import path: reading an OpenAI-shaped response (a dict, an SDK object, a mock of one, our own)."""

from __future__ import annotations

from typing import Any

from verifiers.clients.protocol import Completion
from verifiers.clients.reading import read_response
from verifiers.message_types import readable
from verifiers.rollout import step_tokens
from verifiers.types import ChatMessage, Messages, MessageType, TrajectoryStepTokens

__all__ = ["parse_is_truncated", "parse_response_message", "parse_response_messages", "parse_response_tokens"]


def _read(response: Any, message_type: MessageType) -> Completion:
    return response if isinstance(response, Completion) else read_response(response, message_type)


async def parse_response_tokens(
    response: Any, message_type: MessageType | int | None = "chat", max_seq_len: int | None = None
) -> TrajectoryStepTokens | None:
    """The tokens of a reply in the format of a trajectory step; None if the engine did not report them.

    From 0.1.11 on, the second argument is ``max_seq_len``.
    """
    kind: MessageType = message_type if isinstance(message_type, str) else "chat"
    limit = message_type if isinstance(message_type, int) else max_seq_len
    return step_tokens(_read(response, kind).tokens, limit)


async def parse_response_messages(response: Any, message_type: MessageType = "chat") -> Messages:
    """The reply: a list of one message for a chat, a string for a completion."""
    reply = _read(response, message_type)
    return [reply.message] if message_type == "chat" else reply.text


async def parse_response_message(response: Any) -> list[ChatMessage]:
    """The reply of a chat: a list of one message."""
    return [readable(dict(_read(response, "chat").message))]


async def parse_is_truncated(response: Any, message_type: MessageType = "chat") -> bool:
    """Did the reply end at a length limit?"""
    return _read(response, message_type).is_truncated
