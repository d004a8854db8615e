"""Crash-safe writes: complete writes, atomic replacement, removal of incomplete last lines."""

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
    """Write all of the data, repeating short writes."""
    written = os.write(fd, data)
    while written < len(data):
        taken = os.write(fd, data[written : written + (CHUNK << 6)])
        if taken == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += taken


def sync_folder(folder: Path) -> None:
    """Make file creations and renames in a folder durable."""
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
    except OSError as error:  # an error from a file descriptor has no filename
        raise named(error, path) from error.__cause__
    finally:
        os.close(fd)


def named(error: OSError, path: Path) -> OSError:
    """The error, with its filename filled in."""
    if error.filename is None:
        error.filename = str(path)
    return error


def replace_file(path: Path, chunks: Iterable[bytes]) -> None:
    """Replace the content of a file atomically: after a crash, and for readers, it is either the old or the new."""
    new = path.with_name(path.name + ".tmp")
    try:
        with opened(new, os.O_WRONLY | os.O_TRUNC) as fd:
            for chunk in chunks:
                write_all(fd, chunk)
            os.fsync(fd)
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)  # free the space: the disk may be full
        raise
    sync_folder(path.parent)


def last_line_start(fd: int) -> int:
    """The offset just after the last newline: where an incomplete last line begins, or else the end of the file."""
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
    """Remove an incomplete last line."""
    start = last_line_start(fd)
    if start < os.fstat(fd).st_size:
        os.ftruncate(fd, start)


def append_missing(path: Path, lines: Iterable[bytes]) -> None:
    """Append the lines that a file does not contain yet, durably; repeating this after a crash adds no line twice."""
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
