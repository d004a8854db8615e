"""Landlock rules for the files that may be read and written, as far as this kernel's version supports them."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable

from verifiers.sandbox.inside import kernel

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_BLOCK, REFER, TRUNCATE, IOCTL_DEV = 1 << 6, 1 << 11, 1 << 13, 1 << 14, 1 << 15
FIRST_VERSION = (1 << 13) - 1
ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
NETWORK = 3  # bind and connect, over TCP
SCOPES = 3  # abstract sockets and signals


def restrict(
    *, version: int, readable: Iterable[str], listable: Iterable[str], writable: Iterable[str], devices: Iterable[str]
) -> None:
    """Restrict this process to these files and folders; nothing else can be opened."""
    files = FIRST_VERSION
    for since, right in ((2, REFER), (3, TRUNCATE), (5, IOCTL_DEV)):
        files |= right if version >= since else 0
    known_bytes = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = kernel.landlock_ruleset(struct.pack("=QQQ", files, NETWORK, SCOPES)[:known_bytes])
    try:
        for path in readable:
            _allow(ruleset, path, files & (EXECUTE | READ_FILE | READ_DIR))
        for path in listable:
            _allow(ruleset, path, files & READ_DIR)
        for path in writable:
            _allow(ruleset, path, files & ~(MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV))
        for path in devices:
            _allow(ruleset, path, files & (READ_FILE | WRITE_FILE | TRUNCATE))
        kernel.landlock_restrict(ruleset)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError, NotADirectoryError):
        return  # an unreachable path needs no rule
    try:
        is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
        kernel.landlock_allow(ruleset, fd, access if is_folder else access & ON_FILES)
    finally:
        os.close(fd)
