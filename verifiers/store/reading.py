"""Reads a results file: its lines, an index of its rollouts, records in any order, pages."""

from __future__ import annotations

import logging
import os
import weakref
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec

from verifiers.errors import describe
from verifiers.files import lines_of, open_regular
from verifiers.store.checksum import FIELD, is_intact, is_sealed
from verifiers.store.record import Key, Record, is_failed

logger = logging.getLogger(__name__)

RESULTS = "results.jsonl"
METADATA = "metadata.json"
Status = Literal["ok", "failed"]
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Line(NamedTuple):
    """One line of a results file: its position and the key of its rollout, which is None if the line is damaged."""

    offset: int
    length: int
    key: Key | None
    is_failed: bool


class _Head(msgspec.Struct):
    """The fields an index needs; the rest of a line is parsed, but no objects are built from it."""

    example_id: int | str
    rollout: int | None = None
    error: Any = None
    reward: Any = None


def scan(file: BinaryIO, start: int = 0, *, seen: Counter[int | str] | None = None) -> Iterator[Line]:
    """Every line from an offset on, including damaged ones, but without an incomplete last line.

    Files of 0.1.x have no rollout column; there, rollouts are numbered in order of appearance, counted in ``seen``.
    """
    decode = msgspec.json.Decoder(_Head).decode
    seen = Counter() if seen is None else seen
    file.seek(start)
    offset = start
    for text in lines_of(file):
        length = len(text)
        key: Key | None = None
        has_failed = False
        try:
            if not is_intact(text):
                raise msgspec.DecodeError
            if not text.isascii() and not is_sealed(text):
                str(text, "utf-8")  # the decoder does not validate the strings that it skips
            head = decode(text)
            number = head.rollout
            if number is None:
                number = seen[head.example_id]
                seen[head.example_id] += 1
            key = (head.example_id, number)
            has_failed = is_failed({"error": head.error, "reward": head.reward})
        except UNREADABLE:
            if not text.endswith(b"\n"):
                return
        if key is not None or not text.isspace():
            yield Line(offset, length, key, has_failed)
        offset += length


def load_index(path: Path) -> dict[Key, Status]:
    """The status of each rollout of a results file: ``ok`` if any of its attempts succeeded."""
    index: dict[Key, Status] = {}
    if not path.exists():
        return index
    damaged = 0
    with open_regular(path) as file:
        for line in scan(file):
            if line.key is None:
                damaged += 1
            elif not line.is_failed:
                index[line.key] = "ok"
            else:
                index.setdefault(line.key, "failed")
    warn_damaged(path, damaged)
    return index


def warn_damaged(path: Path, count: int) -> None:
    if count:
        logger.warning("%s: %d damaged line(s) skipped; resuming the run moves them to damaged.txt", path, count)


def results_file(path: str | os.PathLike[str]) -> Path:
    """The results file of a run directory, or the file itself."""
    path = Path(path)
    return path / RESULTS if path.is_dir() else path


def read_records(
    path: str | os.PathLike[str], columns: Sequence[str] | None = None, *, without_superseded: bool = False
) -> Iterator[Record]:
    """The records of a run directory or a ``.jsonl`` file, one at a time, in the order in which they finished.

    With ``columns``, only these are decoded, which is several times faster; a missing column is None. Lines that
    are `superseded` can be left out.
    """
    file = results_file(path)
    if not file.exists() and not (Path(path) / METADATA).exists():
        raise FileNotFoundError(f"{path} is neither a run directory nor a results file")
    return _read(file, columns, without_superseded)


def superseded(lines: Iterable[Line]) -> set[int]:
    """The offsets of lines replaced by another of the same rollout: the last good line counts, else the last."""
    best: dict[Key, Line] = {}
    worse: set[int] = set()
    for line in lines:
        if line.key is None:
            continue
        known = best.get(line.key)
        if known is not None and line.is_failed and not known.is_failed:
            worse.add(line.offset)
            continue
        if known is not None:
            worse.add(known.offset)
        best[line.key] = line
    return worse


