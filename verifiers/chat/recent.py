"""A small cache of recent results. A group asks for the same result many times."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

KEPT = 64


class Recent(Generic[T]):
    """The most recently stored values by key. The oldest is dropped when there are too many.

    >>> squares = Recent(kept=1); squares.keep(2, 4); squares.keep(3, 9)
    >>> squares.find(2), squares.find(3)
    (None, 9)
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._made: OrderedDict[Hashable, T] = OrderedDict()

    def find(self, key: Hashable) -> T | None:
        """The value for ``key``, or None."""
        return self._made.get(key)

    def keep(self, key: Hashable, made: T) -> None:
        self._made[key] = made
        while len(self._made) > self._kept:
            self._made.popitem(last=False)
