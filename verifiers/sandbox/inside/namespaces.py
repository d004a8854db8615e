"""Moves a process into new user, PID, mount, network, IPC, UTS and cgroup namespaces with a minimal root.

These are created once, by the zygote, and shared by all sessions; each session adds its own PID, mount and user
namespaces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verifiers.sandbox.inside import kernel

NOBODY = 65534
INNER = 1000
"""The user id inside a session."""
SCRATCH = "/scratch"
EMPTY = "/.empty"
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
LINKS = {
    "/dev/zero": "/dev/full",  # reads the same; the real one can be mapped as memory that no limit counts
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/shm": f"{SCRATCH}/.shm",
    "/tmp": f"{SCRATCH}/.tmp",
}
NEW_ROOT = "/proc"
"""Where the new root is assembled: a folder that every machine has and that contains no programs."""
PROC_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
TMPFS_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV
SHARED = kernel.NEWNS | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWCGROUP | kernel.NEWPID


@dataclass(frozen=True, slots=True)
class World:
    """The zygote's outer user and group, descriptors of /proc and of the PID namespace it forks from."""

    uid: int
    gid: int
    proc: int
    own_pids: int


def enter(readable: Sequence[str], hidden: Sequence[str], wait_for: Callable[[int], None]) -> World:
    """Enter the namespaces; each parent process that remains outside runs ``wait_for`` until its child ends.

    As root, first make the minimal root, which may include files that only root can reach, and give up root; then a
    user namespace gives the capabilities for the rest. Other users, and a root without capabilities, make everything
    in a user namespace.
    """
    is_root = os.geteuid() == 0 and _exists(NOBODY, "uid_map") and _exists(NOBODY, "gid_map")
    if is_root and _has_power():
        _fork_into(wait_for)
        _make_root(readable, hidden)
        _become_nobody()
        _new_user(kernel.NEWNS | kernel.NEWPID)
        _fork_into(wait_for)
        kernel.mount("proc", "/proc", "proc", PROC_FLAGS)
    else:
        if is_root:
            _become_nobody()
        _new_user(SHARED)
        _fork_into(wait_for)
        _make_root(readable, hidden)
    if not os.path.exists(os.__file__):
        raise OSError(0, "only root can read this Python's folder")
    proc = os.open("/proc", os.O_DIRECTORY)
    own_pids = os.open("self/ns/pid", os.O_RDONLY, dir_fd=proc)
    return World(uid=os.geteuid(), gid=os.getegid(), proc=proc, own_pids=own_pids)


def _has_power() -> bool:
    """Leave the machine's namespaces without a user namespace; False if this root is not permitted to."""
    try:
        kernel.unshare(SHARED)
    except PermissionError:
        return False
    return True


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel.die_with_parent()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # otherwise root would own the /proc files that map_user writes to


def _new_user(others: int) -> None:
    """Create a user namespace, and others owned by it, in which this user keeps its id and has all capabilities."""
    uid, gid = os.geteuid(), os.getegid()
    proc = os.open("/proc", os.O_DIRECTORY)
    try:
        kernel.unshare(kernel.NEWUSER | others)
        map_user(proc, uid, gid, uid, gid)
    finally:
        os.close(proc)


def map_user(proc: int, uid: int, gid: int, inner_uid: int, inner_gid: int) -> None:
    """Map this process's user and group in the user namespace it has just created."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inner_uid} {uid} 1"),
        ("gid_map", f"{inner_gid} {gid} 1"),
    ):
        fd = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


def _exists(number: int, map_name: str) -> bool:
    """Whether this user or group id is mapped here; a container maps only some."""
    with open(f"/proc/self/{map_name}", encoding="ascii") as file:
        rows = [[int(field) for field in line.split()] for line in file]
    return any(first <= number < first + count for first, _, count in rows)


def _fork_into(wait_for: Callable[[int], None]) -> None:
    """Fork into the new PID namespace as its first process; the parent waits."""
    child = os.fork()
    if child:
        wait_for(child)
    kernel.die_with_parent()


def _make_root(readable: Sequence[str], hidden: Sequence[str]) -> None:
    """Make a root that contains only read-only programs and libraries, a few devices and /proc."""
    kernel.set_hostname("sandbox")
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("root", NEW_ROOT, "tmpfs", TMPFS_FLAGS, "size=1m,mode=755")
    for path in readable:
        _show(path)
    for path in hidden:
        _hide(path)
    for path in DEVICES:
        _bind(path)
        kernel.make_read_only(NEW_ROOT + path, is_device=True)
    for path, target in LINKS.items():
        if not os.path.lexists(NEW_ROOT + path):  # this Python may be in /tmp
            os.symlink(target, NEW_ROOT + path)
    for path in ("/proc", SCRATCH, "/etc", "/old"):
        os.makedirs(NEW_ROOT + path, exist_ok=True)
    with open(NEW_ROOT + "/etc/passwd", "w", encoding="ascii") as passwd:
        passwd.write(f"sandbox:x:{INNER}:{INNER}::{SCRATCH}:/bin/sh\n")
    kernel.mount("proc", NEW_ROOT + "/proc", "proc", PROC_FLAGS)
    kernel.pivot_root(NEW_ROOT, NEW_ROOT + "/old")
    os.chdir("/")
    kernel.detach("/old")
    os.rmdir("/old")
    kernel.mount(None, "/", None, kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | TMPFS_FLAGS)


def _show(path: str) -> None:
    """Make a file or folder of the machine visible, read-only."""
    if os.path.islink(path):  # /lib is often a link into /usr
        os.makedirs(os.path.dirname(NEW_ROOT + path), exist_ok=True)
        os.symlink(os.readlink(path), NEW_ROOT + path)
    elif os.path.exists(path):
        _bind(path)
        kernel.make_read_only(NEW_ROOT + path)


def _hide(path: str) -> None:
    """Mount an empty file or folder over a visible one."""
    target = NEW_ROOT + path
    if os.path.isdir(target):
        kernel.mount("hidden", target, "tmpfs", TMPFS_FLAGS | kernel.MS_RDONLY, "size=4k,mode=755")
    elif os.path.exists(target):
        empty = NEW_ROOT + EMPTY
        with open(empty, "w", encoding="ascii"):
            pass
        kernel.mount(empty, target, None, kernel.MS_BIND)
        kernel.make_read_only(target)


def _bind(path: str) -> None:
    if os.path.isdir(path):
        os.makedirs(NEW_ROOT + path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(NEW_ROOT + path), exist_ok=True)
        with open(NEW_ROOT + path, "x", encoding="ascii"):
            pass
    kernel.mount(path, NEW_ROOT + path, None, kernel.MS_BIND | kernel.MS_REC)
