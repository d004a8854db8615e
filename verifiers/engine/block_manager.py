"""Blocks of the KV cache: who holds each, which tokens it keeps, and which is given away next.

A block is `BLOCK` positions of every layer. Sequences that begin alike hold the same full blocks (reference counts). A
block that nobody holds keeps its keys and values, as prefix cache, until it is needed: the longest unused goes first.
What is kept is found by content: a block by the tokens in it and the block before it, so equal tokens mean equal keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

# Positions of a block. A sequence leaves BLOCK - 1 of its last block unused at most, half of them on average: 5% of a
# sequence of 150 tokens. Smaller blocks make longer tables, and shorter runs of keys that lie side by side.
BLOCK = 16
NOBODYS = 0  # the block where what must not be kept is written on CUDA
_ROOT = 0


def blocks_for(tokens: int) -> int:
    """How many blocks so many tokens take.

    >>> [blocks_for(n) for n in (0, 1, 16, 17)]
    [0, 1, 1, 2]
    """
    return -(-tokens // BLOCK)


class OutOfBlocksError(Exception):
    """Every block is held by a sequence that is under way."""


class Prefix(NamedTuple):
    """The beginning of a prompt that is kept: full blocks, and ``rest`` tokens at the start of one more."""

    blocks: list[int]
    source: int = NOBODYS
    rest: int = 0

    @property
    def tokens(self) -> int:
        return len(self.blocks) * BLOCK + self.rest


class _Kept(NamedTuple):
    """What a block keeps: ``key`` is the serial number of the block before it, and its tokens."""

    serial: int
    key: tuple[int, tuple[int, ...]]


class BlockManager:
    """The blocks of one KV cache. A prefix of fewer than ``least_shared`` tokens is not reused; None: none is."""

    def __init__(self, blocks: int, *, least_shared: int | None = 1) -> None:
        self.least_shared = least_shared
        self.version = 0  # counts how often everything kept was forgotten
        self._references = [0] * blocks
        self._empty = list(
            range(blocks - 1, NOBODYS, -1)
        )  # the last one freed is the next one used: it is in the cache
        self._unheld: OrderedDict[int, None] = OrderedDict()  # blocks that keep something, the longest unused first
        self._kept: dict[int, _Kept] = {}
        self._by_key: dict[tuple[int, tuple[int, ...]], int] = {}
        self._after: dict[tuple[int, int], dict[int, None]] = {}  # a block's serial number and a token → what follows
        self._ids = np.zeros((blocks, BLOCK), np.int32)
        self._serials = count(_ROOT + 1)

    @property
    def total(self) -> int:
        """How many blocks sequences can have."""
        return len(self._references) - 1

    @property
    def available(self) -> int:
        """How many of them can be had now."""
        return len(self._empty) + len(self._unheld)

    @property
    def held(self) -> int:
        """How many belong to sequences under way, those that several share counted once."""
        return self.total - self.available

    def allocate(self, n: int) -> list[int]:
        """Blocks of one's own; what they kept is gone."""
        if n > self.available:
            raise OutOfBlocksError(f"{n} blocks are needed, {self.available} are left")
        taken = []
        for _ in range(n):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = self._unheld.popitem(last=False)
                self._drop(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Share blocks that others hold, or that are kept."""
        for block in blocks:
            if not self._references[block]:
                del self._unheld[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> list[int]:
        """Let go of blocks; gives those that are empty now. A sequence's last one is given away before its first."""
        emptied = []
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._kept:
                self._unheld[block] = None
            else:
                self._empty.append(block)
                emptied.append(block)
        return emptied

    # --- the prefix cache -----------------------------------------------------------------------------------------

    def keep(self, blocks: Sequence[int], ids: Sequence[int]) -> None:
        """Note which tokens the keys and values of a sequence's blocks belong to: from here on they can be reused."""
        if self.least_shared is None:
            return
        before, new = _ROOT, list[int]()
        for i, block in enumerate(blocks[: blocks_for(len(ids))]):
            key = before, tuple(ids[i * BLOCK : (i + 1) * BLOCK])
            kept = self._kept.get(block)
            if kept is not None and kept.key != key:  # it held fewer tokens when it was noted, or others before it
                self._drop(block)
                kept = None
            if kept is None and key not in self._by_key:
                kept = self._kept[block] = _Kept(next(self._serials), key)
                self._by_key[key] = block
                self._after.setdefault((before, key[1][0]), {})[block] = None
                new.append(i)
            before = self._kept[self._by_key[key]].serial
        padded = np.full(blocks_for(len(ids)) * BLOCK, -1, np.int32)
        padded[: len(ids)] = ids
        self._ids[[blocks[i] for i in new]] = padded.reshape(-1, BLOCK)[new]

    def longest_prefix(self, ids: Sequence[int]) -> Prefix:
        """The longest beginning of a prompt that any blocks keep; its last token has to be run for its logits."""
        most = len(ids) - 1
        before, blocks = _ROOT, list[int]()
        while (end := (len(blocks) + 1) * BLOCK) <= most:
            block = self._by_key.get((before, tuple(ids[end - BLOCK : end])))
            if block is None:
                break
            blocks.append(block)
            before = self._kept[block].serial
        least = self.least_shared or most + 1
        if (len(blocks) + 1) * BLOCK <= least:
            return Prefix([])
        found = Prefix(blocks, *self._longest_start(before, ids[len(blocks) * BLOCK : most]))
        return found if found.tokens >= least else Prefix([])

    def _longest_start(self, before: int, ids: Sequence[int]) -> tuple[int, int]:
        """Of the blocks that follow one, that which begins with most of these tokens, and how many."""
        after = self._after.get((before, ids[0])) if ids else None
        if not after:
            return NOBODYS, 0
        ids = ids[:BLOCK]
        blocks = np.fromiter(after, np.int64, len(after))
        same = self._ids[blocks, : len(ids)] == np.array(ids, np.int32)
        shared = np.where(same.all(1), len(ids), same.argmin(1))
        best = int(shared.argmax())
        return int(blocks[best]), int(shared[best])

    def forget(self) -> None:
        """Drop all that is kept: it was made by other weights, say."""
        self.version += 1
        self._empty += self._unheld
        for kept in (self._unheld, self._kept, self._by_key, self._after):
            kept.clear()

    def _drop(self, block: int) -> None:
        """Its serial number is gone with it: those after it cannot be found any more, and are given away in turn."""
        before, ids = key = self._kept.pop(block).key
        del self._by_key[key]
        siblings = self._after[before, ids[0]]
        del siblings[block]
        if not siblings:
            del self._after[before, ids[0]]
