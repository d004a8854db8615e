"""Rows become an endless stream in a seeded order, new for each epoch, that can go on where it was left."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any


class RowStream:
    """The rows of a training. ``cursor`` is how many have been taken: with the seed it is the whole state.

    ``is_apart``: no other process was given any of the rows that were taken last.

    >>> stream = RowStream(["a", "b", "c"], seed=1)
    >>> first = stream.take(4)
    >>> again = RowStream(["a", "b", "c"], seed=1)
    >>> again.cursor = 2
    >>> again.take(2) == first[2:]
    True
    """

    def __init__(self, rows: Any, *, seed: int = 0, shard: tuple[int, int] = (0, 1)) -> None:
        if not len(rows):
            raise ValueError("there are no rows to train on")
        self.all: Sequence[Any] = rows
        self.seed = seed
        self.cursor = 0
        self.is_apart = False
        self._index, self._shards = shard
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return len(self.all)

    @property
    def taken(self) -> int:
        """How many rows all processes have taken."""
        return self.cursor * self._shards

    def take(self, n: int) -> list[Any]:
        """The next rows; of several processes each takes its own."""
        places = [(self.cursor + i) * self._shards + self._index for i in range(n)]
        first, self.cursor = self.cursor * self._shards, self.cursor + n
        self.is_apart = first // len(self) == (self.cursor * self._shards - 1) // len(self)
        return [self._at(place) for place in places]

    def choose(self, pool: Sequence[Any], n: int) -> list[Any]:
        """``n`` rows of a pool at random (one comes twice only if there are too few); all of it if it has just that."""
        if not len(pool):
            raise ValueError("there are no rows to choose from: a row sampler or a filter let none through")
        if len(pool) == n:
            return list(pool)
        self.is_apart = False
        draw = random.Random(f"{self.seed} {self.cursor} {self._index}")
        self.cursor += n
        picks: list[int] = []
        while len(picks) < n:
            picks += draw.sample(range(len(pool)), min(n - len(picks), len(pool)))
        return [pool[i] for i in picks]

    def _at(self, place: int) -> Any:
        epoch, position = divmod(place, len(self.all))
        if self._order[0] != epoch:
            order = list(range(len(self.all)))
            random.Random(f"{self.seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self.all[self._order[1][position]]