def _read(path: Path, columns: Sequence[str] | None, without_superseded: bool) -> Iterator[Record]:
    if not path.exists():  # no rollout of the run has finished yet
        return
    decode = RecordDecoder(columns)
    damaged = offset = 0
    with open_regular(path) as file:
        without = superseded(scan(file)) if without_superseded else ()  # of the open file: its path may be replaced
        file.seek(0)
        for line in lines_of(file):
            offset += len(line)
            if offset - len(line) in without:
                continue
            try:
                record = decode(line) if is_intact(line) else None
            except UNREADABLE:
                record = None
            if record is not None:
                yield record
            else:
                damaged += line.endswith(b"\n") and not line.isspace()
    warn_damaged(path, damaged)


class RecordDecoder:
    """A line → a record, or some of its columns."""

    def __init__(self, columns: Sequence[str] | None) -> None:
        self.columns = None if columns is None else tuple(dict.fromkeys(columns))
        if self.columns is None:
            self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(dict[str, Any])
            return
        names = {f"column_{number}": name for number, name in enumerate(self.columns)}  # "f-1" is not an identifier
        struct = msgspec.defstruct("Columns", [(field, Any, None) for field in names], rename=names)
        self._decoder = msgspec.json.Decoder(struct)

    def __call__(self, line: bytes) -> Record:
        value = self._decoder.decode(line)
        if self.columns is None:
            record: Record = value
            record.pop(FIELD, None)
            return record
        return dict(zip(self.columns, msgspec.structs.astuple(value), strict=True))


class Rows:
    """The rollouts of a results file by number, read from disk on request; ``refresh`` adds newly appended ones.

    Only a few numbers per rollout are kept in memory, so paging through 100,000 rollouts is fast and needs little.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = results_file(path)
        self.keys: list[Key] = []
        self.failed = bytearray()
        self.damaged = 0
        self._offsets = array("Q")
        self._lengths = array("Q")
        self._end = 0
        self._seen: Counter[int | str] = Counter()
        self._file: BinaryIO | None = None
        self._decode = RecordDecoder(None)
        self.refresh()

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, number: int) -> Record:
        number = range(len(self))[number]
        assert self._file is not None  # there is a row, so there is a file
        line = os.pread(self._file.fileno(), self._lengths[number], self._offsets[number])
        try:
            return self._decode(line)
        except UNREADABLE as error:  # `scan` decodes less of a line than this
            example_id, rollout = self.keys[number]
            return {"example_id": example_id, "rollout": rollout, "reward": None, "error": describe(error)}

    def superseded(self) -> set[int]:
        """The numbers of rows that are superseded."""
        rows = enumerate(zip(self.keys, self.failed, strict=True))
        return superseded(Line(number, 0, key, bool(has_failed)) for number, (key, has_failed) in rows)

    def page(self, start: int, n: int, *, order: Sequence[int] | None = None) -> list[Record]:
        """Up to ``n`` records from position ``start`` on, in file order or in the given ``order`` of row numbers."""
        numbers = range(len(self)) if order is None else order
        return [self[number] for number in numbers[start : start + n]]

    def sorted_order(self) -> list[int]:
        """The numbers of the rows by example, then rollout; int ids come before string ids."""
        return sorted(range(len(self)), key=lambda number: _sort_key(self.keys[number]))

    def refresh(self) -> int:
        """Read what was appended, or everything if the file was replaced; return the number of rows."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            self._forget()
            return 0
        held = None if self._file is None else os.fstat(self._file.fileno())
        if held is None or (held.st_ino, held.st_dev) != (found.st_ino, found.st_dev) or found.st_size < self._end:
            self._forget()
            self._file = open_regular(self.path)
            weakref.finalize(self, self._file.close)
        if found.st_size > self._end and self._file is not None:
            self._take(self._file)
        return len(self)

    def _take(self, file: BinaryIO) -> None:
        for line in scan(file, self._end, seen=self._seen):
            self._end = line.offset + line.length
            if line.key is None:
                self.damaged += 1
                continue
            self.keys.append(line.key)
            self.failed.append(line.is_failed)
            self._offsets.append(line.offset)
            self._lengths.append(line.length)

    def _forget(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self.keys = []
        self.failed = bytearray()
        self._seen = Counter()
        self._offsets, self._lengths = array("Q"), array("Q")
        self._end = self.damaged = 0


def _sort_key(key: Key) -> tuple[bool, int | str, int]:
    return (isinstance(key[0], str), key[0], key[1])
