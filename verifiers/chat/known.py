"""Texts → the exact ids they were sampled as: a prompt that begins with a known text begins with those ids.

A reply written back into a template and tokenized again may give other tokens than were sampled. So the ids of each
prompt with its reply are remembered by their texts.
"""

from __future__ import annotations

import struct
import threading
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

REMEMBERED_CHARS = 32_000_000


class KnownTexts:
    """Prompts and their replies whose exact ids were seen; the oldest go once there are too many. From any thread.

    Replies are kept by their prompt: those of a group, which begin alike for long, are not compared with it each time.

    >>> known = KnownTexts(); known.remember("2+2=", "4", [7, 8, 9])
    >>> known.longest("2+2=4, and 3+3=")
    (5, [7, 8, 9])
    """

    def __init__(self, max_chars: int = REMEMBERED_CHARS) -> None:
        self._max_chars = max_chars
        self._chars = 0
        self._replies: OrderedDict[str, _Replies] = OrderedDict()  # by prompt
        self._prompts: list[str] = []  # in order
        self._lock = threading.Lock()
        self.count = 0  # texts that were ever seen

    def __len__(self) -> int:
        return sum(len(one.texts) for one in self._replies.values())

    def remember(self, prompt: str, reply: str, ids: Sequence[int]) -> None:
        if not prompt or len(prompt) + len(reply) > self._max_chars:
            return
        packed = array("i", struct.pack(f"{len(ids)}i", *ids))  # an array takes them one by one, three times slower
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
        """The first reply to the prompt that nobody has asked for the longest."""
        prompt, replies = next(iter(self._replies.items()))
        reply = next(iter(replies.ids))
        del replies.ids[reply], replies.texts[bisect_left(replies.texts, reply)]
        self._chars -= len(reply)
        if not replies.texts:
            del self._replies[prompt], self._prompts[bisect_left(self._prompts, prompt)]
            self._chars -= len(prompt)

    def ids_of(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """The ids of a text: those known of its beginning, and those of the rest as ``encode`` gives them."""
        length, ids = self.longest(text)
        return ids + encode(text[length:]) if length < len(text) else ids

    def longest(self, text: str) -> tuple[int, list[int]]:
        """The longest known prompt with its reply that a text begins with: length and ids; ``(0, [])`` without one."""
        best, found = 0, array("i")
        with self._lock:
            for prompt in beginnings(self._prompts, text):  # a shorter one may have had a longer reply
                replies = self._replies[prompt]
                reply = next(beginnings(replies.texts, text[len(prompt) :]), None)
                if reply is not None and len(prompt) + len(reply) > best:
                    best, found = len(prompt) + len(reply), replies.ids[reply]
                    self._replies.move_to_end(prompt)
        return best, found.tolist()


class _Replies:
    """To one prompt: their texts in order, and the ids of prompt and reply by the reply's text, the oldest first."""

    __slots__ = ("ids", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ids: dict[str, array[int]] = {}


def beginnings(texts: Sequence[str], text: str) -> Iterator[str]:
    """Those of some texts, which are in order, that another begins with: the longest first.

    >>> list(beginnings(["", "ab", "abc", "abd"], "abcd"))
    ['abc', 'ab', '']
    """
    head = text
    # Whatever sorts between a beginning of a text and the text itself has that beginning too: so the nearest one before
    # is it, or tells how much shorter it must be.
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
    """How many characters two texts have in common at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
