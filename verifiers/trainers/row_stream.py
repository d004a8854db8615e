"""Rows become an endless stream in a seeded order, new for each epoch, that can go on where it was left."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from typing import Any


class RowStream:
    """The rows of a training. ``cursor`` is how many have been taken: with the seed it is the whole state.

    ``is_apart``: no other process was given any of the rows that were taken last. Where rows are not learned from in
    the order they are taken in, ``low`` is how many have been without a gap, and ``beyond`` which ones after these: a
    stream that goes on at ``low`` takes no row of ``beyond`` again.

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
        self.low, self.beyond = 0, set[int]()
        self.is_apart = False
        self.last: list[Any] = []  # the rows that were taken last, together
        self._guard = threading.Lock()  # rows are taken by the trainer, and by rollouts that are made ahead
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
        first = self.cursor * self._shards
        rows = [self.take_one()[1] for _ in range(n)]
        self.is_apart = first // len(self) == (self.cursor * self._shards - 1) // len(self)
        self.last = rows
        return rows

    def take_one(self) -> tuple[int, Any]:
        """The next row, and its place in the stream."""
        with self._guard:
            while self.cursor in self.beyond:
                self.cursor += 1
            place, self.cursor = self.cursor, self.cursor + 1
            return place, self._at(place * self._shards + self._index)

    def note_learned(self, places: Iterable[int]) -> int:
        """Rows at these places have been learned from; how many have been without a gap.

        >>> stream = RowStream(["a", "b", "c"])
        >>> stream.note_learned([1]), stream.note_learned([0]), stream.beyond
        (0, 2, set())
        """
        self.beyond.update(places)
        while self.low in self.beyond:
            self.beyond.remove(self.low)
            self.low += 1
        return self.low

    def learned(self, since: int) -> list[int]:
        """The places, among those of all processes, of rows learned from after the first ``since`` of this one."""
        return [place * self._shards + self._index for place in [*range(since, self.low), *sorted(self.beyond)]]

    def go_on(self, low: int, learned: Iterable[int] = ()) -> None:
        """Begin where streams over the same rows were left: `learned` says which ones of all processes not to take."""
        self.low = low
        self.beyond = {place // self._shards for place in learned if place % self._shards == self._index}
        self.cursor = self.note_learned(())

    def choose(self, pool: Sequence[Any], n: int, *, again: bool = False) -> list[Any]:
        """``n`` rows of a pool at random (one comes twice only if there are too few); all of it if it has just that,
        unless some of it were chosen for the same batch before (``again``)."""
        if not len(pool):
            raise ValueError("there are no rows to choose from: a row sampler or a filter let none through")
        if len(pool) == n and not again:
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
