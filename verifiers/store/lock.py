"""A lock that lets one process at a time write to a folder; it is released when its process dies."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

from verifiers.files import HAS_LOCKS, lock, open_to_write

logger = logging.getLogger(__name__)


class RunInUseError(RuntimeError):
    """Another writer has this run directory open."""


class FolderLock:
    """A reentrant lock on a folder: it is released when it has been exited as often as entered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fd: int | None = None
        self._holds = 0
        self._guard = threading.Lock()

    def __enter__(self) -> FolderLock:
        with self._guard:
            if self._holds == 0:
                self._fd = _acquire(self.folder)
            self._holds += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._guard:
            self._holds -= 1
            if self._holds == 0 and self._fd is not None:
                _held.discard(self._fd)
                fd, self._fd = self._fd, None
                _release(fd)


def _acquire(folder: Path) -> int | None:
    if not HAS_LOCKS:
        return None
    fd = open_to_write(folder / ".lock", os.O_RDWR)
    try:
        _lock(fd, folder)
        with suppress(OSError):  # the text is only for messages, and a run can be deleted from a full disk
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    _keep_from_children(fd)
    return fd


def _release(fd: int) -> None:
    try:
        with suppress(OSError):  # clear the text: the process may live on, but is no longer the writer
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _lock(fd: int, folder: Path) -> None:
    try:
        is_locked = lock(fd, waits=False)
    except BlockingIOError:
        holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
        raise RunInUseError(
            f"{folder} is being written by {holder}; wait for it to end, stop it, or start a new run directory"
        ) from None
    if not is_locked:
        logger.warning("%s: this file system does not support locks; make sure that only one process writes", folder)


# Children close the descriptor: otherwise a forked worker that outlives its parent would keep the parent's lock.
_held: set[int] = set()
_is_registered = False


def _keep_from_children(fd: int) -> None:
    global _is_registered
    _held.add(fd)
    if not _is_registered:
        _is_registered = True
        os.register_at_fork(after_in_child=_close_held)


def _close_held() -> None:
    for fd in _held:
        os.close(fd)
    _held.clear()
