"""A results file after a crash → a file of complete lines, one good line per rollout, without losing any data."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from verifiers.files import open_regular
from verifiers.store.checksum import is_intact
from verifiers.store.disk import CHUNK, append_missing, last_line_start, opened, replace_file, write_all
from verifiers.store.reading import Line, scan
from verifiers.store.record import Key

logger = logging.getLogger(__name__)

ATTEMPTS = "attempts.jsonl"  # failed rollouts that were run again, and second results of the same rollout
DAMAGED = "damaged.txt"  # lines that are not records: cut off by a crash, or corrupted


@dataclass(frozen=True, kw_only=True, slots=True)
class Compacted:
    """The finished rollouts of a compacted results file, and how many lines were moved out of it."""

    finished: frozenset[Key]
    failed: int = 0
    duplicates: int = 0
    damaged: int = 0


def mend_last_line(path: Path) -> None:
    """Repair a last line without a newline: complete it, or move it to ``damaged.txt``."""
    if not path.exists():
        return
    with opened(path, os.O_RDWR | os.O_APPEND) as fd:
        start = last_line_start(fd)
        partial = os.pread(fd, os.fstat(fd).st_size - start, start)
        if not partial:
            return
        if _is_record(partial):  # only the newline is missing
            write_all(fd, b"\n")
        else:
            append_missing(path.with_name(DAMAGED), [partial + b"\n"])
            os.ftruncate(fd, start)
            logger.warning("%s: an incomplete last line (%d bytes) was moved to %s", path, len(partial), DAMAGED)
        os.fsync(fd)


def compact(path: Path, *, keep_failed: bool = False) -> Compacted:
    """Leave exactly one good line per rollout; the caller must hold the lock of the folder.

    A rollout that only failed has no good line: all its lines are removed, or all but the last if ``keep_failed``.

    Lines are first appended to the side files, then the results file is replaced atomically. A crash in between leaves
    the old file, and a second call gives the same result, because `append_missing` adds no line twice.
    """
    if not path.exists():
        return Compacted(finished=frozenset())
    mend_last_line(path)
    with open_regular(path) as file:
        lines = list(scan(file))
        winners = {line.key: line for line in lines if line.key is not None and not line.is_failed}
        finished: frozenset[Key] = frozenset(winners)  # the last good line of each rollout wins
        if keep_failed:
            winners = {line.key: line for line in lines if line.key is not None} | winners
        if len(winners) == len(lines):
            return Compacted(finished=finished)
        damaged = [line for line in lines if line.key is None]
        attempts = [line for line in lines if line.key is not None and winners.get(line.key) is not line]
        if attempts:
            append_missing(path.with_name(ATTEMPTS), _texts(file, attempts))
        if damaged:
            append_missing(path.with_name(DAMAGED), _texts(file, damaged))
        replace_file(path, _chunks(file, winners.values()))
    failed = sum(line.is_failed for line in attempts)
    result = Compacted(finished=finished, failed=failed, duplicates=len(attempts) - failed, damaged=len(damaged))
    _report(path, result)
    return result


def _report(path: Path, result: Compacted) -> None:
    if result.damaged:
        logger.warning(
            "%s: %d damaged line(s) were moved to %s; their rollouts will be rerun", path, result.damaged, DAMAGED
        )
    if result.failed or result.duplicates:
        logger.info(
            "%s: %d failed and %d repeated rollout(s) were moved to %s",
            path,
            result.failed,
            result.duplicates,
            ATTEMPTS,
        )


def _is_record(text: bytes) -> bool:
    try:
        return is_intact(text) and isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _texts(file: BinaryIO, lines: Iterable[Line]) -> Iterator[bytes]:
    for line in lines:
        file.seek(line.offset)
        yield file.read(line.length)


def _chunks(file: BinaryIO, lines: Iterable[Line]) -> Iterator[bytes]:
    """The text of lines in file order; adjacent lines are read together."""
    start = end = 0
    for line in sorted(lines):
        if line.offset != end or end - start > CHUNK:
            yield _span(file, start, end)
            start = line.offset
        end = line.offset + line.length
    yield _span(file, start, end)


def _span(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)
