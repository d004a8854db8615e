"""Where attacks are fought: a machine with something worth stealing on it, and a sandbox beside it.

Uses the standard library and the sandbox only, so that a bare Python of another user can run it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from verifiers.sandbox import Result, Sandbox, SandboxError
from verifiers.sandbox.inside import syscalls
from verifiers.sandbox.inside.confine import _tasks_of
from verifiers.sandbox.inside.namespaces import NOBODY

ROOT = Path(__file__).resolve().parents[2]
KEY_NAME = "SANDBOX_TEST_API_KEY"
KEY_START = "sk-sandbox-"
LEVELS = ("full", "reduced")
NUMBERS = {
    **syscalls.FILES,
    **syscalls.FILE_ATTRIBUTES,
    **syscalls.DESCRIPTORS,
    **syscalls.MEMORY,
    **syscalls.OWN_PROCESS,
    **syscalls.OTHER_PROCESSES,
    **syscalls.NEW_PROCESSES,
    **syscalls.BY_ARGUMENT,
    **syscalls.REFUSED,
}
PRELUDE = f"""
import ctypes, errno, os, signal, socket, sys, threading, time
NUMBERS = {json.dumps(NUMBERS)}
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(name, *args):
    number = NUMBERS[name] if isinstance(name, str) else name
    args = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    done = libc.syscall(ctypes.c_long(number), *args)
    if done == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done
def attempt(function, *args, **kwargs):
    try:
        return 'GOT %r' % (function(*args, **kwargs),)
    except BaseException as error:
        return 'refused: %s: %s' % (type(error).__name__, error)
def read(path, size=4096):
    with open(path, 'rb') as file:
        return file.read(size)
def write(path, content='x'):
    with open(path, 'w') as file:
        return file.write(content)
"""


@functools.cache
def why_not(level: str) -> str | None:
    """Why this machine cannot give a level, if it cannot."""
    try:
        with Sandbox(level=level, warm=0) as sandbox:
            sandbox.run("1")
    except SandboxError as error:
        return str(error)
    return None


class Skip(Exception):
    """This machine does not have what the attack is about."""


ATTACKS: dict[str, tuple[Callable[[Arena], None], tuple[str, ...]]] = {}


def attack(*levels: str) -> Callable[[Callable[[Arena], None]], Callable[[Arena], None]]:
    """Note an attack, for all levels or for some."""

    def note(function: Callable[[Arena], None]) -> Callable[[Arena], None]:
        assert function.__name__ not in ATTACKS
        ATTACKS[function.__name__] = function, levels or LEVELS
        return function

    return note


def guard_processes() -> tuple[int, int]:
    """Whatever goes wrong, not more than a few hundred processes; gives back the limits that were set before."""
    before = resource.getrlimit(resource.RLIMIT_NPROC)
    wanted = _tasks_of(os.geteuid() or NOBODY) + 400
    if before[0] == resource.RLIM_INFINITY or before[0] > wanted:
        resource.setrlimit(resource.RLIMIT_NPROC, (wanted, before[1]))
    return before


class Arena:
    """The sandbox under attack, and what the attacker is after."""

    def __init__(self, level: str) -> None:
        self.level = level
        self.key = KEY_START + secrets.token_hex(16)
        os.environ[KEY_NAME] = self.key
        self._stack = contextlib.ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="arena-")))
        self.folder.chmod(0o755)
        self.secret = self.folder / "secret.txt"
        self.secret.write_text(self.key)
        self.secret.chmod(0o644)
        self.inherited = os.open(self.secret, os.O_RDONLY)
        os.set_inheritable(self.inherited, True)
        self._stack.callback(os.close, self.inherited)
        self.listeners = {name: self._listen(name) for name in ("inet", "inet6", "unix", "abstract")}
        self.udp = self._stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self.udp.bind(("127.0.0.1", 0))
        self.udp.setblocking(False)
        self._sandboxes: dict[str, Sandbox] = {}

    def _listen(self, name: str) -> socket.socket | None:
        families = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
        addresses: dict[str, Any] = {
            "inet": ("127.0.0.1", 0),
            "inet6": ("::1", 0),
            "unix": str(self.folder / "socket"),
            "abstract": f"\0arena-{os.getpid()}-{secrets.token_hex(4)}",
        }
        try:
            listener = socket.socket(families.get(name, socket.AF_UNIX))
        except OSError:
            return None
        self._stack.enter_context(listener)
        try:
            listener.bind(addresses[name])
        except OSError:
            return None
        listener.listen()
        listener.setblocking(False)
        if name == "unix":
            (self.folder / "socket").chmod(0o777)
        return listener

    def address(self, name: str) -> Any:
        listener = self.listeners[name]
        if listener is None:
            raise Skip(f"this machine has no {name} sockets")
        return listener.getsockname()

    def nobody_called(self) -> bool:
        """Has nothing reached any of the servers?"""
        for listener in self.listeners.values():
            if listener is None:
                continue
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                return False
        with contextlib.suppress(BlockingIOError):
            self.udp.recv(10)
            return False
        return True

    def close(self) -> None:
        for sandbox in self._sandboxes.values():
            sandbox.close()
        self._stack.close()
        os.environ.pop(KEY_NAME, None)

    def sandbox(self, **settings: Any) -> Sandbox:
        """A sandbox of this level; those with the same settings are one."""
        settings = {"level": self.level, "warm": 0, "timeout_s": 10.0, "memory_mb": 256, "disk_mb": 8, **settings}
        name = json.dumps(settings, sort_keys=True, default=repr)
        if name not in self._sandboxes:
            self._sandboxes[name] = Sandbox(**settings)
        return self._sandboxes[name]

    def run(self, code: str, *, timeout_s: float | None = None, **settings: Any) -> Result:
        """Run code with the attacker's tools, and see that the key is not among what came out."""
        prelude = PRELUDE if settings.get("language", "python") == "python" else ""
        result: Result = self.sandbox(**settings).run(prelude + code, timeout_s=timeout_s)
        assert self.key not in repr(result), result
        return result

    def bash(self, code: str, **settings: Any) -> Result:
        return self.run(code, language="bash", **settings)

    def refused(self, expression: str, *words: str, **settings: Any) -> Result:
        """The attempt fails with an error, of one of these kinds if any are given, and the code lives on to tell."""
        result = self.run(expression, **settings)
        assert result.status == "ok", result
        assert result.value is not None, result
        for line in result.value.strip("[]'\"").split("', '"):
            assert line.lstrip("'\"").startswith("refused: "), result.value
            assert not words or any(word in line for word in words), result.value
        return result

    def denied(self, name: str, *args: int | str, error: str = "Errno 1") -> None:
        """A call to the system is not permitted, or does not exist, whatever its arguments."""
        if name not in NUMBERS:
            raise Skip(f"{name} is not a call of {syscalls.MACHINE}")
        self.refused(f"attempt(call, {name!r}, {', '.join(map(repr, args)) or 0})", error, "Errno 38")

    def still_works(self, **settings: Any) -> None:
        """Whatever just happened, the next call is served as if nothing had."""
        result = self.sandbox(**settings).run("echo $((6*7))" if settings.get("language") == "bash" else "print(6*7)")
        assert (result.status, result.stdout) == ("ok", "42\n"), result


def wait_until(claim: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Does it come true in time? Long enough for a machine that has other things to do."""
    ends = time.monotonic() + seconds
    while not claim():
        if time.monotonic() > ends:
            return False
        time.sleep(0.01)
    return True


def descendants(pid: int) -> Iterator[int]:
    """The processes that this one started, and theirs."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from descendants(int(child))
