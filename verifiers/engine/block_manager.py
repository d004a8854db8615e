"""Blocks of the KV cache: reference counts, the prefix cache, and which block is allocated next.

A block is `BLOCK` positions of every layer. Sequences with a common prefix share its full blocks (reference counts). A
block that no sequence holds keeps its keys and values as prefix cache until it is allocated again; the least recently
used block is allocated first. A cached block is looked up by its tokens and the block before it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

# Positions per block. On average a sequence leaves half of its last block unused, which is 5% of a sequence of 150
# tokens. Smaller blocks make block tables longer and runs of contiguous keys shorter.
BLOCK = 16
NULL_BLOCK = 0  # never allocated: on CUDA, padding and rows without a sequence write here
_TOKEN, _SERIAL = 4, 8  # bytes of a token, and of a block's serial number
_SIZE = BLOCK * _TOKEN
_ROOT = bytes(_SERIAL)  # stands for the predecessor of the first block


def blocks_for(tokens: int) -> int:
    """How many blocks that many tokens take.

    >>> [blocks_for(n) for n in (0, 1, 16, 17)]
    [0, 1, 1, 2]
    """
    return -(-tokens // BLOCK)


class OutOfBlocksError(Exception):
    """Too few blocks are free."""


class Prefix(NamedTuple):
    """The cached prefix of a prompt: full blocks, and the first ``rest`` tokens of the block ``source``."""

    blocks: list[int]
    source: int = NULL_BLOCK
    rest: int = 0

    @property
    def tokens(self) -> int:
        return len(self.blocks) * BLOCK + self.rest


Ids = Sequence[int] | np.ndarray


class BlockManager:
    """The blocks of one KV cache. Prefixes shorter than ``least_shared`` tokens are not reused (None: no reuse)."""

    def __init__(self, blocks: int, *, least_shared: int | None = 1) -> None:
        self.least_shared = least_shared
        self.version = 0  # how often the prefix cache was dropped
        self._references = [0] * blocks
        # Free blocks without content, used as a stack: the block released last is likely still in the CPU's caches.
        self._empty = list(range(blocks - 1, NULL_BLOCK, -1))
        self._unheld: OrderedDict[int, None] = OrderedDict()  # cached blocks that no sequence holds, in LRU order
        # The key of a cached block: the serial number of the block before it, then its tokens. Keys are bytes because
        # the garbage collector would traverse tuples.
        self._keys: list[bytes | None] = [None] * blocks
        self._by_key: dict[bytes, int] = {}
        self._serial = [_ROOT] * blocks
        self._serials = count(1)
        self._after: dict[bytes, bytes | list[bytes]] = {}  # serial number → key of the next block, or a sorted list

    @property
    def total(self) -> int:
        """The number of blocks, without the null block."""
        return len(self._references) - 1

    @property
    def available(self) -> int:
        """How many blocks can be allocated now."""
        return len(self._empty) + len(self._unheld)

    @property
    def held(self) -> int:
        """How many blocks are held by sequences. Shared blocks count once."""
        return self.total - self.available

    def allocate(self, n: int) -> list[int]:
        """Take free blocks: empty ones first, then the least recently used of the prefix cache."""
        if n > self.available:
            raise OutOfBlocksError(f"{n} blocks are needed, but only {self.available} are free")
        first = max(len(self._empty) - n, 0)
        taken = self._empty[first:][::-1]
        del self._empty[first:]
        cached = [self._unheld.popitem(last=False)[0] for _ in range(n - len(taken))]
        self._evict(cached)
        taken += cached
        references = self._references
        for block in taken:
            references[block] = 1
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that other sequences hold or that are in the prefix cache."""
        for block in blocks:
            if not self._references[block]:
                del self._unheld[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> list[int]:
        """Drop one reference to each block; returns the blocks that are now empty."""
        emptied = []
        references, keys, unheld = self._references, self._keys, self._unheld
        for block in reversed(blocks):  # so that a cached sequence is evicted from its last block on
            references[block] = left = references[block] - 1
            if left:
                continue
            if keys[block] is not None:
                unheld[block] = None
            else:
                self._empty.append(block)
                emptied.append(block)
        return emptied

    # --- the prefix cache -----------------------------------------------------------------------------------------

    def keep(self, blocks: Sequence[int], ids: Ids) -> None:
        """Add the blocks of a sequence to the prefix cache; ``ids`` are the tokens that they hold."""
        if self.least_shared is None:
            return
        text, before, by_key, serial = _bytes(ids), _ROOT, self._by_key, self._serial
        for block, start in zip(blocks, range(0, len(text), _SIZE), strict=False):
            key = before + text[start : start + _SIZE]
            before = serial[by_key.get(key) or self._insert(block, before, key)]

    def longest_prefix(self, ids: Ids) -> Prefix:
        """The longest cached prefix of a prompt. It excludes the last token, which must run to produce logits."""
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
        """The block after ``before`` with the longest common prefix with ``text``, and that prefix's tokens."""
        siblings = self._after.get(before, [])
        wanted = before + text
        if isinstance(siblings, list):  # sorted, so a neighbour has the longest common prefix
            at = bisect_left(siblings, wanted)
            siblings = max(siblings[max(at - 1, 0) : at + 1], key=lambda key: _common_prefix(key, wanted), default=b"")
        shared = (_common_prefix(siblings, wanted) - _SERIAL) // _TOKEN
        return (self._by_key[siblings], shared) if shared > 0 else (NULL_BLOCK, 0)

    def forget(self) -> None:
        """Drop the prefix cache, for example because the weights have changed."""
        self.version += 1
        self._empty += self._unheld
        self._keys = [None] * len(self._keys)
        for kept in (self._unheld, self._by_key, self._after):
            kept.clear()

    def _insert(self, block: int, before: bytes, key: bytes) -> int:
        if self._keys[block] is not None:  # it was inserted with fewer tokens, or after another block
            self._evict([block])
        self._keys[block], self._by_key[key], self._serial[block] = key, block, next(self._serials).to_bytes(_SERIAL)
        siblings = self._after.setdefault(before, key)
        if siblings is key:
            return block
        if isinstance(siblings, list):
            insort(siblings, key)
        else:
            self._after[before] = sorted((siblings, key))
        return block

    def _evict(self, blocks: Iterable[int]) -> None:
        """Remove blocks from the prefix cache. Their successors can no longer be found; LRU evicts those later."""
        keys, by_key, after = self._keys, self._by_key, self._after
        for block in blocks:
            key, keys[block] = keys[block], None
            assert key is not None
            del by_key[key]
            siblings = after.pop(before := key[:_SERIAL])
            if isinstance(siblings, list):
                del siblings[bisect_left(siblings, key)]
                after[before] = siblings if len(siblings) > 1 else siblings[0]


def _bytes(ids: Ids) -> bytes:
    """Tokens as big-endian bytes, which sort like the tokens."""
    return np.asarray(ids, ">i4").tobytes()


def _common_prefix(one: bytes, other: bytes) -> int:
    """The length of the common prefix, in bytes.

    >>> _common_prefix(b"abcd", b"abx"), _common_prefix(b"ab", b"abc"), _common_prefix(b"", b"a")
    (2, 2, 0)
    """
    n = min(len(one), len(other))
    differ = int.from_bytes(one[:n]) ^ int.from_bytes(other[:n])
    return n - -(-differ.bit_length() // 8)
