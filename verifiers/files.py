"""A path in a folder that anyone may have filled → a regular file; what is none is refused and never waited for."""

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
LONGEST_LINE = 256 << 20  # bytes; a file whose lines are longer holds no records
# Opening a FIFO waits for its other end unless it is told not to; regular files do not care.
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOCTTY", 0)
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


def cache_folder() -> Path:
    """Where models and compiled code are kept: ``$VERIFIERS_CACHE``, or ``~/.cache/verifiers``."""
    return Path(os.environ.get("VERIFIERS_CACHE") or "~/.cache/verifiers").expanduser()


class NotRegularError(OSError):
    """What was to be read or written is a FIFO, a device, a socket, a folder or a link."""

    def __init__(self, path: str | os.PathLike[str], what: str) -> None:
        super().__init__(errno.EINVAL, f"this is {what}, and only a regular file is taken here", os.fspath(path))


class TooLargeError(OSError):
    """A file is larger than anything of its kind."""

    def __init__(self, path: str | os.PathLike[str], most: int) -> None:
        super().__init__(errno.EFBIG, f"this file is larger than {most >> 20} MiB, and is not read", os.fspath(path))


class LineTooLongError(OSError):
    """A file has a line that is longer than any record."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        said = f"a line has more than {LONGEST_LINE >> 20} MiB, so these are no records"
        super().__init__(errno.EFBIG, said, None if path is None else os.fspath(path))


def lock(fd: int, *, waits: bool) -> bool:
    """Lock an open file against other processes until it is closed; False where there are no locks.

    BlockingIOError if another has it, unless this ``waits``.
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
    """Open a file to read; a link to a regular file will do."""
    return open(path, "rb", buffering=BUFFER, opener=lambda name, _: _opened(name, os.O_RDONLY | _AT_ONCE))


def open_to_write(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file to write with these flags, made if need be; never through a link, whoever put it there."""
    try:
        return _opened(path, flags | os.O_CREAT | _AT_ONCE | _NO_LINKS)
    except OSError as error:
        if error.errno == errno.ELOOP and Path(path).is_symlink():
            raise NotRegularError(path, "a symbolic link") from None
        raise


def read_regular(path: str | os.PathLike[str], *, most: int) -> bytes:
    """All of a file that has at most so many bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size) if size <= most else b""
        if size > most or (len(content) == size and file.read(1)):  # it has no size of its own, or grew
            raise TooLargeError(path, most)
    return content


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file from where it stands to where it ends now; one that grows all the time has an end too."""
    left = os.fstat(file.fileno()).st_size - file.tell()
    while left > 0 and (line := file.readline(LONGEST_LINE)):
        if len(line) == LONGEST_LINE:
            raise LineTooLongError(file.name)
        left -= len(line)
        yield line


def is_same_file(fd: int, path: str | os.PathLike[str]) -> bool:
    """Does a name still mean the file that is open?"""
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), named)


def _opened(path: str | os.PathLike[str], flags: int) -> int:
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a FIFO that nobody reads, or a socket
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
    return kinds.get(stat.S_IFMT(mode), "no regular file")
