"""A path in an untrusted folder → an open regular file. Anything else is refused without blocking."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # not a POSIX system
    HAS_LOCKS = False
else:
    HAS_LOCKS = True

BUFFER = 1 << 20
LONGEST_LINE = 256 << 20  # bytes; no record is longer
# Without O_NONBLOCK, opening a FIFO blocks until its other end is opened. Regular files ignore the flag.
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOCTTY", 0)
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


def cache_folder() -> Path:
    """The folder of downloaded models and compiled code: ``$VERIFIERS_CACHE``, or ``~/.cache/verifiers``."""
    return Path(os.environ.get("VERIFIERS_CACHE") or "~/.cache/verifiers").expanduser()


class NotRegularError(OSError):
    """The path to read or write is a FIFO, a device, a socket, a folder or a link."""

    def __init__(self, path: str | os.PathLike[str], what: str) -> None:
        super().__init__(errno.EINVAL, f"this is {what}, but it must be a regular file", os.fspath(path))


class TooLargeError(OSError):
    """A file is larger than its limit."""

    def __init__(self, path: str | os.PathLike[str], most: int) -> None:
        super().__init__(errno.EFBIG, f"this file is larger than the limit of {most >> 20} MiB", os.fspath(path))


class LineTooLongError(OSError):
    """A file has a line that is longer than the longest record."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        message = f"a line is longer than {LONGEST_LINE >> 20} MiB, so this is not a file of records"
        super().__init__(errno.EFBIG, message, None if path is None else os.fspath(path))


def lock(fd: int, *, waits: bool) -> bool:
    """Lock an open file against other processes until it is closed. Return False if locks are not supported.

    If another process holds the lock: wait if ``waits``, else raise BlockingIOError.
    """
    if not HAS_LOCKS:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return False
    return True


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading. A link to a regular file is allowed."""
    return open(path, "rb", buffering=BUFFER, opener=lambda name, _: _opened(name, os.O_RDONLY | _AT_ONCE))


def open_to_write(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file for writing with these flags, and create it if needed. Never follow a link."""
    try:
        return _opened(path, flags | os.O_CREAT | _AT_ONCE | _NO_LINKS)
    except OSError as error:
        if error.errno == errno.ELOOP and Path(path).is_symlink():
            raise NotRegularError(path, "a symbolic link") from None
        raise


def read_regular(path: str | os.PathLike[str], *, most: int) -> bytes:
    """The content of a file of at most ``most`` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size) if size <= most else b""
        if size > most or (len(content) == size and file.read(1)):  # a file that reports no size, or has grown
            raise TooLargeError(path, most)
    return content


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file from the current position to its present end, so that a growing file ends too."""
    left = os.fstat(file.fileno()).st_size - file.tell()
    while left > 0 and (line := file.readline(LONGEST_LINE)):
        if len(line) == LONGEST_LINE:
            raise LineTooLongError(file.name)
        left -= len(line)
        yield line


def is_same_file(fd: int, path: str | os.PathLike[str]) -> bool:
    """Whether a path still names the open file."""
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), named)


def _opened(path: str | os.PathLike[str], flags: int) -> int:
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a FIFO without a reader, or a socket
            raise NotRegularError(path, "a FIFO, a socket or a device") from None
        raise
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise NotRegularError(path, _kind(mode))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFDIR: "a folder"}
    return kinds.get(stat.S_IFMT(mode), "not a regular file")
