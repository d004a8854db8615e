"""Runs bash cells in one persistent shell, and can end every process that they started."""

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
# Reads a cell up to a null byte, runs it without the two pipes, and writes its exit code.
LOOP = f"""
while IFS= read -r -d '' -u {CELLS} cell; do
  eval "$cell" {CELLS}<&- {CODES}>&- </dev/null
  printf '%s\\n' "$?" >&{CODES}
done
"""
TICK_S, LEAST_TICK_S = 0.05, 0.004
FASTEST = 4 << 30
"""Bytes per second that all programs together can allocate; the time until the next check follows from it."""
LONGEST_CODE = 16
OWN_HANDLERS = (signal.SIGINT, signal.SIGALRM)
BACK_TO_DEFAULT = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT)


class BashCells:
    """The shell and its background processes; this process is the first of their PID namespace.

    No program in the namespace can replace, stop or trace this process. So it enforces timeouts and memory limits,
    whatever happens to the shell: a cell may replace it (``exec``), stop it or exit it.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.allowed: int = order["memory"] + SLACK
        self.proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.looks_at = 0.0
        self.is_seen_over = False
        self.shell = 0
        self.cells = self.codes = self.pidfd = -1
        self.exit_code: int | None = None
        for number in OWN_HANDLERS:  # the first process of a namespace receives only signals that it has handlers for
            signal.signal(number, signal.SIG_DFL)

    def wait(self, fd: int) -> None:
        """Wait for the next request, and check the memory of background processes meanwhile."""
        while not select.select([fd], [], [], self._until_look_s() if self._has_background() else None)[0]:
            self._check_memory()

    def reply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run one cell in the shell; ``is_fresh`` if a new shell had to be started."""
        self._bury()
        if self.exit_code is not None:  # a background process ended it
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
                return {"status": "memory", "error": "it used more memory than allowed"}
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
                    sources.remove(self.codes)  # the shell has ended, or was replaced by another program
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
        for fd in (self.cells, self.codes):  # a program in the cell can open both and read first
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
        except BrokenPipeError:  # the shell no longer reads cells
            return b""

    def _read_code(self) -> bytes | None:
        """Part of an exit code; None once the pipe has no writers."""
        try:
            return os.read(self.codes, LONGEST_CODE) or None
        except BlockingIOError:
            return b""

    def _gone(self) -> dict[str, Any]:
        """The cell ended the shell (``exit 3``) or the program that replaced it: the next cell starts a new shell."""
        code = self.exit_code or 0
        self._forget_shell()
        return _outcome(code)

    def _bury(self) -> None:
        """Reap processes that have ended, including orphans."""
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
        """End all processes if they use too much memory in total; each alone has a kernel limit.

        The limit must be exceeded in two checks, because a process that forks is counted twice for a moment.
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
        """Kill everything in this namespace except this process."""
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
    """The reply for an exit code; a signal becomes 128 + its number, as in a shell."""
    code = code if code >= 0 else 128 - code
    if code == 0:
        return {"status": "ok", "exit_code": 0}
    return {"status": "error", "exit_code": code, "error": f"exit code {code}"}
