"""Blocks of the KV cache: who holds each, which tokens it keeps, and which is given away next.

A block is `BLOCK` positions of every layer. Sequences that begin alike hold the same full blocks (reference counts). A
block that nobody holds keeps its keys and values, as prefix cache, until it is needed: the longest unused goes first.
What is kept is found by content: a block by the tokens in it and the block before it, so equal tokens mean equal keys.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

# Positions of a block. A sequence leaves BLOCK - 1 of its last block unused at most, half of them on average: 5% of a
# sequence of 150 tokens. Smaller blocks make longer tables, and shorter runs of keys that lie side by side.
BLOCK = 16
NOBODYS = 0  # the block where what must not be kept is written on CUDA
_TOKEN, _SERIAL = 4, 8  # bytes of a token, and of a block's serial number
_SIZE = BLOCK * _TOKEN
_ROOT = bytes(_SERIAL)


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


Ids = Sequence[int] | np.ndarray


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
        # What a block keeps is known by a key: the serial number of the block before it, and its tokens. (Bytes: the
        # garbage collector would look at each of so many tuples.)
        self._keys: list[bytes | None] = [None] * blocks
        self._by_key: dict[bytes, int] = {}
        self._serial = [_ROOT] * blocks
        self._serials = count(1)
        self._after: dict[bytes, bytes | list[bytes]] = {}  # serial number → key of what follows; several are sorted

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
        first = max(len(self._empty) - n, 0)
        taken = self._empty[first:][::-1]
        del self._empty[first:]
        while len(taken) < n:
            block, _ = self._unheld.popitem(last=False)
            self._drop(block)
            taken.append(block)
        for block in taken:
            self._references[block] = 1
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
            if self._keys[block] is not None:
                self._unheld[block] = None
            else:
                self._empty.append(block)
                emptied.append(block)
        return emptied

    # --- the prefix cache -----------------------------------------------------------------------------------------

    def keep(self, blocks: Sequence[int], ids: Ids) -> None:
        """Note which tokens the keys and values of a sequence's blocks belong to: from here on they can be reused."""
        if self.least_shared is None:
            return
        text, before, by_key, serial = _bytes(ids), _ROOT, self._by_key, self._serial
        for block, start in zip(blocks, range(0, len(text), _SIZE), strict=False):
            key = before + text[start : start + _SIZE]
            before = serial[by_key.get(key) or self._note(block, before, key)]

    def longest_prefix(self, ids: Ids) -> Prefix:
        """The longest beginning of a prompt that any blocks keep; its last token has to be run for its logits."""
        most = len(ids) - 1
        least = self.least_shared or most + 1
        if most < least or not self._by_key:
            return Prefix([])
        text, before, blocks = _bytes(ids), _ROOT, list[int]()
        while (end := (len(blocks) + 1) * BLOCK) <= most:
            block = self._by_key.get(before + text[end * _TOKEN - _SIZE : end * _TOKEN])
            if block is None:
                break
            blocks.append(block)
            before = self._serial[block]
        if end <= least:
            return Prefix([])
        rest = text[len(blocks) * _SIZE : most * _TOKEN][:_SIZE]
        found = Prefix(blocks, *self._longest_start(before, rest))
        return found if found.tokens >= least else Prefix([])

    def _longest_start(self, before: bytes, text: bytes) -> tuple[int, int]:
        """Of the blocks that follow one, that which begins with most of these tokens, and how many."""
        siblings = self._after.get(before, [])
        wanted = before + text
        if isinstance(siblings, list):  # the most alike are side by side in this order
            at = bisect_left(siblings, wanted)
            siblings = max(siblings[max(at - 1, 0) : at + 1], key=lambda key: _alike(key, wanted), default=b"")
        shared = (_alike(siblings, wanted) - _SERIAL) // _TOKEN
        return (self._by_key[siblings], shared) if shared > 0 else (NOBODYS, 0)

    def forget(self) -> None:
        """Drop all that is kept: it was made by other weights, say."""
        self.version += 1
        self._empty += self._unheld
        self._keys = [None] * len(self._keys)
        for kept in (self._unheld, self._by_key, self._after):
            kept.clear()

    def _note(self, block: int, before: bytes, key: bytes) -> int:
        if self._keys[block] is not None:  # it held fewer tokens when it was noted, or others before it
            self._drop(block)
        self._keys[block], self._by_key[key], self._serial[block] = key, block, next(self._serials).to_bytes(_SERIAL)
        siblings = self._after.setdefault(before, key)
        if isinstance(siblings, list):
            insort(siblings, key)
        elif siblings is not key:
            self._after[before] = sorted((siblings, key))
        return block

    def _drop(self, block: int) -> None:
        """Its serial number is gone with it: those after it cannot be found any more, and are given away in turn."""
        key, self._keys[block] = self._keys[block], None
        assert key is not None
        del self._by_key[key]
        before = key[:_SERIAL]
        siblings = self._after[before]
        if isinstance(siblings, bytes):
            del self._after[before]
            return
        del siblings[bisect_left(siblings, key)]
        if len(siblings) == 1:
            self._after[before] = siblings[0]


def _bytes(ids: Ids) -> bytes:
    """Tokens as bytes whose order is that of the tokens."""
    return np.asarray(ids, ">i4").tobytes()


def _alike(one: bytes, other: bytes) -> int:
    """How many bytes at the beginning are the same.

    >>> _alike(b"abcd", b"abx"), _alike(b"ab", b"abc"), _alike(b"", b"a")
    (2, 2, 0)
    """
    n = min(len(one), len(other))
    differ = int.from_bytes(one[:n]) ^ int.from_bytes(other[:n])
    return n - -(-differ.bit_length() // 8)
