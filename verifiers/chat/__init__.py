"""Conversations as models see them: write messages and tools as text and token ids, and parse calls from replies."""

from verifiers.chat.codec import Codec
from verifiers.chat.known import KnownTexts
from verifiers.chat.template import ChatTemplate, plain_message
from verifiers.chat.writer import ChatWriter, Turn

__all__ = ["ChatTemplate", "ChatWriter", "Codec", "KnownTexts", "Turn", "plain_message"]
