"""The name of an OpenEnv package → its server in a separate process that listens on this machine only."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import IO

from verifiers.errors import InfraError

APP = "{package}.server.app:app"
SHOWN_CHARS = 2000


class PackageServer:
    """A server process that starts on first use. Stopping it also kills its child processes."""

    def __init__(self, package: str) -> None:
        module, _, name = package.partition(":")
        self.app = package if name else APP.format(package=module)
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._lock = threading.Lock()
        self._port = 0

    @property
    def url(self) -> str:
        """The server's URL. Requests wait while the server is still starting, because its socket already listens."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            return f"http://127.0.0.1:{self._port}"

    def _start(self) -> None:
        for wanted in (self._module.partition(".")[0], "uvicorn"):
            if importlib.util.find_spec(wanted) is None:
                raise InfraError(
                    f"the OpenEnv package {self._module!r} cannot be served: {wanted} is not installed; install the "
                    "package, and pip install 'verifiers[openenv]'"
                )
        # The socket is created here, so that the port is known and no other process can take it.
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen(1024)
            self._port = listening.getsockname()[1]
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 (open while the server runs)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "uvicorn", self.app, "--fd", str(listening.fileno()), "--log-level", "warning"],
                pass_fds=[listening.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )

    def why_ended(self) -> str | None:
        """The exit code and last output of a server that ended by itself; None while it runs."""
        with self._lock:
            if self._process is None or self._process.poll() is None or self._log is None:
                return None
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").strip()[-SHOWN_CHARS:]
            return f"the server of {self._module} ended with exit code {self._process.returncode}: {said}"

    def stop(self) -> None:
        with self._lock:
            process, self._process = self._process, None
            if process is None:
                return
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # it has ended
                pass
            process.wait()
            if self._log is not None:
                self._log.close()
