"""Starts and talks to zygotes: clean processes, one per set of shared settings, that fork the confined processes."""

from __future__ import annotations

import atexit
import errno
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from verifiers.errors import SandboxError
from verifiers.sandbox.drive import Gate, Steps, Until
from verifiers.sandbox.process import Process
from verifiers.sandbox.result import Level, LevelName
from verifiers.sandbox.sight import hidden_paths, readable_folders, site_folders

if TYPE_CHECKING:
    from verifiers.sandbox.sandbox import Sandbox

HELLO_S = 120.0
CLOSE_S = 5.0
RETRY_S = 0.02
MOST_PLACES = 1024
DESCRIPTORS_EACH = 4
MOST_IDLE = 2
MOST_LAUNCHING = 32

Key = tuple[tuple[str, ...], LevelName | None, bool]

# The zygote inherits nothing from this process: no environment, no memory, and no descriptor except its socket. The
# path of its code is in the first message, not on its command line, which every session can read. Its own code is
# imported last, so that objects that sessions modify are close together and few pages have to be copied.
BOOT = """
import json, os, sys, types
config = json.loads(os.read(0, 1 << 20))
sys.dont_write_bytecode = True
for name, path in config["stubs"].items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from verifiers.sandbox.inside.modules import COMMON, preload
preload(COMMON.split())
from verifiers.sandbox.inside.zygote import main
main(config)
"""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "random",
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
}


class Host:
    """A zygote, with limits on its running processes and on those being started."""

    level: Level

    def __init__(self, key: Key) -> None:
        self.key = key
        self.packages, self.wanted, self.allow_unsafe = key
        self.users: WeakSet[Sandbox] = WeakSet()
        self.places = Gate(most_places())
        self.line = Gate(MOST_LAUNCHING)
        self.owner = os.getpid()
        self.control: socket.socket
        self._starting = Gate(1)
        self._popen: subprocess.Popen[bytes] | None = None
        self._is_started = False
        self._is_closed = False

    def start(self) -> Steps[None]:
        """Start the zygote if necessary, and wait until it can fork."""
        if self._is_started:
            return
        yield from self._starting.enter()
        try:
            if not self.has_started():  # another caller may have started it meanwhile
                if self._popen is None:
                    self._spawn()
                yield from self._hello()
        finally:
            self._starting.leave()

    def has_started(self) -> bool:
        return self._is_started

    def is_alive(self) -> bool:
        """False once the zygote has ended: it sends nothing after its hello, so a readable socket means end of file."""
        if self._is_closed:
            return False
        if not self._is_started:
            return True
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        return not poll.poll(0)

    def launch(self, process: Process, order: Mapping[str, Any]) -> Steps[None]:
        """Order the zygote to fork a process; waits while its socket is full."""
        deadline = time.monotonic() + HELLO_S
        while True:
            try:
                return process.hand_over(self.control, order)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS):
                    raise SandboxError(f"the sandbox's first process is gone: {error}") from error
            if time.monotonic() > deadline:
                raise SandboxError(f"the sandbox's first process accepted no order for {HELLO_S:.0f} s")
            # A short wait: if several wait for this socket in one event loop, only one of them is called back.
            yield Until(self.control.fileno(), time.monotonic() + RETRY_S, is_write=True)

    def release(self, sandbox: Sandbox) -> None:
        """Remove a sandbox from the users. A few idle zygotes are kept, because the next sandbox may need the same."""
        self.users.discard(sandbox)
        with _lock:
            idle = [host for host in _hosts.values() if not host.users]
        for host in idle[:-MOST_IDLE]:
            host.close()

    def close(self) -> None:
        """End the zygote; everything it forked ends with it."""
        if self._is_closed:
            return
        self._is_closed = True
        with _lock:
            if _hosts.get(self.key) is self:
                del _hosts[self.key]
        if hasattr(self, "control"):
            self.control.close()
        if self._popen is None:
            return
        if self.owner != os.getpid():
            return
        try:
            self._popen.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        if self._popen.stderr is not None:
            self._popen.stderr.close()

    def _spawn(self) -> None:
        if sys.platform != "linux":
            raise SandboxError(f"the sandbox needs Linux, but this is {sys.platform}")
        self.control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        with far:
            try:
                self._popen = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", BOOT],
                    stdin=far.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env=ENVIRONMENT,
                    cwd="/",
                    start_new_session=True,  # so that Ctrl-C reaches only the application
                )
            except OSError as error:
                self.close()
                raise SandboxError(f"the sandbox's first process could not be started: {error}") from error
        with suppress(BrokenPipeError):  # it has already ended; `_hello` reads and reports its last words
            self.control.send(json.dumps(self._config()).encode())

    def _config(self) -> dict[str, Any]:
        here = Path(__file__).resolve().parent
        return {
            "stubs": {"verifiers": str(here.parent), "verifiers.sandbox": str(here)},
            "client": os.getpid(),
            "level": self.wanted,
            "allow_unsafe": self.allow_unsafe,
            "packages": self.packages,
            "programs": os.path.join(sys.prefix, "bin"),
            "paths": site_folders(),
            "readable": readable_folders(),
            "hidden": hidden_paths(),
        }

    def _hello(self) -> Steps[None]:
        deadline = time.monotonic() + HELLO_S
        try:
            if not (yield Until(self.control.fileno(), deadline)):
                raise SandboxError(f"the sandbox's first process was not ready within {HELLO_S:.0f} s")
            try:
                message = self.control.recv(1 << 16)
            except ConnectionResetError:  # it ended before it had read its first message
                message = b""
            if not message:
                raise SandboxError(f"the sandbox's first process failed: {self._last_words()}")
        except (SandboxError, OSError):
            self.close()
            raise
        hello = json.loads(message)
        self.level = Level(name=hello["level"], reasons=tuple(hello["reasons"]), landlock=hello["landlock"])
        reasons = "; ".join(self.level.reasons)
        if self.wanted not in (None, self.level.name):
            self.close()
            raise SandboxError(f"the level {self.wanted!r} was requested, but is not available here ({reasons})")
        if self.level.name == "none" and not self.allow_unsafe:
            self.close()
            raise SandboxError(
                f"this machine cannot isolate untrusted code ({reasons}); "
                "Sandbox(allow_unsafe=True) runs it without isolation"
            )
        self._is_started = True

    def _last_words(self) -> str:
        assert self._popen is not None
        assert self._popen.stderr is not None
        self._popen.wait(CLOSE_S)
        lines = self._popen.stderr.read(1 << 16).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with code {self._popen.returncode}"


