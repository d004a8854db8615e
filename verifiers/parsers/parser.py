"""A reply → whatever one function reads out of its text; the base of every parser."""

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
    """The text itself; a named function, so that parsers can be pickled."""
    return text


def messages_in(completion: Any) -> list[Any]:
    """The messages of a completion of any shape; what holds none gives an empty list.

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
    """The text of the last assistant message; of a string, itself; of anything else, nothing.

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
    """Reads the answer out of a reply with one function; no parser raises on anything a model can write.

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
        """What ``extract_fn`` makes of the text, or of the last assistant message's text."""
        return self._extract(text if isinstance(text, str) else reply_text(text))

    def parse_answer(self, completion: Messages) -> str | None:
        """The answer in a completion; None where no assistant message is in it."""
        text = completion
        if not isinstance(text, str):
            replies = self.get_assistant_messages(completion)
            if not replies:
                return None
            text = text_of(replies[-1])
        answer: str | None = self.parse(text)
        return answer

    def get_assistant_messages(self, completion: Messages) -> list[ChatMessage]:
        """The assistant's messages, in order; a completion that is a string is one of them."""
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
        """A reward for following the format; free text has none to break, so it is always 1."""

        def format_reward_func(completion: Messages, **kwargs: Any) -> float:
            return 1.0

        return format_reward_func

    def _extract(self, text: str) -> str | None:
        try:
            return self.extract_fn(text)
        except BaseException as error:  # foreign code: a text it cannot cope with has no answer
            raise_if_escaped(error)
            self.logger.debug("extract_fn raised; the answer is None", exc_info=True)
            return None

    def _mean_over_replies(self, score: Callable[[str], float], completion: Messages) -> float:
        replies = self.get_assistant_messages(completion)
        return sum(score(text_of(reply)) for reply in replies) / len(replies) if replies else 0.0
