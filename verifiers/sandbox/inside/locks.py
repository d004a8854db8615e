"""Allows file locks on a session's own files only; locks on shared files have no effect.

A lock belongs to the inode, whatever the mount: a lock on a library or a device would be visible to other sessions, and
could block programs of the machine. A seccomp filter cannot distinguish files, so each lock request waits for a
decision of the zygote.
"""

from __future__ import annotations

import fcntl
import os
import struct

from verifiers.sandbox.inside import kernel, seccomp
from verifiers.sandbox.inside.namespaces import SCRATCH

NOTIFICATION = struct.Struct("=QIIiIQ6Q")
ANSWER = struct.Struct("=QqiI")
RECEIVE, SEND = 0xC0502100, 0xC0182101
GO_ON = 1


def listen() -> int:
    """In the zygote: make lock requests of all later forks wait for an answer; return the listener's descriptor, or -1.

    There can be only one listener, and the surrounding container may already have one.
    """
    try:
        return kernel.seccomp_listener(kernel.program(seccomp.lock_program()))
    except OSError:
        return -1


def answer(listener: int) -> None:
    """Answer one lock request: allow it on a file of the session's own; else it succeeds without effect.

    The checked file is the one that is locked: the caller waits, and only another thread could replace its descriptor.
    """
    try:
        asked = NOTIFICATION.unpack(fcntl.ioctl(listener, RECEIVE, bytes(NOTIFICATION.size)))
        identity, task, descriptor = asked[0], asked[1], asked[6] & 0xFFFFFFFF
        flags = GO_ON if _is_own(task, descriptor) and _is_alone(task) else 0
        fcntl.ioctl(listener, SEND, ANSWER.pack(identity, 0, 0, flags))
    except OSError:  # the caller has just ended, or was interrupted and will ask again
        return


def _is_own(task: int, descriptor: int) -> bool:
    """Whether the file is on the session's own scratch mount."""
    try:
        return os.stat(f"/proc/{task}/fd/{descriptor}").st_dev == os.stat(f"/proc/{task}/root{SCRATCH}").st_dev
    except OSError:
        return False


def _is_alone(task: int) -> bool:
    """Whether this is the only thread of its process."""
    try:
        return os.listdir(f"/proc/{task}/task") == [str(task)]
    except OSError:
        return False
