"""Check, on open descriptors, that only this user (and root) can change a folder or a file."""

from __future__ import annotations

import os
import stat
from functools import cache
from pathlib import Path

_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def open_private_folder(folder: Path) -> int:
    """Open a folder, if no other user can write to or replace it or any of its parents.

    Otherwise raises PermissionError, which names the folder that others can change.
    """
    path = Path(os.path.realpath(folder))
    handle = os.open(path.anchor, _FOLDER)
    try:
        _check_folder(handle, Path(path.anchor), is_last=path == Path(path.anchor))
        for depth, name in enumerate(path.parts[1:], 2):  # relative to the open parent, which cannot be replaced
            inner = os.open(name, _FOLDER, dir_fd=handle)
            os.close(handle)
            handle = inner
            _check_folder(handle, Path(*path.parts[:depth]), is_last=depth == len(path.parts))
    except BaseException:
        os.close(handle)
        raise
    return handle


def check_file(file: int, name: str) -> None:
    """Raise PermissionError unless an open file is regular, and owned and writable only by this user."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise PermissionError(f"{name} is not a regular file")
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{name} belongs to user {status.st_uid}")
    if _others_can_write(status):
        raise PermissionError(f"{name} can be written by others: chmod go-w {name}")


def _check_folder(handle: int, path: Path, *, is_last: bool) -> None:
    status = os.fstat(handle)
    owners = {os.geteuid()} if is_last else {os.geteuid(), 0, *_unmapped_root()}
    if status.st_uid not in owners:
        raise PermissionError(f"{path} belongs to user {status.st_uid}, who could put other code there")
    # In a sticky folder (/tmp) only the owner of an entry can rename it.
    if _others_can_write(status) and (is_last or not status.st_mode & stat.S_ISVTX):
        raise PermissionError(f"{path} can be written by others, who could put other code there: chmod go-w {path}")


@cache
def _unmapped_root() -> tuple[int, ...]:
    """The owner shown for root's files in a user namespace that does not map root: the overflow uid."""
    try:
        first = Path("/proc/self/uid_map").read_text().split()
        return () if first == ["0", "0", "4294967295"] else (int(Path("/proc/sys/kernel/overflowuid").read_text()),)
    except (OSError, ValueError):
        return ()


def _others_can_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_own_group(status.st_gid)


def _is_own_group(group: int) -> bool:
    """Whether this is the user's private group: it has the user's name and no other member."""
    if group == 0 and os.geteuid() == 0:
        return True
    try:
        import grp
        import pwd

        user, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except (ImportError, KeyError):
        return False
    return found.gr_name == user and set(found.gr_mem) <= {user}
