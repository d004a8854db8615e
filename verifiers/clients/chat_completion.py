"""OpenAI's chat completion with the ``message`` that replies have from 0.1.11 on. Needs the openai package."""

from __future__ import annotations

from openai.types.chat import ChatCompletion

from verifiers.clients.openai_objects import response_message
from verifiers.clients.reading import read_response
from verifiers.message_types import ResponseMessage


class ChatCompletionWithMessage(ChatCompletion):
    """What ``step["response"]`` is: ``response.choices[0].message.content`` or ``response.message.content``."""

    @property
    def message(self) -> ResponseMessage:
        return response_message(read_response(self))


def with_message(raw: ChatCompletion) -> ChatCompletionWithMessage:
    """The same object as one that has a ``message``."""
    made = ChatCompletionWithMessage.__new__(ChatCompletionWithMessage)
    made.__setstate__(raw.__getstate__())
    return made
