"""The protocol of sandbox backends: sessions that run code, on this machine or elsewhere.

`Sandbox` (this machine, the default) and `ContainerSandbox` (Docker, Podman) implement it. Any other class with these
methods, for example one for rented machines, can be passed to environments as ``backend=``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any, Protocol

from verifiers.errors import SandboxError

ENGINES = ("docker", "podman")


class SandboxSession(Protocol):
    """Keeps state between cells. Each method may be awaited inside an event loop.

    What the code does is data in the `Result`. An ``OSError`` from ``read`` is caused by the code; a failure of the
    sandbox itself raises `SandboxError`.
    """

    def run(self, code: str, *, timeout_s: float | None = None) -> Any: ...  # a Result
    def write(self, name: str, content: bytes | str) -> Any: ...
    def read(self, name: str) -> Any: ...  # bytes
    def files(self) -> Any: ...  # names
    def close(self) -> None: ...


class SandboxBackend(Protocol):
    """Creates sessions, each with the files of the backend; ``close`` ends all of them."""

    def session(self) -> SandboxSession: ...
    def close(self) -> None: ...


MakeBackend = Callable[..., SandboxBackend]
"""Called with the keywords ``language``, ``files``, ``memory_mb``, ``timeout_s`` and ``packages``."""


def find_backend(given: str | MakeBackend) -> MakeBackend:
    """The callable that makes a backend, from ``"local"``, ``"docker"``, ``"podman"`` or such a callable.

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
        raise ValueError(f"backend must be 'local', 'docker', 'podman' or a callable that makes one; got {given!r}")
    return given


def find_engine(name: str | None = None) -> str:
    """The path of the named container engine, or of the first that is installed."""
    for one in ENGINES if name is None else (name,):
        if path := shutil.which(one):
            return path
    raise SandboxError(
        f"{name or ' or '.join(ENGINES)} is not installed here; install it, or use backend='local', which needs neither"
    )
