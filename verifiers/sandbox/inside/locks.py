"""Locks that programs ask for → locks on their session's own files, and nothing on files that others share.

A lock is on the file itself, whoever opened it by whatever mount: one on a library or a device would be seen by other
sessions, and could keep the machine's own programs waiting. The filter of calls cannot tell files apart, so it has each
lock wait for the zygote, which can.
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
    """In the zygote: have all that is forked from here ask for its locks; a descriptor to hear it by, or -1.

    There can be only one listener, and what this program runs in may have one already.
    """
    try:
        return kernel.seccomp_listener(kernel.program(seccomp.lock_program()))
    except OSError:
        return -1


def answer(listener: int) -> None:
    """Let one lock be taken if it is on a file of the session's own; else it has no effect.

    What was looked at is what is locked: the one who asked waits, and only another thread could exchange its file.
    """
    try:
        asked = NOTIFICATION.unpack(fcntl.ioctl(listener, RECEIVE, bytes(NOTIFICATION.size)))
        identity, task, descriptor = asked[0], asked[1], asked[6] & 0xFFFFFFFF
        flags = GO_ON if _is_own(task, descriptor) and _is_alone(task) else 0
        fcntl.ioctl(listener, SEND, ANSWER.pack(identity, 0, 0, flags))
    except OSError:  # who asked has just ended, or was interrupted and asks again
        return


def _is_own(task: int, descriptor: int) -> bool:
    """Does the file lie where only this session has its files?"""
    try:
        return os.stat(f"/proc/{task}/fd/{descriptor}").st_dev == os.stat(f"/proc/{task}/root{SCRATCH}").st_dev
    except OSError:
        return False


def _is_alone(task: int) -> bool:
    """Is this the only thread of its process?"""
    try:
        return os.listdir(f"/proc/{task}/task") == [str(task)]
    except OSError:
        return False
