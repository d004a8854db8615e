"""The application's side of a confined process: it sends requests and receives JSON and two files of limited length.

No output is trusted: a reply that is too long, late, invalid or of the wrong shape ends the process.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from verifiers.errors import SandboxError
from verifiers.sandbox.drive import Steps, Until, apart
from verifiers.sandbox.inside.wire import HEADER, framed
from verifiers.sandbox.replies import BadReplyError, Shape, read_reply
from verifiers.sandbox.result import Status

FIRST_BYTES, CHUNK_BYTES = 1 << 12, 1 << 20
"""The size of the first read, enough for most replies, and the maximum of later reads."""
QUICK_BYTES = 1 << 15
"""Longer replies are decoded in a worker thread, so that they do not block an event loop."""
LAST_WORDS_BYTES = 1 << 16
START_S = 60.0


class EndedError(Exception):
    """The process ended, or was killed because of what it did; ``status`` is the status of the result."""

    def __init__(self, status: Status, why: str) -> None:
        super().__init__(why)
        self.status = status


class Process:
    """A confined process. ``request`` talks to it; ``close`` ends it and everything it started."""

    def __init__(self, *, output_bytes: int) -> None:
        self.output_bytes = output_bytes
        self.is_used = False
        self._is_ready = False
        self._number = 0
        self._received = bytearray()
        self._began = time.monotonic()
        held = _Held()
        self._held = held
        try:
            held.conn, held.far = socket.socketpair()
            held.conn.setblocking(False)
            held.out, held.err = (_capped_file(name, output_bytes) for name in ("stdout", "stderr"))
        except BaseException:
            held.close()
            raise
        self._end = weakref.finalize(self, held.close)

    def hand_over(self, control: socket.socket, order: Mapping[str, Any]) -> None:
        """Send descriptors to the zygote, which forks the process; raises BlockingIOError if the socket is full."""
        held = self._held
        socket.send_fds(control, [json.dumps(order).encode()], [held.far.fileno(), held.out, held.err])
        held.far.close()

    def on_begin(self, callback: Callable[[], None]) -> None:
        """Call this once, when the process has started or is closed before it has."""
        self._held.on_begin = callback

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call this once, when the process is closed or garbage-collected."""
        self._held.on_close = callback

    @property
    def is_killed(self) -> bool:
        return self._held.is_killed

    def kill(self) -> None:
        """Kill the process and everything it started; a pending `request` then fails, and its caller closes it."""
        self._held.kill()

    def close(self) -> None:
        """End the process and release its descriptors."""
        self._end()

    def request(self, request: Mapping[str, Any], timeout_s: float, shape: Shape) -> Steps[dict[str, Any]]:
        """Send one request and return its reply of that shape; `EndedError` if the process gives none in time.

        The timeout starts when the process has started, which may be after the request was sent.
        """
        self._number += 1
        if unsent := self._send(memoryview(framed({**request, "number": self._number}))):
            yield from self._send_all(unsent)
        if not self._is_ready:
            yield from self._begin()
        self._began = time.monotonic()
        message = yield from self._receive(self._began + timeout_s, shape.most_bytes)
        try:
            if len(message) <= QUICK_BYTES:
                reply = read_reply(message, shape)
            else:
                reply = yield from apart(read_reply, message, shape)
        except BadReplyError as error:
            raise EndedError("killed", f"it sent an invalid reply: {error}") from None
        if "ended" in reply:
            raise _ended(reply["ended"])
        if reply.get("number") != self._number:
            raise EndedError("killed", "it sent a reply to another request")
        return reply

    def time_s(self) -> float:
        """Seconds since the last request started."""
        return time.monotonic() - self._began

    def rewind(self) -> None:
        """Rewind the output files, so that the next cell writes from their start."""
        for fd in (self._held.out, self._held.err):
            os.lseek(fd, 0, os.SEEK_SET)

    def output(self) -> tuple[str, str, bool]:
        """The standard output, the standard error, and whether one of them is full."""
        out, is_out_full = _written(self._held.out, self.output_bytes)
        err, is_err_full = _written(self._held.err, self.output_bytes)
        return out, err, is_out_full or is_err_full

    def _begin(self) -> Steps[None]:
        """Wait for the process's pidfd, and then for its message that it is confined."""
        deadline = time.monotonic() + START_S
        held = self._held
        while not self._is_ready:
            try:
                message, fds, _, _ = socket.recv_fds(held.conn, 1, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                if not (yield Until(held.conn.fileno(), deadline)):
                    raise SandboxError(f"a sandbox did not start within {START_S:.0f} s") from None
                continue
            except OSError as error:
                raise SandboxError(f"a sandbox could not be started: {error}") from error
            if message == b"P" and fds:
                held.pidfd = fds[0]
            elif message == b"R" and held.pidfd >= 0:
                self._is_ready = True
                held.begun()
            else:
                why = yield from self._last_words(deadline)
                raise SandboxError(f"a sandbox could not be started: {why}")

    def _last_words(self, deadline: float) -> Steps[str]:
        try:
            return (yield from self._receive(deadline, LAST_WORDS_BYTES)).decode(errors="replace")
        except EndedError:
            return "its process ended at once"

    def _send(self, message: memoryview) -> memoryview:
        """Send as much as possible without waiting, usually everything; return the rest."""
        try:
            return message[self._held.conn.send(message[:CHUNK_BYTES]) :]
        except BlockingIOError:
            return message
        except OSError:
            return message[:0]  # it has ended; the reason follows from what it sent

    def _send_all(self, unsent: memoryview) -> Steps[None]:
        deadline = time.monotonic() + START_S
        while unsent:
            if not (yield Until(self._held.conn.fileno(), deadline, is_write=True)):
                raise EndedError("killed", "it did not read its next request")
            unsent = self._send(unsent)

    def _receive(self, deadline: float, cap: int) -> Steps[bytearray]:
        """The next message without its header. Later bytes, such as the zygote's note on its end, are kept."""
        received = self._received
        while (missing := _missing(received, cap)) > 0:
            if not (yield Until(self._held.conn.fileno(), deadline)):
                raise EndedError("timeout", "it did not stop in time")
            try:
                chunk = self._held.conn.recv(min(max(missing, FIRST_BYTES), CHUNK_BYTES))
            except BlockingIOError:
                continue
            except OSError:
                chunk = b""
            if not chunk:
                raise EndedError("killed", "its process ended")
            received += chunk
        end = len(received) + missing
        self._received = received[end:]
        del received[end:], received[: HEADER.size]
        return received


class _Held:
    """The descriptors of a process; closing them ends it. Separate from `Process`, so that its finalizer can use it."""

    conn: socket.socket
    far: socket.socket
    out = err = pidfd = -1

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.is_killed = False
        self.on_begin: Callable[[], None] | None = None
        self.on_close: Callable[[], None] | None = None

    def begun(self) -> None:
        callback, self.on_begin = self.on_begin, None
        if callback is not None:
            callback()

    def kill(self) -> None:
        if self.owner != os.getpid():  # a fork of the application must not end its parent's processes
            return
        self.is_killed = True
        try:
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self.conn.shutdown(socket.SHUT_RDWR)
        except (OSError, AttributeError):  # it has ended by itself, or never started
            return

    def close(self) -> None:
        self.kill()
        for end in (getattr(self, "conn", None), getattr(self, "far", None)):
            if end is not None:
                end.close()
        for fd in (self.out, self.err, self.pidfd):
            if fd >= 0:
                os.close(fd)
        self.begun()
        if self.on_close is not None:
            self.on_close()


def _capped_file(name: str, size: int) -> int:
    """A memfd of fixed size; both sides hold it, so it outlives the process."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _missing(received: bytearray, cap: int) -> int:
    """How many bytes a complete message still needs; negative if there are more than that."""
    if len(received) < HEADER.size:
        return HEADER.size - len(received)
    (length,) = HEADER.unpack_from(received)
    if length > cap:
        raise EndedError("killed", f"it sent a reply of {length} bytes; at most {cap} are allowed")
    return int(length) + HEADER.size - len(received)


def _written(fd: int, size: int) -> tuple[str, bool]:
    """The text written to a capped file since it was rewound, and whether the file is full."""
    end = min(os.lseek(fd, 0, os.SEEK_CUR), size)
    return os.pread(fd, end, 0).decode(errors="replace") if end else "", end == size


def _ended(note: Mapping[str, Any]) -> EndedError:
    """The error for the zygote's note on a process that ended."""
    if note["why"] == "memory":
        return EndedError("memory", "it used more memory than allowed")
    if note["why"] == "disk":
        return EndedError("killed", "it used more disk than allowed")
    number = note["number"]
    if note["why"] == "signal":
        name = signal.Signals(number).name if number in set(signal.Signals) else number
        return EndedError("killed", f"its process was ended by signal {name}")
    return EndedError("killed", f"its process ended by itself, with code {number}")
