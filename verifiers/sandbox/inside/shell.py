"""A cell of bash → its exit code: one shell lives on from cell to cell, and everything it started can be ended."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from typing import Any

from verifiers.sandbox.inside.monitor import SLACK, session_memory

SHELLS = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")
CELLS, CODES = 9, 8
# Reads a cell up to a null byte, runs it, and writes its exit code; the cell sees neither of the two pipes.
LOOP = f"""
while IFS= read -r -d '' -u {CELLS} cell; do
  eval "$cell" {CELLS}<&- {CODES}>&- </dev/null
  printf '%s\\n' "$?" >&{CODES}
done
"""
TICK_S, LEAST_TICK_S = 0.05, 0.004
FASTEST = 4 << 30
"""Bytes a second that all programs together can take: how soon to look again follows from what is left to them."""
LONGEST_CODE = 16
OWN_HANDLERS = (signal.SIGINT, signal.SIGALRM)
BACK_TO_DEFAULT = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT)


class BashCells:
    """The shell, and the processes it left behind; this process is the first of its namespace and above them all.

    No program in it can replace, stop or trace this one. So it keeps the time of a cell and watches the memory of all,
    whatever becomes of the shell: a cell may put another program in its place (``exec``), stop it or leave it.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.allowed: int = order["memory"] + SLACK
        self.proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.looks_at = 0.0
        self.is_seen_over = False
        self.shell = 0
        self.cells = self.codes = self.pidfd = -1
        self.exit_code: int | None = None
        for number in OWN_HANDLERS:  # the first process of a namespace is sent only what it has a handler for
            signal.signal(number, signal.SIG_DFL)

    def wait(self, fd: int) -> None:
        """Until the next request: see that what was left in the background does not take too much."""
        while not select.select([fd], [], [], self._until_look_s() if self._has_background() else None)[0]:
            self._check_memory()

    def reply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run one cell in the shell; says so if that had to be a new one."""
        self._bury()
        if self.exit_code is not None:  # something that was left in the background ended it
            self._forget_shell()
        is_fresh = not self.shell
        if is_fresh:
            self._start()
        return {**self._run(request), "is_fresh": is_fresh}

    def _run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + request["timeout_s"]
        unsent = request["code"].replace("\0", "").encode(errors="surrogatepass") + b"\0"
        said, sources = b"", [self.pidfd, self.codes]
        while b"\n" not in said:
            if self._check_memory():
                return {"status": "memory", "error": "it took more memory than it may"}
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._end_all()
                return {"status": "timeout", "error": "it ran out of time"}
            readable, writable, _ = select.select(
                sources, [self.cells] if unsent else [], [], min(left_s, self._until_look_s())
            )
            if writable:
                unsent = self._send(unsent)
            if self.codes in readable:
                chunk = self._read_code()
                if chunk is None:
                    sources.remove(self.codes)  # the shell has ended, or is another program now
                said = (said + (chunk or b""))[-LONGEST_CODE:]
            self._bury()
            if self.exit_code is not None and self.codes not in readable:
                return self._gone()
        code = said.partition(b"\n")[0]
        return _outcome(int(code) & 0xFF if code.isdigit() else 1)

    def _start(self) -> None:
        shell = next((path for path in SHELLS if os.path.exists(path)), SHELLS[0])
        cells_out, self.cells = os.pipe()
        self.codes, codes_in = os.pipe()
        for fd in (self.cells, self.codes):  # a program of the cell's can open both, and be quicker
            os.set_blocking(fd, False)
        self.shell = os.posix_spawn(
            shell,
            [shell, "--noprofile", "--norc", "-c", LOOP],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, cells_out, CELLS), (os.POSIX_SPAWN_DUP2, codes_in, CODES)],
            setsigdef=BACK_TO_DEFAULT,
        )
        self.pidfd = os.pidfd_open(self.shell)
        os.close(cells_out)
        os.close(codes_in)

    def _send(self, unsent: bytes) -> bytes:
        try:
            return unsent[os.write(self.cells, unsent) :]
        except BlockingIOError:
            return unsent
        except BrokenPipeError:  # nobody reads cells any more
            return b""

    def _read_code(self) -> bytes | None:
        """Part of an exit code; nothing at all once nobody can write one any more."""
        try:
            return os.read(self.codes, LONGEST_CODE) or None
        except BlockingIOError:
            return b""

    def _gone(self) -> dict[str, Any]:
        """The cell ended the shell (``exit 3``), or what it had put in its place: the next one starts another."""
        code = self.exit_code or 0
        self._forget_shell()
        return _outcome(code)

    def _bury(self) -> None:
        """Reap what has ended; orphans are this process's too."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.shell:
                    self.exit_code = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            return

    def _has_background(self) -> bool:
        self._bury()
        return sum(name.isdigit() for name in os.listdir("/proc")) > (2 if self.shell else 1)

    def _check_memory(self) -> bool:
        """End all if they hold too much together; each alone is held by a limit of its own.

        Too much is what was seen twice: a program that is about to start another counts double for a moment.
        """
        if self._until_look_s() > 0:
            return False
        left = self.allowed - session_memory(self.proc, self.allowed)
        self.looks_at = time.monotonic() + min(TICK_S, max(LEAST_TICK_S, left / FASTEST))
        was_seen, self.is_seen_over = self.is_seen_over, left < 0
        if not (was_seen and self.is_seen_over):
            return False
        self._end_all()
        return True

    def _until_look_s(self) -> float:
        return max(0.0, self.looks_at - time.monotonic())

    def _end_all(self) -> None:
        """Everything in this namespace but this process itself."""
        try:
            os.kill(-1, signal.SIGKILL)
            while True:
                os.waitpid(-1, 0)
        except (ProcessLookupError, ChildProcessError):
            self.is_seen_over = False
            self._forget_shell()

    def _forget_shell(self) -> None:
        if self.shell:
            for fd in (self.cells, self.codes, self.pidfd):
                os.close(fd)
        self.shell, self.exit_code = 0, None


def _outcome(code: int) -> dict[str, Any]:
    """A shell says 128 + the signal where a signal ended the command."""
    code = code if code >= 0 else 128 - code
    if code == 0:
        return {"status": "ok", "exit_code": 0}
    return {"status": "error", "exit_code": code, "error": f"exit code {code}"}
