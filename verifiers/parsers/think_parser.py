"""A reply that begins with its thoughts → the answer after them, or "" if the thoughts never end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verifiers.parsers.parser import Parser, reply_text
from verifiers.types import Messages

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser(Parser):
    """Reads the text after the last ``</think>``; the answer of a reply without one is "".

    For models that always write their thoughts into the text. If the chat template or the endpoint removes the
    thoughts, use ``MaybeThinkParser``.

    >>> ThinkParser().parse("<think>2+2…</think> 4")
    '4'
    >>> ThinkParser().parse("4")
    ''
    """

    def parse(self, text: Messages) -> Any:
        """``extract_fn`` of the text after the thoughts."""
        reply = text if isinstance(text, str) else reply_text(text)
        end = reply.rfind(CLOSE)
        return self._extract(reply[end + len(CLOSE) :].strip() if end >= 0 else "")

    def get_format_reward_func(self) -> Callable[..., float]:
        """A reward: the share of assistant messages with one block of thoughts at the start and text after it."""

        def format_reward_func(completion: Messages, **kwargs: Any) -> float:
            return self._mean_over_replies(_thinks_then_answers, completion)

        return format_reward_func


def _thinks_then_answers(text: str) -> float:
    text = text.strip()
    is_well_formed = text.startswith(OPEN) and text.count(OPEN) == text.count(CLOSE) == 1 and not text.endswith(CLOSE)
    return 1.0 if is_well_formed else 0.0
