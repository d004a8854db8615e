"""What was made lately, by what it was made from: a group asks the same many times over."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

KEPT = 64


class Recent(Generic[T]):
    """The last things that were made; the oldest goes when there are too many.

    >>> squares = Recent(kept=1); squares.keep(2, 4); squares.keep(3, 9)
    >>> squares.find(2), squares.find(3)
    (None, 9)
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._made: OrderedDict[Hashable, T] = OrderedDict()

    def find(self, key: Hashable) -> T | None:
        """What was made from this."""
        return self._made.get(key)

    def keep(self, key: Hashable, made: T) -> None:
        self._made[key] = made
        while len(self._made) > self._kept:
            self._made.popitem(last=False)
