"""Rows become an endless stream in a seeded order, reshuffled each epoch, which can resume from a checkpoint."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from typing import Any


class RowStream:
    """The rows of a training. ``cursor`` counts the rows that this process has taken; with the seed it is all state.

    Rows may be trained on in another order than they are taken. ``first_unlearned`` is the position of the first row
    that was not trained on yet; ``learned_beyond`` are later positions that were, which a resumed stream skips.
    ``is_disjoint``: no other process took any of the rows that were taken last.

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
        self.first_unlearned, self.learned_beyond = 0, set[int]()
        self.is_disjoint = False
        self.last: list[Any] = []  # the rows that the last `take` returned
        self._lock = threading.Lock()  # both the trainer and rollouts that are sampled ahead take rows
        self._index, self._shards = shard
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return len(self.all)

    @property
    def taken(self) -> int:
        """The number of rows that all processes together have taken."""
        return self.cursor * self._shards

    def take(self, n: int) -> list[Any]:
        """The next rows of this process."""
        first = self.taken
        rows = [self.take_one()[1] for _ in range(n)]
        self.is_disjoint = first // len(self) == (self.taken - 1) // len(self)  # all of the same epoch
        self.last = rows
        return rows

    def take_one(self) -> tuple[int, Any]:
        """The next row, and its position in the stream of this process."""
        with self._lock:
            while self.cursor in self.learned_beyond:
                self.cursor += 1
            position, self.cursor = self.cursor, self.cursor + 1
            return position, self._at(position * self._shards + self._index)

    def note_learned(self, positions: Iterable[int]) -> int:
        """Note that rows at these positions were trained on; returns ``first_unlearned``.

        >>> stream = RowStream(["a", "b", "c"])
        >>> stream.note_learned([1]), stream.note_learned([0]), stream.learned_beyond
        (0, 2, set())
        """
        self.learned_beyond.update(positions)
        while self.first_unlearned in self.learned_beyond:
            self.learned_beyond.remove(self.first_unlearned)
            self.first_unlearned += 1
        return self.first_unlearned

    def learned(self, since: int) -> list[int]:
        """Rows trained on, from position ``since`` of this process on, as positions in the stream of all processes."""
        positions = [*range(since, self.first_unlearned), *sorted(self.learned_beyond)]
        return [position * self._shards + self._index for position in positions]

    def resume(self, first_unlearned: int, learned: Iterable[int] = ()) -> None:
        """Continue where streams over the same rows stopped; ``learned`` joins the lists from `learned` of them all."""
        self.first_unlearned = first_unlearned
        self.learned_beyond = {one // self._shards for one in learned if one % self._shards == self._index}
        self.cursor = self.note_learned(())

    def choose(self, pool: Sequence[Any], n: int, *, again: bool = False) -> list[Any]:
        """``n`` random rows of a pool, without repetition if it has enough; the pool itself if it has exactly ``n``,
        unless rows of it were already chosen for the same batch (``again``)."""
        if not len(pool):
            raise ValueError("there are no rows to choose from: a row sampler or a filter returned none")
        if len(pool) == n and not again:
            return list(pool)
        self.is_disjoint = False
        draw = random.Random(f"{self.seed} {self.cursor} {self._index}")
        self.cursor += n
        picks: list[int] = []
        while len(picks) < n:
            picks += draw.sample(range(len(pool)), min(n - len(picks), len(pool)))
        return [pool[i] for i in picks]

    def _at(self, position: int) -> Any:
        epoch, index = divmod(position, len(self.all))
        if self._order[0] != epoch:
            order = list(range(len(self.all)))
            random.Random(f"{self.seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self.all[self._order[1][index]]
