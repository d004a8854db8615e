"""Runs untrusted code in containers of Docker or Podman, using only their command line.

A session is one container. It reads requests from its standard input and ends when that closes, so no container
outlives this process.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from importlib import resources
from types import TracebackType
from typing import IO, Any, Literal, Self
from weakref import WeakSet

from verifiers import calls
from verifiers.errors import SandboxError
from verifiers.sandbox.backend import find_engine
from verifiers.sandbox.replies import (
    CONTAINER_LISTED,
    CONTAINER_WRITTEN,
    BadReplyError,
    Shape,
    container_ran,
    container_read,
    read_reply,
)
from verifiers.sandbox.result import Result
from verifiers.sandbox.session import SessionLostError, check_code, check_name, encode
from verifiers.types import unique_id

IMAGE = "python:3.12-slim"
START_S = 600.0  # the image may have to be pulled
FILES_S = 30.0
GRACE_S = 5.0  # for a cell to react to its own timeout before its container is killed
ENDING_S = 5.0
KILL_S = 30.0
OUT_OF_MEMORY = 137  # exit code of a container ended by SIGKILL
SHOWN_CHARS = 2000


class ContainerSandbox:
    """A `SandboxBackend` whose sessions are containers without network or capabilities, with limits and a tmpfs folder.

    The ``image`` needs Python (and bash, for that language); code can use whatever is installed in it.
    """

    def __init__(
        self,
        *,
        engine: str | None = None,
        image: str = IMAGE,
        language: Literal["python", "bash"] = "python",
        memory_mb: int = 512,
        timeout_s: float = 10.0,
        files: Mapping[str, bytes | str] | None = None,
        packages: Iterable[str] = (),
        output_kb: int = 64,
        disk_mb: int = 64,
        processes: int = 64,
    ) -> None:
        if language not in ("python", "bash"):
            raise ValueError(f"language must be 'python' or 'bash'; got {language!r}")
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise ValueError(f"timeout_s must be a positive number of seconds; got {timeout_s!r}")
        counts = {"memory_mb": memory_mb, "output_kb": output_kb, "disk_mb": disk_mb, "processes": processes}
        if wrong := [name for name, count in counts.items() if type(count) is not int or count < 1]:
            raise ValueError(f"{wrong[0]} must be a whole number of at least 1; got {counts[wrong[0]]!r}")
        for name in files or ():
            check_name(name)
        self.engine, self.image, self.language = engine, image, language
        self.memory_mb, self.timeout_s, self.disk_mb, self.processes = memory_mb, timeout_s, disk_mb, processes
        self.files, self.packages, self.output_bytes = dict(files or {}), tuple(packages), output_kb * 1024
        self._sessions: WeakSet[ContainerSession] = WeakSet()

    async def _run(self, code: str, *, timeout_s: float | None = None) -> Result:
        """Run code in a new container, and end that container."""
        session = self.session()
        try:
            result: Result = await session._run(code, timeout_s=timeout_s)
            return result
        finally:
            await calls.in_thread(session.close)

    run = calls.both(_run)

    def session(self) -> ContainerSession:
        """A session; its container starts with the first request."""
        session = ContainerSession(self)
        self._sessions.add(session)
        return session

    def close(self) -> None:
        for session in list(self._sessions):
            session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def command(self, name: str) -> list[str]:
        """The command line that starts a container."""
        return [
            *(find_engine(self.engine), "run", "--interactive", "--rm", "--init", f"--name={name}"),
            *("--network=none", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--user=65534:65534"),
            *(f"--memory={self.memory_mb}m", f"--memory-swap={self.memory_mb}m", f"--pids-limit={self.processes}"),
            *("--read-only", f"--tmpfs=/work:rw,exec,mode=1777,size={self.disk_mb}m"),
            *(f"--tmpfs=/tmp:rw,exec,mode=1777,size={self.disk_mb}m", "--workdir=/work", "--env=HOME=/work"),
            *(self.image, "python3", "-u", "-c", _driver()),
        ]


class ContainerSession:
    """One container that keeps state between cells; if it ends it is replaced, and the next result has ``is_fresh``."""

    def __init__(self, sandbox: ContainerSandbox) -> None:
        self.sandbox = sandbox
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._name = ""
        self._turn = threading.Lock()
        self._is_closed = self._is_late = self._was_killed = False
        self._is_fresh = True
        self._stderr = ""
        self._number = 0

    async def _run(self, code: str, *, timeout_s: float | None = None) -> Result:
        """Run a cell and return its result."""
        check_code(code)
        seconds = self.sandbox.timeout_s if timeout_s is None else timeout_s
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"timeout_s must be a positive number of seconds; got {timeout_s!r}")
        result: Result = await calls.in_thread(partial(self._cell, code, seconds))
        return result

    run = calls.both(_run)

    async def _write(self, name: str, content: bytes | str) -> None:
        """Write a file in the session's folder."""
        check_name(name)
        request = {"do": "write", "files": {name: encode(content)}}
        await calls.in_thread(partial(self._file, request, CONTAINER_WRITTEN))

    write = calls.both(_write)

    async def _read(self, name: str) -> bytes:
        """The bytes of a file in the session's folder; an OSError is caused by the code."""
        check_name(name)
        shape = container_read(self.sandbox.disk_mb << 20)
        reply: dict[str, Any] = await calls.in_thread(
            partial(self._file, {"do": "read", "name": name}, shape, "content")
        )
        content: bytes = reply["content"]
        return content

    read = calls.both(_read)

    async def _files(self) -> list[str]:
        """The names of all files in the session's folder."""
        reply: dict[str, Any] = await calls.in_thread(partial(self._file, {"do": "files"}, CONTAINER_LISTED, "names"))
        names: list[str] = reply["names"]
        return names

    files = calls.both(_files)

    def close(self) -> None:
        """End the container; a running cell is killed."""
        self._is_closed = True
        self._kill()

    # --- in a worker thread ---------------------------------------------------------------------------------------

    def _cell(self, code: str, seconds: float) -> Result:
        with self._turn:
            self._start_if_needed()
            is_fresh, self._is_fresh = self._is_fresh, False
            request, shape = {"do": "run", "code": code, "timeout_s": seconds}, container_ran(self.sandbox.output_bytes)
            reply = self._exchange(request, shape, "status", seconds + GRACE_S)
        if reply is None:
            status, reason = self._why_ended(seconds)
            return Result(status=status, error=reason, is_fresh=is_fresh)
        self._is_fresh = bool(reply.pop("is_lost", False))
        return Result(**{**reply, "is_fresh": is_fresh})

    def _file(self, request: dict[str, Any], shape: Shape, wanted: str | None = None) -> dict[str, Any]:
        with self._turn:
            self._start_if_needed()
            reply = self._exchange(request, shape, wanted, FILES_S)
        if reply is None:
            raise SessionLostError("the session's files are not accessible: its container ended")
        if (number := reply.get("errno")) is not None:
            raise OSError(number, reply.get("said"), request.get("name"))
        return reply

    def _start_if_needed(self) -> None:
        if self._is_closed:
            raise ValueError("the session is closed; open another with sandbox.session()")
        if self._process is not None and self._process.poll() is None:
            return
        self._kill()
        sandbox = self.sandbox
        self._name = f"verifiers-{unique_id()}"
        command = sandbox.command(self._name)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # so that Ctrl-C reaches only this process
        )
        self._is_fresh, self._was_killed = True, False
        files = {name: encode(content) for name, content in sandbox.files.items()}
        settings = {"language": sandbox.language, "output": sandbox.output_bytes, "packages": sandbox.packages}
        reply = self._exchange({**settings, "files": files}, CONTAINER_WRITTEN, None, START_S)
        if reply is None:
            raise SandboxError(f"a container of {sandbox.image} could not be started: {self._stderr or 'it ended'}")
        if reply.get("errno") is not None:
            self._kill()
            raise ValueError(f"the sandbox's files cannot be written into it: {reply.get('said')}")

    def _exchange(
        self, request: dict[str, Any], shape: Shape, wanted: str | None, seconds: float
    ) -> dict[str, Any] | None:
        """Send a request and read its reply; None if the container ended, was killed, or sent an invalid reply.

        A reply has the field ``wanted``, or an ``errno``. An invalid one ends the container, because the code in
        it wrote the reply, or because later replies would be matched to the wrong requests.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        self._is_late = False
        self._number += 1
        timer = threading.Timer(seconds, self._end_late)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(json.dumps({**request, "number": self._number}).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline(shape.most_bytes)
        except (OSError, ValueError):  # it ended
            line = b""
        finally:
            timer.cancel()
            timer.join()  # if it is just running, wait until it has set `_is_late`
        if not line.endswith(b"\n"):
            self._let_end()
            return None
        try:
            reply = read_reply(line[:-1], shape)
        except BadReplyError:
            reply = {}
        if reply.pop("number", None) != self._number or not (wanted is None or {wanted, "errno"} & reply.keys()):
            self._kill()
            return None
        return reply

    def _end_late(self) -> None:
        """Kill the container; it is not late if it had already ended, while its engine is still removing it."""
        self._kill()
        self._is_late = self._was_killed

    def _let_end(self) -> None:
        """Give a container that ended by itself time to report its own exit code, then clean up."""
        assert self._process is not None
        try:
            self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            pass
        self._kill()

    def _kill(self) -> None:
        """End the container and the engine's process for it, whose exit code remains available."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            kill = [find_engine(self.sandbox.engine), "kill", self._name]
            quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            try:
                self._was_killed = subprocess.run(kill, timeout=KILL_S, check=False, **quiet).returncode == 0
                process.wait(GRACE_S if self._was_killed else KILL_S)
            except subprocess.TimeoutExpired:  # the engine hangs: end at least its process
                self._was_killed = True
                process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # unsent data is lost, which does not matter any more
                    pass
        errors, self._errors = self._errors, None
        if errors is not None:
            with errors:
                errors.seek(0)
                self._stderr = errors.read().decode(errors="replace").strip()[-SHOWN_CHARS:]

    def _why_ended(self, seconds: float) -> tuple[Literal["timeout", "memory", "killed"], str]:
        if self._is_late:
            return "timeout", f"it ran longer than {seconds:g} s"
        code = None if self._process is None else self._process.returncode
        if code == OUT_OF_MEMORY and not self._was_killed:
            return "memory", f"it needed more than {self.sandbox.memory_mb} MiB"
        return "killed", f"its container ended with exit code {code}"


def _driver() -> str:
    return resources.files("verifiers.sandbox.inside").joinpath("container_driver.py").read_text(encoding="utf-8")
