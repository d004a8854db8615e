"""Locks that programs of a shell ask for → locks on the session's own files, and nothing on files that others share.

A lock is on the file itself, whoever opened it by whatever mount: one on a library or a device would be seen by other
sessions, and could keep the machine's own programs waiting. The filter of calls cannot tell files apart, so it has each
lock of a shell's programs wait for the zygote, which can. (A cell of Python is one process with files of its own: there
locks would mean nothing, and the filter answers by itself.)
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from verifiers.sandbox.inside import kernel, seccomp
from verifiers.sandbox.inside.namespaces import SCRATCH

NOTIFICATION = struct.Struct("=QIIiIQ6Q")
ANSWER = struct.Struct("=QqiI")
RECEIVE, SEND = 0xC0502100, 0xC0182101
GO_ON = 1
DEVICE = struct.Struct("=Q")


def hand_over(handover: int) -> None:
    """In the session: give the zygote what it watches it by, before the filter that allows no more such gifts."""
    given = [os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        given.append(kernel.seccomp_listener(kernel.program(seccomp.lock_program(seccomp.NOTIFY))))
    except OSError:  # something around this program listens already, and there can be only one: no locks then
        kernel.seccomp(kernel.program(seccomp.lock_program(seccomp.NO_EFFECT)))
    with socket.socket(fileno=handover) as far:
        socket.send_fds(far, [DEVICE.pack(os.stat(SCRATCH).st_dev)], given)
    for fd in given:
        os.close(fd)


def take_over(handover: socket.socket) -> tuple[int, int, int]:
    """In the zygote: the session's /proc, its listener and the device of its files; -1 for what did not come."""
    message, fds, _, _ = socket.recv_fds(handover, DEVICE.size, 2, socket.MSG_CMSG_CLOEXEC)
    proc, listener = (*fds, -1, -1)[:2]
    return proc, listener, DEVICE.unpack(message)[0] if len(message) == DEVICE.size else -1


def answer(listener: int, device: int) -> None:
    """Let one lock be taken if it is on the device of the session's own files; else it has no effect.

    What was looked at is what is locked: the one who asked waits, and only another thread could exchange its file.
    """
    try:
        asked = NOTIFICATION.unpack(fcntl.ioctl(listener, RECEIVE, bytes(NOTIFICATION.size)))
        identity, task, descriptor = asked[0], asked[1], asked[6] & 0xFFFFFFFF
        flags = GO_ON if _is_own(task, descriptor, device) and _is_alone(task) else 0
        fcntl.ioctl(listener, SEND, ANSWER.pack(identity, 0, 0, flags))
    except OSError:  # who asked has just ended, or was interrupted and asks again
        return


def _is_own(task: int, descriptor: int, device: int) -> bool:
    try:
        return os.stat(f"/proc/{task}/fd/{descriptor}").st_dev == device
    except OSError:
        return False


def _is_alone(task: int) -> bool:
    """Is this the only thread of its process?"""
    return os.listdir(f"/proc/{task}/task") == [str(task)]
