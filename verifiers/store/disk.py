"""Bytes → bytes that survive a crash: whole writes, atomic replacement, partial last lines cut off."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from verifiers.files import LONGEST_LINE, LineTooLongError, open_regular, open_to_write

CHUNK = 1 << 20


def write_all(fd: int, data: bytes) -> None:
    """Write all of it, however little the system takes at a time."""
    written = os.write(fd, data)
    while written < len(data):
        taken = os.write(fd, data[written : written + (CHUNK << 6)])
        if taken == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += taken


def sync_folder(folder: Path) -> None:
    """Make names that were created or renamed in a folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    fd = open_to_write(path, flags)
    try:
        yield fd
    except OSError as error:  # writing to a number, the system knows no name
        raise named(error, path) from error.__cause__
    finally:
        os.close(fd)


def named(error: OSError, path: Path) -> OSError:
    """The error, saying which file it is about."""
    if error.filename is None:
        error.filename = str(path)
    return error


def replace_file(path: Path, chunks: Iterable[bytes]) -> None:
    """Put new content in the place of a file's, all at once: readers and crashes see the old or the new one."""
    new = path.with_name(path.name + ".tmp")
    try:
        with opened(new, os.O_WRONLY | os.O_TRUNC) as fd:
            for chunk in chunks:
                write_all(fd, chunk)
            os.fsync(fd)
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)  # a full disk needs the room
        raise
    sync_folder(path.parent)


def last_line_start(fd: int) -> int:
    """Where the unfinished last line begins, just after the last newline; the end of the file if it is finished."""
    size = end = os.fstat(fd).st_size
    while end > 0:
        if size - end > LONGEST_LINE:
            raise LineTooLongError
        start = max(0, end - CHUNK)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def cut_partial_line(fd: int) -> None:
    """Drop an unfinished last line; lines hold no newline of their own, so nothing else goes."""
    start = last_line_start(fd)
    if start < os.fstat(fd).st_size:
        os.ftruncate(fd, start)


def append_missing(path: Path, lines: Iterable[bytes]) -> None:
    """Append the lines that a file does not hold yet, durably; so a repetition after a crash adds nothing twice."""
    with opened(path, os.O_RDWR | os.O_APPEND) as fd:
        cut_partial_line(fd)
        with open_regular(path) as known_lines:
            known = {_digest(line) for line in known_lines}
        for line in lines:
            if (digest := _digest(line)) not in known:
                known.add(digest)
                write_all(fd, line)
        os.fsync(fd)
    sync_folder(path.parent)


def _digest(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=16).digest()
