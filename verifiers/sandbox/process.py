"""One confined process, as the application holds it: requests go in, length-capped JSON and two capped files come out.

Nothing that comes out is believed: a reply that is too long, late, garbled or not what was asked for ends the process.
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
"""A reply is read in one go where it is short, as most are."""
QUICK_BYTES = 1 << 15
"""What is longer is not decoded where it would hold up an event loop."""
LAST_WORDS_BYTES = 1 << 16
START_S = 60.0


class EndedError(Exception):
    """The process is gone, or was ended for what it did; ``status`` says which, for the result."""

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
        """Send the far ends to the zygote, which starts the process; raises BlockingIOError if it has to wait."""
        held = self._held
        socket.send_fds(control, [json.dumps(order).encode()], [held.far.fileno(), held.out, held.err])
        held.far.close()

    def on_begin(self, callback: Callable[[], None]) -> None:
        """Call this, once, when the process is there, or closed before it ever was."""
        self._held.on_begin = callback

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call this, once, when the process is closed or forgotten."""
        self._held.on_close = callback

    @property
    def is_killed(self) -> bool:
        return self._held.is_killed

    def kill(self) -> None:
        """End the process and everything in it, now; whoever waits for a reply hears of it and closes."""
        self._held.kill()

    def close(self) -> None:
        """End the process, and let go of all that belongs to it."""
        self._end()

    def request(self, request: Mapping[str, Any], timeout_s: float, shape: Shape) -> Steps[dict[str, Any]]:
        """One request and its reply, of that shape; `EndedError` if the process did not live to give one in time.

        The clock starts when the process is there, which may be after the request was sent.
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
            raise EndedError("killed", f"it sent a reply that is none: {error}") from None
        if "ended" in reply:
            raise _ended(reply["ended"])
        if reply.get("number") != self._number:
            raise EndedError("killed", "it sent a reply that nobody had asked for")
        return reply

    def time_s(self) -> float:
        """Seconds since the last request was begun."""
        return time.monotonic() - self._began

    def rewind(self) -> None:
        """Let the next cell write from the start of the output files."""
        for fd in (self._held.out, self._held.err):
            os.lseek(fd, 0, os.SEEK_SET)

    def output(self) -> tuple[str, str, bool]:
        """Standard output, standard error, and whether one of them is full."""
        out, is_out_full = _written(self._held.out, self.output_bytes)
        err, is_err_full = _written(self._held.err, self.output_bytes)
        return out, err, is_out_full or is_err_full

    def _begin(self) -> Steps[None]:
        """Wait for the handle to end the process by, and then for its word that it is confined."""
        deadline = time.monotonic() + START_S
        held = self._held
        while not self._is_ready:
            try:
                said, fds, _, _ = socket.recv_fds(held.conn, 1, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                if not (yield Until(held.conn.fileno(), deadline)):
                    raise SandboxError(f"a sandbox did not start within {START_S:.0f} s") from None
                continue
            except OSError as error:
                raise SandboxError(f"a sandbox could not be started: {error}") from error
            if said == b"P" and fds:
                held.pidfd = fds[0]
            elif said == b"R" and held.pidfd >= 0:
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
        """Send what can be sent at once, which mostly is all of it; what is left comes back."""
        try:
            return message[self._held.conn.send(message[:CHUNK_BYTES]) :]
        except BlockingIOError:
            return message
        except OSError:
            return message[:0]  # it is gone; what it left to read says why

    def _send_all(self, unsent: memoryview) -> Steps[None]:
        deadline = time.monotonic() + START_S
        while unsent:
            if not (yield Until(self._held.conn.fileno(), deadline, is_write=True)):
                raise EndedError("killed", "it did not take its next request")
            unsent = self._send(unsent)

    def _receive(self, deadline: float, cap: int) -> Steps[bytearray]:
        """The next message without its header. What came after it, as the zygote's last word on it may, is kept."""
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
    """The descriptors of a process; closing them ends it. Apart from `Process`, so that a finalizer can hold it."""

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
        if self.owner != os.getpid():  # a fork of the application ends nothing of its parent's
            return
        self.is_killed = True
        try:
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self.conn.shutdown(socket.SHUT_RDWR)
        except (OSError, AttributeError):  # it has ended by itself, or was never begun
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
    """A file in memory that can never be longer: both sides hold it, so it outlives the process."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _missing(received: bytearray, cap: int) -> int:
    """How many bytes are wanted for a whole message; less than none if there are more."""
    if len(received) < HEADER.size:
        return HEADER.size - len(received)
    (length,) = HEADER.unpack_from(received)
    if length > cap:
        raise EndedError("killed", f"it sent a reply of {length} bytes, where {cap} are allowed")
    return int(length) + HEADER.size - len(received)


def _written(fd: int, size: int) -> tuple[str, bool]:
    """What was written to a capped file since it was wound back, and whether that is all it can hold."""
    end = min(os.lseek(fd, 0, os.SEEK_CUR), size)
    return os.pread(fd, end, 0).decode(errors="replace") if end else "", end == size


def _ended(note: Mapping[str, Any]) -> EndedError:
    """What the zygote wrote when it found the process ended."""
    if note["why"] == "memory":
        return EndedError("memory", "it took more memory than it may")
    if note["why"] == "disk":
        return EndedError("killed", "it took more disk than it may")
    number = note["number"]
    if note["why"] == "signal":
        name = signal.Signals(number).name if number in set(signal.Signals) else number
        return EndedError("killed", f"its process was ended by signal {name}")
    return EndedError("killed", f"its process ended by itself, with code {number}")
