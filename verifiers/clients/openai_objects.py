"""A completion → OpenAI's object for it, for code that calls ``model_dump`` and the like on a step's ``response``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verifiers.clients.protocol import Completion
from verifiers.message_types import ResponseMessage, ResponseTokens
from verifiers.types import MessageType


def as_openai(completion: Completion, message_type: MessageType = "chat") -> Any:
    """OpenAI's ``ChatCompletion`` (or ``Completion``); the completion itself if the openai package is missing."""
    raw = completion.raw
    try:
        from openai.types import Completion as TextCompletion
        from openai.types.chat import ChatCompletion

        from verifiers.clients.chat_completion import ChatCompletionWithMessage, with_message
    except ImportError:
        return completion if raw is None or isinstance(raw, dict) else raw
    if raw is not None and not isinstance(raw, dict):  # already an SDK object
        return with_message(raw) if type(raw) is ChatCompletion else raw
    kind: Any = ChatCompletionWithMessage if message_type == "chat" else TextCompletion
    return kind.construct(**fields_of(completion, message_type))


def response_message(completion: Completion) -> ResponseMessage:
    """The message of a reply with how it ended, as ``response.message`` has it from 0.1.11 on."""
    tokens = completion.tokens
    shown = tokens and ResponseTokens(
        prompt_ids=tokens.prompt_ids,
        prompt_mask=[0] * len(tokens.prompt_ids),
        completion_ids=tokens.completion_ids,
        completion_mask=[1] * len(tokens.completion_ids),
        completion_logprobs=tokens.logprobs,
    )
    return ResponseMessage.of(completion.message, completion.finish_reason, completion.is_truncated, shown)


def with_ending(response: Any) -> Any:
    """A completion whose message says how it ended, for hooks; a response of another kind stays as it is."""
    return replace(response, message=response_message(response)) if type(response) is Completion else response


def fields_of(completion: Completion, message_type: MessageType) -> dict[str, Any]:
    """The fields of a completion in the format of OpenAI's endpoints."""
    raw = completion.raw if isinstance(completion.raw, dict) else {}
    usage = completion.usage
    counted = usage and {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
    made: dict[str, Any] = {
        "id": "",
        "created": 0,
        "model": completion.model,
        "object": "chat.completion" if message_type == "chat" else "text_completion",
        "usage": counted,
    }
    if "choices" in raw:
        return {**made, **raw}
    said = {"message": completion.message} if message_type == "chat" else {"text": completion.text}
    choice = {"index": 0, "finish_reason": completion.finish_reason or "stop", "logprobs": None, **said}
    named = {name: raw[name] for name in ("id", "model") if isinstance(raw.get(name), str)}
    return {**made, **named, "choices": [choice]}


class Step(dict[str, Any]):
    """A trajectory step whose ``response`` is converted to OpenAI's object on first access.

    >>> step = Step(response=Completion(message={"role": "assistant", "content": "4"}))
    >>> step["response"].model_dump()["choices"][0]["message"]["content"]
    '4'
    """

    def __getitem__(self, key: str) -> Any:
        value = dict.__getitem__(self, key)
        if key == "response" and isinstance(value, Completion):
            is_text = isinstance(dict.get(self, "completion"), str)
            value = self[key] = as_openai(value, "completion" if is_text else "chat")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key == "response" and key in self else dict.get(self, key, default)
