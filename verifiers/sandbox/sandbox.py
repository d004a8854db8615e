"""A sandbox for code: its limits, its sessions, and a few processes started in advance."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Mapping
from threading import Lock
from types import TracebackType
from typing import Any, Literal, get_args
from weakref import WeakSet

from verifiers.errors import SandboxError
from verifiers.sandbox.drive import Steps, drive, either
from verifiers.sandbox.host import Host, host_for
from verifiers.sandbox.process import EndedError, Process
from verifiers.sandbox.replies import FILE_WRITTEN, cell_ran, function_returned
from verifiers.sandbox.result import Level, LevelName, Result
from verifiers.sandbox.session import FILES_S, Session, check_code, check_name, encode

Language = Literal["python", "bash"]

MEBIBYTE = 1 << 20
PAGE = 4096
INODES_PER_MEBIBYTE = 64
SHELL_AND_RUNNER = 2


class Sandbox:
    """Runs untrusted code: ``run`` in a fresh process, or ``session`` for several cells.

    ``files`` are in the working folder at the start; ``packages`` are imported in advance if they are installed.
    ``level`` requires exactly this isolation instead of the best available; ``warm`` processes are started in advance.

    >>> with Sandbox() as sandbox:
    ...     sandbox.run("print('hello'); 6 * 7").value
    '42'
    """

    def __init__(
        self,
        *,
        memory_mb: int = 512,
        timeout_s: float = 10.0,
        language: Language = "python",
        files: Mapping[str, bytes | str] | None = None,
        packages: Iterable[str] = (),
        output_kb: int = 64,
        disk_mb: int = 64,
        processes: int = 32,
        warm: int = 1,
        level: LevelName | None = None,
        allow_unsafe: bool = False,
    ) -> None:
        if language not in get_args(Language):
            raise ValueError(f"language must be 'python' or 'bash'; got {language!r}")
        if level is not None and level not in get_args(LevelName):
            raise ValueError(f"level must be 'full', 'reduced' or 'none'; got {level!r}")
        if level == "none" and not allow_unsafe:
            raise ValueError("level='none' isolates nothing; pass allow_unsafe=True as well if that is what you want")
        if isinstance(packages, str):
            raise TypeError(f"packages must be a list of names; got the string {packages!r}")
        counts = {"memory_mb": memory_mb, "output_kb": output_kb, "disk_mb": disk_mb, "processes": processes}
        for name, count in counts.items():
            _check_count(name, count, 1)
        _check_count("warm", warm, 0)
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise ValueError(f"timeout_s must be a positive number of seconds; got {timeout_s!r}")
        for name in files or ():
            check_name(name)
        self.memory_mb = memory_mb
        self.timeout_s = timeout_s
        self.language = language
        self.files = dict(files or {})
        self.packages = tuple(packages)
        self.output_bytes = -(-output_kb * 1024 // PAGE) * PAGE
        self.cell_ran, self.function_returned = cell_ran(self.output_bytes), function_returned(self.output_bytes)
        self.disk_mb = disk_mb
        self.processes = processes
        self.warm = warm
        self.level = level
        self.allow_unsafe = allow_unsafe
        self._ready: deque[Process] = deque()
        self._taken: WeakSet[Process] = WeakSet()
        self._lock = Lock()
        self._host: Host | None = None
        self._owner = os.getpid()

    @property
    def disk_bytes(self) -> int:
        return self.disk_mb * MEBIBYTE

    @either
    def run(self, code: str, *, timeout_s: float | None = None, memory_mb: int | None = None) -> Steps[Result]:
        """Run code in a new process, and end that process."""
        check_code(code)
        session = self.session(memory_mb=memory_mb)
        try:
            return (yield from session.steps({"do": "run", "code": code}, timeout_s, self.cell_ran))
        finally:
            session.close()

    def session(self, *, memory_mb: int | None = None) -> Session:
        """A session, to be used in a ``with`` block; its process starts with the first request."""
        if memory_mb is not None:
            _check_count("memory_mb", memory_mb, 1)
        return Session(self, memory_mb=memory_mb)

    @either
    def start(self) -> Steps[Level]:
        """Start the zygote, from which all processes are forked (else the first call does), and return its level."""
        host = yield from self._running_host()
        self.refill()
        return host.level

    def close(self) -> None:
        """End every process of this sandbox. Later calls start new ones."""
        with self._lock:
            ready, self._ready = list(self._ready), deque()
            host, self._host = self._host, None
        for process in ready:
            process.close()
        for process in list(self._taken):
            process.kill()
        if host is not None:
            host.release(self)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- for sessions ---------------------------------------------------------------------------------------------

    def take(self, memory_mb: int | None = None) -> Steps[Process]:
        """An unused process that contains the files; waits for a free place if all are taken."""
        host = yield from self._running_host()
        yield from host.places.enter()
        process = self._next_ready() if memory_mb in (None, self.memory_mb) else None
        is_new = process is None
        try:
            process = process or self._new_process()
        except OSError as error:
            host.places.leave()
            raise SandboxError(f"a sandbox could not be started: {error}") from error
        process.on_close(host.places.leave)
        try:
            if is_new:
                yield from host.line.enter()
                process.on_begin(host.line.leave)
                yield from host.launch(process, self._order(memory_mb or self.memory_mb))
            self._taken.add(process)
            if self.files:
                files = {name: encode(content) for name, content in self.files.items()}
                reply = yield from process.request({"do": "write", "files": files}, FILES_S, FILE_WRITTEN)
                if (number := reply.get("errno")) is not None:
                    raise ValueError(f"the sandbox's files cannot be written into it: {os.strerror(number)}")
        except BaseException as error:
            process.close()
            if isinstance(error, EndedError):
                raise SandboxError(f"a sandbox ended while its files were written: {error}") from None
            raise
        return process

    def check_host(self, error: EndedError) -> None:
        """Raise SandboxError if a process ended because its zygote did, which its code has not caused."""
        host = self._host
        if host is not None and not host.is_alive() and self._owner == os.getpid():
            raise SandboxError(f"the sandbox's first process is gone, and all others with it ({error})") from None

    def _running_host(self) -> Steps[Host]:
        with self._lock:
            host = self._host
            is_usable = host is not None and self._owner == os.getpid() and host.is_alive()
            if not is_usable:
                for process in self._ready:
                    process.close()
                self._ready = deque()
                self._owner = os.getpid()
                host = self._host = host_for(self)
        assert host is not None
        yield from host.start()
        if self.language == "bash" and host.level.name != "full":
            raise SandboxError(
                "bash starts processes, which only the full level confines; the level here is " + str(host.level)
            )
        return host

    def _next_ready(self) -> Process | None:
        try:
            return self._ready.popleft()
        except IndexError:
            return None

    def refill(self) -> None:
        """Start processes for the next calls; called at the end of a call, so that it does not wait for them."""
        host = self._host
        while host is not None and len(self._ready) < self.warm and host.is_alive():
            try:
                process = self._new_process()
            except OSError:  # for example too many open files: the next call will report it
                return
            try:
                process.hand_over(host.control, self._order(self.memory_mb))
            except OSError:  # the zygote is busy or gone; the next call will report that too
                process.close()
                return
            self._ready.append(process)

    def _new_process(self) -> Process:
        return Process(output_bytes=self.output_bytes)

    def _order(self, memory_mb: int) -> dict[str, Any]:
        return {
            "language": self.language,
            "memory": memory_mb * MEBIBYTE,
            "disk": self.disk_bytes,
            "inodes": max(256, self.disk_mb * INODES_PER_MEBIBYTE),
            "processes": self.processes + (SHELL_AND_RUNNER if self.language == "bash" else 0),
            "output": self.output_bytes,
        }


def _check_count(name: str, count: int, least: int) -> None:
    if type(count) is not int or count < least:
        raise ValueError(f"{name} must be a whole number of at least {least}; got {count!r}")


def level() -> Level:
    """How well this machine can isolate code; it is tried out, which takes about 0.1 s.

    >>> level().name in ("full", "reduced", "none")
    True
    """
    with Sandbox(warm=0, allow_unsafe=True) as sandbox:
        return drive(sandbox.start.__wrapped__(sandbox))  # type: ignore[attr-defined, no-any-return]
