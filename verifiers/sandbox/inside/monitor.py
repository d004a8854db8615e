"""Finds sessions that use more memory or disk than allowed, where no kernel limit counts it."""

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
"""The maximum amount of data in a pipe; sessions cannot enlarge pipes."""
OF_MEMORY = (b"\nRssAnon:", b"\nRssShmem:", b"\nVmSwap:")
MUCH_OF_STATUS = 4096


@dataclass(slots=True)
class Watched:
    """A session from the zygote's view; ``offence`` is the limit for which it was ended.

    A shell has further processes: ``proc`` is the /proc of their namespace, once received through ``handover``.
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
    """Checks up to `AT_ONCE` sessions ten times a second, in turn, so that thousands cost no more than a few.

    It runs in the zygote, out of reach of the sessions. The first process of a shell checks too, and more often; it can
    end the cell's programs and keep its files, whereas the monitor ends the session.
    """

    def __init__(self) -> None:
        self._proc = -1
        self._own = 0
        self._next = 0
        self._due = 0.0

    def offenders(self, sessions: Mapping[int, Watched]) -> list[Watched]:
        """The sessions to end, among the next few."""
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
            # The limit is above that of the shell's first process, and must be exceeded twice, so that that one, which
            # keeps the session, acts first.
            is_over = session_memory(session.proc, memory + 2 * SLACK) > memory + 2 * SLACK
            session.sightings = session.sightings + 1 if is_over else 0
            if session.sightings >= 2:
                return "memory"
        disk, scratch = session.order["disk"], session.scratch
        if scratch.is_on_disk and scratch.size(disk) + scratch.nameless_size(session.pid, disk) > disk:
            return "disk"
        return None


def session_memory(proc: int, allowed: int) -> int:
    """The memory in bytes of all processes of a namespace except the first; ``proc`` is its /proc."""
    try:
        return held_memory(proc, [name for name in os.listdir(proc) if name.isdigit() and name != "1"], allowed)
    except OSError:  # its first process has ended, and all others with it
        return 0


def held_memory(proc: int, pids: Sequence[str], allowed: int) -> int:
    """The memory in bytes of processes. Pipes and sockets are examined only if they could exceed what is allowed."""
    held = dict(_living(proc, pid) for pid in pids)
    total = sum(held.values())
    opened = {path: _descriptors(proc, path) for path in held}
    if total + _socket_bytes() * sum(opened.values()) <= allowed:
        return total
    buffers: dict[str, int] = {}
    for path, count in opened.items():
        # If the descriptors of a process cannot be read (its program may be unreadable), assume the maximum.
        buffers.update(_buffers(proc, path) or {path: _socket_bytes() * count})
    return total + sum(buffers.values())


@functools.cache
def _socket_bytes() -> int:
    """The maximum amount of data in one socket: kernel memory that no limit counts."""
    near, far = socket.socketpair()
    with near, far:
        return near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def resident_memory(proc: int, pid: str) -> int:
    """The memory in bytes of a process, including shared and swapped memory; 0 if it has ended."""
    return _living(proc, pid)[1]


def _living(proc: int, pid: str) -> tuple[str, int]:
    """The path of a process in /proc, and the memory it holds.

    If the first thread of a process has ended, its status shows no memory, although other threads still hold it: then
    the path is that of such a thread.
    """
    held = _status_memory(proc, pid)
    if held is not None:
        return pid, held
    for name in _names(proc, f"{pid}/task"):
        path = f"{pid}/task/{name}"
        if (held := _status_memory(proc, path)) is not None:
            return path, held
    return pid, 0


def _status_memory(proc: int, path: str) -> int | None:
    """The memory in the ``status`` file of a process or thread; None if it contains none."""
    try:
        fd = os.open(f"{path}/status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    except OSError:
        return None
    try:
        status = os.read(fd, MUCH_OF_STATUS)
    except OSError:  # it has just ended
        return None
    finally:
        os.close(fd)
    found = [status[at + len(name) :].split(maxsplit=1) for name in OF_MEMORY if (at := status.find(name)) >= 0]
    return sum(int(rest[0]) << 10 for rest in found if rest and rest[0].isdigit()) if found else None


def _descriptors(proc: int, path: str) -> int:
    """The number of open descriptors of a process."""
    try:
        # Since Linux 6.2 this is the size of the folder; before, the size is 0.
        return os.stat(f"{path}/fd", dir_fd=proc).st_size or len(_names(proc, f"{path}/fd"))
    except OSError:
        return 0


def _buffers(proc: int, path: str) -> dict[str, int]:
    """The open files of a process, each with the maximum of data in its buffer: 0 unless it is a pipe or socket."""
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
