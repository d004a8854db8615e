"""The working folder of a session: a mount of its own if possible, otherwise a folder on the machine's disk."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from verifiers.sandbox.inside.confine import Policy
from verifiers.sandbox.inside.namespaces import NOBODY, SCRATCH

FIRST_UID = 2_000_000_000
UIDS = 1_000_000
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Scratch:
    """The working folder of a session, and the user it switches to (None: it keeps its user)."""

    path: str
    uid: int | None = None
    is_on_disk: bool = False

    @classmethod
    def make(cls, policy: Policy) -> Scratch:
        """A folder for one session. Under root, each session gets its own user, so that it cannot affect others."""
        if policy.world is not None:
            return cls(SCRATCH)
        path = tempfile.mkdtemp(prefix="sandbox-")
        for uid in (FIRST_UID + next(_numbers) % UIDS, NOBODY) if os.geteuid() == 0 else ():
            try:
                os.chown(path, uid, uid)
            except OSError:  # such a user may not exist in a container
                continue
            return cls(path, uid, is_on_disk=True)
        return cls(path, None, is_on_disk=True)

    def size(self, most: int) -> int:
        """The size of its files in bytes, at least one page per file; stops counting above ``most``."""
        total, folders = 0, [self.path]
        while folders and total <= most:
            try:
                with os.scandir(folders.pop()) as entries:
                    for entry in entries:
                        status = entry.stat(follow_symlinks=False)
                        total += max(4096, status.st_blocks * 512)
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        if total > most:
                            break
            except OSError:  # just removed, or its path is too long
                continue
        return total

    def nameless_size(self, pid: int, most: int) -> int:
        """The size of files that the session deleted but holds open; one that is only mapped counts as a full disk."""
        device = os.stat(self.path).st_dev
        with _as_user(self.uid):
            try:
                opened = _deleted_files(f"/proc/{pid}/fd", device)
                with open(f"/proc/{pid}/maps", "rb") as maps:
                    deleted = [line.split(maxsplit=5) for line in maps if line.endswith(b" (deleted)\n")]
            except OSError:  # the process has just ended, or is not confined yet
                return 0
        mapped = {int(row[4]) for row in deleted if row[5].startswith(os.fsencode(self.path))}
        return sum(opened.values()) + most * len(mapped - opened.keys())

    def remove(self) -> None:
        """Delete the folder, however deeply nested, after its session has ended."""
        if not self.is_on_disk:
            return
        try:
            os.rmdir(self.path)
        except OSError:
            done = subprocess.run(["rm", "-rf", "--", self.path], stderr=subprocess.DEVNULL, check=False)
            if done.returncode:
                shutil.rmtree(self.path, ignore_errors=True)


def _deleted_files(folder: str, device: int) -> dict[int, int]:
    """The sizes by inode of deleted files on a device that descriptors in a folder of /proc hold open."""
    found = {}
    for name in os.listdir(folder):
        try:
            status = os.stat(f"{folder}/{name}")
        except FileNotFoundError:  # just closed
            continue
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 0 and status.st_dev == device:
            found[status.st_ino] = status.st_blocks * 512
    return found


@contextlib.contextmanager
def _as_user(uid: int | None) -> Iterator[None]:
    """Switch to the session's user: a root without all capabilities can read its process only as that user."""
    if uid is None:
        yield
        return
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
