"""A reply with or without thoughts → the answer after them."""

from __future__ import annotations

from typing import Any

from verifiers.parsers.parser import Parser, reply_text
from verifiers.types import Messages


class MaybeThinkParser(Parser):
    """Reads the text after the last ``</think>``, or the whole reply if there is none.

    >>> MaybeThinkParser().parse("<think>2+2…</think> 4"), MaybeThinkParser().parse(" 4 ")
    ('4', '4')
    """

    def parse(self, text: Messages) -> Any:
        """``extract_fn`` of the text without the thoughts."""
        reply = text if isinstance(text, str) else reply_text(text)
        return self._extract(reply.rpartition("</think>")[2].strip())
