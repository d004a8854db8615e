"""Settings that are shared → the zygote: one clean process a kind, from which every confined process is forked."""

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

# The zygote gets nothing from this process: no environment, no memory, no descriptor but its socket. It knows where its
# code is from the first message, not from its command line, which every session can read. Its own code comes last: what
# every session changes then lies together, and few pages have to be copied for it.
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
    """The zygote, how many processes may be taken from it, and how many may be in the making."""

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
        """Start the zygote, if it is not there yet, and wait until it can fork."""
        if self._is_started:
            return
        yield from self._starting.enter()
        try:
            if not self.has_started():  # somebody else may have done it meanwhile
                if self._popen is None:
                    self._spawn()
                yield from self._hello()
        finally:
            self._starting.leave()

    def has_started(self) -> bool:
        return self._is_started

    def is_alive(self) -> bool:
        """False once the zygote is gone: nothing more is ever said on its socket, so it can only be its end."""
        if self._is_closed:
            return False
        if not self._is_started:
            return True
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        return not poll.poll(0)

    def launch(self, process: Process, order: Mapping[str, Any]) -> Steps[None]:
        """Have a process forked; waits while the zygote's socket is full."""
        deadline = time.monotonic() + HELLO_S
        while True:
            try:
                return process.hand_over(self.control, order)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS):
                    raise SandboxError(f"the sandbox's first process is gone: {error}") from error
            if time.monotonic() > deadline:
                raise SandboxError(f"the sandbox's first process took no order for {HELLO_S:.0f} s")
            # Several may wait for this socket in one loop, which calls back only one of them: so not for long.
            yield Until(self.control.fileno(), time.monotonic() + RETRY_S, is_write=True)

    def release(self, sandbox: Sandbox) -> None:
        """A sandbox is done with it. A few that nobody uses are kept: the next sandbox is often just like the last."""
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
            raise SandboxError(f"the sandbox needs Linux, and this is {sys.platform}")
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
                    start_new_session=True,  # Ctrl-C is the application's
                )
            except OSError as error:
                self.close()
                raise SandboxError(f"the sandbox's first process could not be started: {error}") from error
        with suppress(BrokenPipeError):  # it has ended already: what it said is read where its answer would be
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
                said = self.control.recv(1 << 16)
            except ConnectionResetError:  # it ended before it had read its first message
                said = b""
            if not said:
                raise SandboxError(f"the sandbox's first process failed: {self._last_words()}")
        except (SandboxError, OSError):
            self.close()
            raise
        hello = json.loads(said)
        self.level = Level(name=hello["level"], reasons=tuple(hello["reasons"]), landlock=hello["landlock"])
        reasons = "; ".join(self.level.reasons)
        if self.wanted not in (None, self.level.name):
            self.close()
            raise SandboxError(f"the level {self.wanted!r} was asked for and cannot be had here ({reasons})")
        if self.level.name == "none" and not self.allow_unsafe:
            self.close()
            raise SandboxError(
                f"this machine cannot hold code that is not trusted ({reasons}); "
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
    """The zygote for these settings: one for all sandboxes of this process that preload the same packages."""
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
    """In a fork of the application: the zygotes are its parent's, and so may be the thread that holds the lock."""
    global _lock
    _lock = Lock()
    _abandoned.extend(_hosts.values())
    _hosts.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def most_places() -> int:
    """How many processes may be taken at once: each costs this process four descriptors."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_PLACES * DESCRIPTORS_EACH * 2
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, raised), hard))
            soft = max(soft, raised)
        except (ValueError, OSError):  # a system may have a lower bound of its own
            pass
    if soft == resource.RLIM_INFINITY:
        return MOST_PLACES
    return max(4, min(MOST_PLACES, soft // (DESCRIPTORS_EACH * 2)))
