"""Texts → the exact ids they were sampled as: a prompt that begins with a known text begins with those ids.

A reply written back into a template and tokenized again may give other tokens than were sampled. So the ids of each
prompt with its reply are remembered by their text.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence

REMEMBERED_CHARS = 32_000_000


class KnownTexts:
    """Texts whose exact ids were seen; the oldest go once there are too many. From any thread.

    >>> known = KnownTexts(); known.remember("2+2=4", [7, 8, 9])
    >>> known.longest("2+2=4, and 3+3=")
    (5, [7, 8, 9])
    """

    def __init__(self, max_chars: int = REMEMBERED_CHARS) -> None:
        self._max_chars = max_chars
        self._chars = 0
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._sorted: list[str] = []
        self._shortest = max_chars  # no known text is shorter
        self._lock = threading.Lock()
        self.count = 0  # texts that were ever seen

    def __len__(self) -> int:
        return len(self._ids)

    def remember(self, text: str, ids: Sequence[int]) -> None:
        if not text or len(text) > self._max_chars:
            return
        with self._lock:
            self.count += 1
            if text not in self._ids:
                insort(self._sorted, text)
                self._chars += len(text)
                self._shortest = min(self._shortest, len(text))
            self._ids[text] = array("i", ids)
            self._ids.move_to_end(text)
            while self._chars > self._max_chars:
                oldest, _ = self._ids.popitem(last=False)
                del self._sorted[bisect_left(self._sorted, oldest)]
                self._chars -= len(oldest)

    def ids_of(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """The ids of a text: those known of its beginning, and those of the rest as ``encode`` gives them."""
        length, ids = self.longest(text)
        return ids + encode(text[length:]) if length < len(text) else ids

    def longest(self, text: str) -> tuple[int, list[int]]:
        """The longest known text that this one begins with: its length and ids; ``(0, [])`` without one."""
        with self._lock:
            head = text
            # Whatever sorts between a beginning of a text and the text itself has that beginning too: so the nearest
            # one before is it, or tells how much shorter it must be.
            while head and (at := bisect_right(self._sorted, head)):
                before = self._sorted[at - 1]
                if head.startswith(before):
                    self._ids.move_to_end(before)
                    return len(before), self._ids[before].tolist()
                if not before.startswith(head[: self._shortest]):
                    break
                head = head[: shared_length(before, head)]
        return 0, []


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
