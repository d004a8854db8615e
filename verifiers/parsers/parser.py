"""A reply → the answer that a function extracts from its text; the base class of all parsers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

from verifiers.escapes import raise_if_escaped
from verifiers.messages import role_of, text_of
from verifiers.types import ChatMessage, Messages

ExtractFn = Callable[[str], str | None]


def identity(text: str) -> str:
    """Return the text unchanged. A module-level function, so that parsers can be pickled."""
    return text


def messages_in(completion: Any) -> list[Any]:
    """The messages of a completion of any shape; an empty list if it contains none.

    >>> messages_in("4")
    [{'role': 'assistant', 'content': '4'}]
    >>> messages_in(None)
    []
    """
    if isinstance(completion, list):
        return completion
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    if isinstance(completion, dict) or hasattr(completion, "role"):
        return [completion]
    try:
        return list(completion)
    except TypeError:
        return []


def reply_text(completion: Any) -> str:
    """The text of the last assistant message; a string is returned as it is, anything else gives "".

    >>> reply_text([{"role": "assistant", "content": "4"}, {"role": "user", "content": "Correct!"}])
    '4'
    """
    if isinstance(completion, str):
        return completion
    for message in reversed(messages_in(completion)):
        if role_of(message) == "assistant":
            return text_of(message)
    return ""


class Parser:
    """Extracts the answer from a reply with one function. No parser raises, whatever a model writes.

    >>> parser = Parser(extract_fn=str.upper)
    >>> parser.parse("yes")
    'YES'
    >>> parser.parse_answer([{"role": "assistant", "content": "no"}, {"role": "user", "content": "Sure?"}])
    'NO'
    """

    def __init__(self, extract_fn: ExtractFn = identity) -> None:
        if not callable(extract_fn):
            raise TypeError(f"extract_fn must be a function from text to text, not {extract_fn!r}")
        self.extract_fn = extract_fn

    @cached_property
    def logger(self) -> logging.Logger:
        """A logger named for the parser's class, for subclasses."""
        return logging.getLogger(f"verifiers.parsers.{type(self).__name__}")

    def parse(self, text: Messages) -> Any:
        """``extract_fn`` of the text, or of the last assistant message's text."""
        return self._extract(text if isinstance(text, str) else reply_text(text))

    def parse_answer(self, completion: Messages) -> str | None:
        """The answer in a completion; None if it contains no assistant message."""
        text = completion
        if not isinstance(text, str):
            replies = self.get_assistant_messages(completion)
            if not replies:
                return None
            text = text_of(replies[-1])
        answer: str | None = self.parse(text)
        return answer

    def get_assistant_messages(self, completion: Messages) -> list[ChatMessage]:
        """The assistant's messages, in order. A completion that is a string counts as one message."""
        return [message for message in messages_in(completion) if role_of(message) == "assistant"]

    def get_system_messages(self, completion: Messages) -> list[ChatMessage]:
        """The system messages, in order."""
        return [message for message in messages_in(completion) if role_of(message) == "system"]

    def get_user_messages(self, completion: Messages) -> list[ChatMessage]:
        """The user's messages, in order."""
        return [message for message in messages_in(completion) if role_of(message) == "user"]

    def get_tool_messages(self, completion: Messages) -> list[ChatMessage]:
        """The tools' messages, in order."""
        return [message for message in messages_in(completion) if role_of(message) == "tool"]

    def get_format_reward_func(self) -> Callable[..., float]:
        """A reward for following the format; free text has no format, so it is always 1."""

        def format_reward_func(completion: Messages, **kwargs: Any) -> float:
            return 1.0

        return format_reward_func

    def _extract(self, text: str) -> str | None:
        try:
            return self.extract_fn(text)
        except BaseException as error:  # foreign code: a text on which it raises has no answer
            raise_if_escaped(error)
            self.logger.debug("extract_fn raised; the answer is None", exc_info=True)
            return None

    def _mean_over_replies(self, score: Callable[[str], float], completion: Messages) -> float:
        replies = self.get_assistant_messages(completion)
        return sum(score(text_of(reply)) for reply in replies) / len(replies) if replies else 0.0
