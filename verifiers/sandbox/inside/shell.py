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
TICK_S = 0.05
BACK_TO_DEFAULT = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT)


class BashCells:
    """The shell, and the processes it left behind; this process is the first of its namespace and above them all."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.memory = order["memory"]
        self.shell = 0
        self.cells = self.codes = -1
        self.exit_code: int | None = None

    def wait(self, fd: int) -> None:
        """Until the next request: see that what was left in the background does not take too much."""
        while not select.select([fd], [], [], TICK_S if self._has_background() else None)[0]:
            self._check_memory()

    def reply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run one cell in the shell; says so if that had to be a new one."""
        is_fresh = not self.shell
        if is_fresh:
            self._start()
        return {**self._run(request), "is_fresh": is_fresh}

    def _run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + request["timeout_s"]
        unsent = request["code"].replace("\0", "").encode(errors="surrogatepass") + b"\0"
        said = b""
        while not said.endswith(b"\n"):
            if time.monotonic() > deadline:
                self._end_all()
                return {"status": "timeout", "error": "it ran out of time"}
            if self._check_memory():
                return {"status": "memory", "error": "it took more memory than it may"}
            left_s = max(0.0, min(TICK_S, deadline - time.monotonic()))
            readable, writable, _ = select.select([self.codes], [self.cells] if unsent else [], [], left_s)
            if writable:
                unsent = self._send(unsent)
            if readable:
                chunk = os.read(self.codes, 16)
                if not chunk:
                    return self._gone()
                said += chunk
            self._bury()
        return _outcome(int(said) if said.strip().isdigit() else 1)

    def _start(self) -> None:
        shell = next((path for path in SHELLS if os.path.exists(path)), SHELLS[0])
        cells_out, self.cells = os.pipe()
        self.codes, codes_in = os.pipe()
        os.set_blocking(self.cells, False)
        self.exit_code = None
        self.shell = os.posix_spawn(
            shell,
            [shell, "--noprofile", "--norc", "-c", LOOP],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, cells_out, CELLS), (os.POSIX_SPAWN_DUP2, codes_in, CODES)],
            setsigdef=BACK_TO_DEFAULT,
        )
        os.close(cells_out)
        os.close(codes_in)

    def _send(self, unsent: bytes) -> bytes:
        try:
            return unsent[os.write(self.cells, unsent) :]
        except BrokenPipeError:  # the shell is gone, which the other pipe says too
            return b""

    def _gone(self) -> dict[str, Any]:
        """The cell ended the shell itself (``exit 3``): the next one starts another."""
        while self.exit_code is None:
            self._bury(is_waiting=True)
        code = self.exit_code
        self._forget_shell()
        return _outcome(code)

    def _bury(self, *, is_waiting: bool = False) -> None:
        """Reap what has ended; orphans are this process's too."""
        try:
            while True:
                pid, status = os.waitpid(-1, 0 if is_waiting else os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.shell:
                    self.exit_code = os.waitstatus_to_exitcode(status)
                    return
        except ChildProcessError:
            self.exit_code = self.exit_code or 0

    def _has_background(self) -> bool:
        self._bury()
        return sum(name.isdigit() for name in os.listdir("/proc")) > (2 if self.shell else 1)

    def _check_memory(self) -> bool:
        """End all if they hold too much together; each alone is held by a limit of its own."""
        if session_memory() <= self.memory + SLACK:
            return False
        self._end_all()
        return True

    def _end_all(self) -> None:
        """Everything in this namespace but this process itself."""
        try:
            os.kill(-1, signal.SIGKILL)
            while True:
                os.waitpid(-1, 0)
        except (ProcessLookupError, ChildProcessError):
            self._forget_shell()

    def _forget_shell(self) -> None:
        if self.shell:
            os.close(self.cells)
            os.close(self.codes)
        self.shell = 0


def _outcome(code: int) -> dict[str, Any]:
    """A shell says 128 + the signal where a signal ended the command."""
    code = code if code >= 0 else 128 - code
    if code == 0:
        return {"status": "ok", "exit_code": 0}
    return {"status": "error", "exit_code": code, "error": f"exit code {code}"}
