"""Classic import path: reading an OpenAI-shaped response (a dict, an SDK object, a mock of one, our own)."""

from __future__ import annotations

from typing import Any

from verifiers.clients.protocol import Completion
from verifiers.clients.reading import read_response
from verifiers.rollout import step_tokens
from verifiers.types import Messages, MessageType, TrajectoryStepTokens

__all__ = ["parse_is_truncated", "parse_response_messages", "parse_response_tokens"]


def _read(response: Any, message_type: MessageType) -> Completion:
    return response if isinstance(response, Completion) else read_response(response, message_type)


async def parse_response_tokens(
    response: Any, message_type: MessageType = "chat", max_seq_len: int | None = None
) -> TrajectoryStepTokens | None:
    """The tokens of a reply in the format of a trajectory step; None if the engine did not report them."""
    return step_tokens(_read(response, message_type).tokens, max_seq_len)


async def parse_response_messages(response: Any, message_type: MessageType = "chat") -> Messages:
    """The reply: a list of one message for a chat, a string for a completion."""
    reply = _read(response, message_type)
    return [reply.message] if message_type == "chat" else reply.text


async def parse_is_truncated(response: Any, message_type: MessageType = "chat") -> bool:
    """Did the reply end at a length limit?"""
    return _read(response, message_type).is_truncated
