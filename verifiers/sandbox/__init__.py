"""Runs model-written code in a local sandbox, which needs no service and no daemon.

``Sandbox().run(code)`` returns a `Result`; ``Sandbox().session()`` keeps state between cells. In synchronous code the
result is returned directly; inside an event loop it is awaited. Whatever the code does is data in the `Result`; only
a failure of the sandbox itself raises, as a `SandboxError`.
"""

from __future__ import annotations

from verifiers.errors import SandboxError
from verifiers.sandbox.backend import SandboxBackend, SandboxSession
from verifiers.sandbox.containers import ContainerSandbox
from verifiers.sandbox.result import Level, Result, Status
from verifiers.sandbox.sandbox import Sandbox, level
from verifiers.sandbox.session import Session

__all__ = [
    "ContainerSandbox",
    "Level",
    "Result",
    "Sandbox",
    "SandboxBackend",
    "SandboxError",
    "SandboxSession",
    "Session",
    "Status",
    "level",
]
