"""Full-text search over the rollouts of a results file, in time slices."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec

from verifiers.viewer.index import RolloutIndex, read_line

_CHECK_EVERY = 64


class Search:
    """One search in a run; ``advance`` continues where it stopped, including lines appended since."""

    def __init__(self, index: RolloutIndex, text: str) -> None:
        self.index = index
        self.generation = index.generation
        self.hits = array("I")
        self.position = 0
        self._needle = text.casefold()
        # A prefilter on the raw line, only for ASCII: other characters may be escaped in the file or not.
        self._raw = msgspec.json.encode(text)[1:-1].lower() if text.isascii() else b""

    def advance(self, budget_s: float | None = None) -> bool:
        """Continue the search until the time is up; return whether all known rollouts have been searched."""
        deadline = None if budget_s is None else time.monotonic() + budget_s
        index = self.index
        while self.position < len(index):
            if self._is_in(index.line(self.position)):
                self.hits.append(self.position)
            self.position += 1
            if deadline is not None and self.position % _CHECK_EVERY == 0 and time.monotonic() > deadline:
                break
        return self.position >= len(index)

    def _is_in(self, line: bytes) -> bool:
        if self._raw and self._raw not in line.lower():
            return False
        return any(self._needle in text.casefold() for text in _texts(read_line(line)))


def _texts(value: Any) -> Iterator[str]:
    """All strings in a record, and numbers as text, but not the names of columns."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        if value and type(value[0]) in (int, float):  # token ids and logprobs are not searched
            return
        for item in value:
            yield from _texts(item)
    elif type(value) in (int, float):
        yield str(value)
