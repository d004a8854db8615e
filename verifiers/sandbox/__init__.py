"""Model-written code → what it printed, gave and did: a local sandbox, with no service and no daemon behind it.

``Sandbox().run(code)`` gives a `Result`; ``Sandbox().session()`` keeps state from cell to cell. Plain code gets the
result itself, code inside an event loop awaits it. What the code does is data in the `Result`; only a sandbox that
does not work raises, a `SandboxError`.
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