_hosts: dict[Key, Host] = {}
_abandoned: list[Host] = []
_lock = Lock()


def host_for(sandbox: Sandbox) -> Host:
    """The zygote for these settings, shared by all sandboxes of this process with the same packages and level."""
    key = (sandbox.packages, sandbox.level, sandbox.allow_unsafe)
    with _lock:
        host, dead = _hosts.get(key), None
        if host is None or not host.is_alive():
            dead, host = host, Host(key)
            if not _hosts:
                atexit.unregister(_close_all)
                atexit.register(_close_all)
            _hosts[key] = host
        host.users.add(sandbox)
    if dead is not None:
        dead.close()
    return host


def _close_all() -> None:
    for host in list(_hosts.values()):
        host.close()


def _forget() -> None:
    """In a fork of the application: the zygotes are its parent's, and a thread of the parent may hold the lock."""
    global _lock
    _lock = Lock()
    _abandoned.extend(_hosts.values())
    _hosts.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def most_places() -> int:
    """The maximum number of processes at once: each needs four descriptors in this process."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_PLACES * DESCRIPTORS_EACH * 2
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, raised), hard))
            soft = max(soft, raised)
        except (ValueError, OSError):  # a system may have a lower limit
            pass
    if soft == resource.RLIM_INFINITY:
        return MOST_PLACES
    return max(4, min(MOST_PLACES, soft // (DESCRIPTORS_EACH * 2)))
