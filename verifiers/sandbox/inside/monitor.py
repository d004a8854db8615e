"""Living sessions → those that hold more than they may: the memory and disk that no limit of the kernel's counts."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.sandbox.inside.scratch import Scratch

EACH_S = 0.1
AT_ONCE = 64
SLACK = 16 << 20
PIPE_BYTES = 64 << 10
"""What may wait in a pipe at most, as long as it cannot be made longer."""
OF_MEMORY = (b"\nRssAnon:", b"\nRssShmem:", b"\nVmSwap:")
MUCH_OF_STATUS = 4096


@dataclass(slots=True)
class Watched:
    """A session as the zygote sees it; ``offence`` is what it was ended for.

    A shell has processes of its own: ``proc`` is the /proc they are seen in, once it has come through ``handover``.
    """

    pid: int
    pidfd: int
    conn: int
    order: Mapping[str, Any]
    scratch: Scratch
    handover: socket.socket | None = None
    proc: int = -1
    sightings: int = 0
    offence: str | None = None


class Monitor:
    """Looks at the sessions in turn, a few ten times a second, so that thousands cost no more than a few.

    Nothing that a session does reaches it: it runs in the zygote. The first process of a shell looks too, and more
    often, but only while a cell runs; it can end the cell's programs and keep its files, where this ends the session.
    """

    def __init__(self) -> None:
        self._proc = -1
        self._own = 0
        self._next = 0
        self._due = 0.0

    def offenders(self, sessions: Mapping[int, Watched]) -> list[Watched]:
        """Those of the next few that are to be ended."""
        now = time.monotonic()
        if not sessions or now < self._due:
            return []
        self._due = now + EACH_S
        if self._proc < 0:
            self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._own = resident_memory(self._proc, str(os.getpid()))
        living = list(sessions.values())
        start = self._next % len(living)
        self._next = start + AT_ONCE
        found = []
        for session in (living[start:] + living[:start])[:AT_ONCE]:
            session.offence = session.offence or self._offence(session)
            if session.offence:
                found.append(session)
        return found

    def _offence(self, session: Watched) -> str | None:
        memory = session.order["memory"]
        if held_memory(self._proc, [str(session.pid)], self._own + memory + SLACK) > self._own + memory + SLACK:
            return "memory"
        if session.proc >= 0:
            # More than the shell's first process allows, and twice: that is the gentler of the two, and comes first.
            is_over = session_memory(session.proc, memory + 2 * SLACK) > memory + 2 * SLACK
            session.sightings = session.sightings + 1 if is_over else 0
            if session.sightings >= 2:
                return "memory"
        disk, scratch = session.order["disk"], session.scratch
        if scratch.is_on_disk and scratch.size(disk) + scratch.nameless_size(session.pid, disk) > disk:
            return "disk"
        return None


def session_memory(proc: int, allowed: int) -> int:
    """Bytes of memory that all processes of a namespace hold, but the first; ``proc`` is its /proc."""
    try:
        return held_memory(proc, [name for name in os.listdir(proc) if name.isdigit() and name != "1"], allowed)
    except OSError:  # its first process has ended, and all others with it
        return 0


def held_memory(proc: int, pids: Sequence[str], allowed: int) -> int:
    """Bytes of memory that processes hold. Pipes and sockets are looked at only if they could make it too much."""
    held = dict(_living(proc, pid) for pid in pids)
    total = sum(held.values())
    opened = {path: _descriptors(proc, path) for path in held}
    if total + _socket_bytes() * sum(opened.values()) <= allowed:
        return total
    buffers: dict[str, int] = {}
    for path, count in opened.items():
        # What cannot be looked at, as of a program that nobody may read, counts as the worst it can be.
        buffers.update(_buffers(proc, path) or {path: _socket_bytes() * count})
    return total + sum(buffers.values())


@functools.cache
def _socket_bytes() -> int:
    """What may wait in one socket at most: memory of the kernel's, that no limit counts."""
    near, far = socket.socketpair()
    with near, far:
        return near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def resident_memory(proc: int, pid: str) -> int:
    """Bytes of memory of a process, with shared memory and what was swapped out; 0 if it is gone."""
    return _living(proc, pid)[1]


def _living(proc: int, pid: str) -> tuple[str, int]:
    """Where in /proc a process is seen, and the memory it holds.

    One whose first thread has ended shows nothing, though its other threads hold it all still: one of them is it then.
    """
    held = _said_memory(proc, pid)
    if held is not None:
        return pid, held
    for name in _names(proc, f"{pid}/task"):
        path = f"{pid}/task/{name}"
        if (held := _said_memory(proc, path)) is not None:
            return path, held
    return pid, 0


def _said_memory(proc: int, path: str) -> int | None:
    """What the ``status`` of a process or thread says of memory; None where it says nothing."""
    try:
        fd = os.open(f"{path}/status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    except OSError:
        return None
    try:
        said = os.read(fd, MUCH_OF_STATUS)
    except OSError:  # it has just ended
        return None
    finally:
        os.close(fd)
    found = [said[at + len(name) :].split(maxsplit=1) for name in OF_MEMORY if (at := said.find(name)) >= 0]
    return sum(int(rest[0]) << 10 for rest in found if rest and rest[0].isdigit()) if found else None


def _descriptors(proc: int, path: str) -> int:
    """How many descriptors a process has open."""
    try:
        # The size of the folder says so since Linux 6.2; before, it is 0.
        return os.stat(f"{path}/fd", dir_fd=proc).st_size or len(_names(proc, f"{path}/fd"))
    except OSError:
        return 0


def _buffers(proc: int, path: str) -> dict[str, int]:
    """What a process has open, each with the most that may wait in it: nothing in what is no pipe or socket."""
    found = {}
    for name in _names(proc, f"{path}/fd"):
        try:
            target = os.readlink(f"{path}/fd/{name}", dir_fd=proc)
        except OSError:  # just closed
            continue
        is_pipe, is_socket = target.startswith("pipe:"), target.startswith("socket:")
        found[target] = PIPE_BYTES if is_pipe else _socket_bytes() if is_socket else 0
    return found


def _names(proc: int, folder: str) -> list[str]:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc)
    except OSError:
        return []
    try:
        return os.listdir(fd)
    except OSError:
        return []
    finally:
        os.close(fd)
