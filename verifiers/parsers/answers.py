"""A worked solution → its final answer, in the notations of the common mathematics datasets."""

from __future__ import annotations

import re
from typing import Any

from verifiers.parsers.parser import reply_text

BOXED_SYSTEM_PROMPT = "Work through the problem step by step, then write your final answer inside \\boxed{}."

THINK_BOXED_SYSTEM_PROMPT = (
    "First reason about the problem between <think> and </think>. "
    "After the closing tag, write your final answer inside \\boxed{}."
)

_BOX = "\\boxed{"
_NOT_NUMERIC = re.compile(r"[^0-9.]+")  # not \d, which also matches digits such as ²


def extract_boxed_answer(text: Any, strict: bool = False) -> str:
    r"""The content of the last ``\boxed{…}``; without a complete one, the whole text, or "" if ``strict``.

    >>> extract_boxed_answer(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> extract_boxed_answer("no box"), extract_boxed_answer("no box", strict=True)
    ('no box', '')
    """
    reply = reply_text(text)
    start = reply.rfind(_BOX)
    if start < 0:
        return "" if strict else reply
    start += len(_BOX)
    end = _matching_brace(reply, start)
    if end < 0:
        return "" if strict else reply
    return reply[start:end]


def _matching_brace(text: str, start: int) -> int:
    """The index of the brace that closes the one just before ``start``, or -1."""
    depth, position = 1, start
    while (end := text.find("}", position)) >= 0:
        depth += text.count("{", position, end) - 1
        if depth == 0:
            return end
        position = end + 1
    return -1


def extract_hash_answer(text: Any) -> str:
    """The text after the first ``####``, up to the next one; without any, the whole text.

    >>> extract_hash_answer("2 + 2 = 4\\n#### 4")
    '4'
    >>> extract_hash_answer("four")
    'four'
    """
    reply = reply_text(text)
    _, mark, rest = reply.partition("####")
    return rest.partition("####")[0].strip() if mark else reply


def strip_non_numeric(text: str) -> str:
    """The digits and points of a text, without all other characters.

    >>> strip_non_numeric("about $1,234.50")
    '1234.50'
    """
    return _NOT_NUMERIC.sub("", text)
