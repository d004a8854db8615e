"""Remember the exact ids of prompts and sampled replies, so that later prompts that begin with them reuse the ids.

A reply that is written into a template and tokenized again may have other tokens than were sampled. So the ids of each
prompt with its reply are stored by their text.
"""

from __future__ import annotations

import struct
import threading
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

REMEMBERED_CHARS = 32_000_000  # of all stored texts together


class KnownTexts:
    """Prompts and replies with their exact ids; drops the oldest if there are too many. Thread-safe.

    Replies are stored by prompt, so that the long prompt of a group is compared only once, not for each reply.

    >>> known = KnownTexts(); known.remember("2+2=", "4", [7, 8, 9])
    >>> known.longest("2+2=4, and 3+3=")
    (5, [7, 8, 9])
    """

    def __init__(self, max_chars: int = REMEMBERED_CHARS) -> None:
        self._max_chars = max_chars
        self._chars = 0
        self._replies: OrderedDict[str, _Replies] = OrderedDict()  # by prompt
        self._prompts: list[str] = []  # sorted
        self._lock = threading.Lock()
        self.count = 0  # calls of `remember` that stored a text

    def __len__(self) -> int:
        return sum(len(one.texts) for one in self._replies.values())

    def remember(self, prompt: str, reply: str, ids: Sequence[int]) -> None:
        if not prompt or len(prompt) + len(reply) > self._max_chars:
            return
        packed = array("i", struct.pack(f"{len(ids)}i", *ids))  # three times as fast as array("i", ids)
        with self._lock:
            self.count += 1
            replies = self._replies.get(prompt)
            if replies is None:
                replies = self._replies[prompt] = _Replies()
                insort(self._prompts, prompt)
                self._chars += len(prompt)
            self._replies.move_to_end(prompt)
            if reply not in replies.ids:
                insort(replies.texts, reply)
                self._chars += len(reply)
            replies.ids[reply] = packed
            while self._chars > self._max_chars:
                self._forget_one()

    def _forget_one(self) -> None:
        """Drop the oldest reply to the least recently used prompt."""
        prompt, replies = next(iter(self._replies.items()))
        reply = next(iter(replies.ids))
        del replies.ids[reply], replies.texts[bisect_left(replies.texts, reply)]
        self._chars -= len(reply)
        if not replies.texts:
            del self._replies[prompt], self._prompts[bisect_left(self._prompts, prompt)]
            self._chars -= len(prompt)

    def ids_of(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """The ids of a text: the stored ids of its beginning, then the rest as encoded by ``encode``."""
        length, ids = self.longest(text)
        return ids + encode(text[length:]) if length < len(text) else ids

    def longest(self, text: str) -> tuple[int, list[int]]:
        """The length and ids of the longest stored prompt and reply that ``text`` begins with, or ``(0, [])``."""
        best, found = 0, array("i")
        with self._lock:
            for prompt in beginnings(self._prompts, text):  # a shorter prompt may have a longer reply
                replies = self._replies[prompt]
                reply = next(beginnings(replies.texts, text[len(prompt) :]), None)
                if reply is not None and len(prompt) + len(reply) > best:
                    best, found = len(prompt) + len(reply), replies.ids[reply]
                    self._replies.move_to_end(prompt)
        return best, found.tolist()


class _Replies:
    """The replies to one prompt: their sorted texts, and the ids of prompt and reply by reply text, oldest first."""

    __slots__ = ("ids", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ids: dict[str, array[int]] = {}


def beginnings(texts: Sequence[str], text: str) -> Iterator[str]:
    """Those of the sorted ``texts`` that ``text`` begins with, longest first.

    >>> list(beginnings(["", "ab", "abc", "abd"], "abcd"))
    ['abc', 'ab', '']
    """
    head = text
    # All strings that sort between a prefix of a text and the text itself share that prefix. So the nearest entry up to
    # `head` is a prefix of it, or else all other prefixes are within its common prefix with `head`.
    while at := bisect_right(texts, head):
        before = texts[at - 1]
        if head.startswith(before):
            yield before
            if not before:
                return
            head = before[:-1]
        else:
            head = head[: shared_length(before, head)]


def shared_length(one: str, other: str) -> int:
    """The length of the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
