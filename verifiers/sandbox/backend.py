"""What every sandbox is to the rest of the library: sessions in which code runs, wherever that may be.

`Sandbox` (this machine, the default) and `ContainerSandbox` (Docker, Podman) are backends. One that rents machines
elsewhere is a class with these methods; environments take it as ``backend=``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any, Protocol

from verifiers.errors import SandboxError

ENGINES = ("docker", "podman")


class SandboxSession(Protocol):
    """State that lives on from cell to cell. Each method may be awaited inside an event loop.

    What the code does is data in the `Result`. An ``OSError`` of ``read`` is the code's doing; only a sandbox that does
    not work raises `SandboxError`.
    """

    def run(self, code: str, *, timeout_s: float | None = None) -> Any: ...  # a Result
    def write(self, name: str, content: bytes | str) -> Any: ...
    def read(self, name: str) -> Any: ...  # bytes
    def files(self) -> Any: ...  # names
    def close(self) -> None: ...


class SandboxBackend(Protocol):
    """Makes sessions, each with the files that it was made with; ``close`` ends all of them."""

    def session(self) -> SandboxSession: ...
    def close(self) -> None: ...


MakeBackend = Callable[..., SandboxBackend]
"""Called with ``language``, ``files``, ``memory_mb``, ``timeout_s`` and ``packages``, all by name."""


def find_backend(given: str | MakeBackend) -> MakeBackend:
    """``"local"``, ``"docker"``, ``"podman"``, or whatever makes a backend.

    >>> find_backend("local").__name__
    'Sandbox'
    """
    from verifiers.sandbox.containers import ContainerSandbox
    from verifiers.sandbox.sandbox import Sandbox

    if given == "local":
        return Sandbox
    if given in ENGINES:
        return lambda **settings: ContainerSandbox(engine=str(given), **settings)
    if not callable(given):
        raise ValueError(f"backend is 'local', 'docker', 'podman' or a callable that makes one; got {given!r}")
    return given


def find_engine(name: str | None = None) -> str:
    """The path of a container engine's program: of the one that is named, or the first that is installed."""
    for one in ENGINES if name is None else (name,):
        if path := shutil.which(one):
            return path
    raise SandboxError(
        f"{name or ' or '.join(ENGINES)} is not installed here; the sandbox of this machine needs neither"
    )
