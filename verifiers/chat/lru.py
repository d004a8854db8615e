"""A small LRU cache: the requests of a group ask for the same results many times."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")

SIZE = 64


class LRU(Generic[T]):
    """Values by key. When there are more than ``size``, the least recently used is dropped.

    >>> squares = LRU(size=2)
    >>> for n in (2, 3): squares.put(n, n * n)
    >>> squares.get(2), squares.put(4, 16), squares.get(3), squares.get(2)
    (4, None, None, 4)
    """

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._values: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable) -> T | None:
        """The value for ``key``, or None."""
        value = self._values.get(key)
        with suppress(KeyError):  # not in here, or dropped by another thread just now
            self._values.move_to_end(key)
        return value

    def put(self, key: Hashable, value: T) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        while len(self._values) > self._size:
            self._values.popitem(last=False)
