"""The client of 0.1.x's sandbox service, on top of the sandbox sessions of this machine."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers.envs.sandbox_sessions import Sessions
from verifiers.errors import HookError


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResponse:
    """The result of a command."""

    stdout: str
    stderr: str
    exit_code: int


class SandboxClient:
    """For subclasses of `SandboxEnv`: runs commands and copies files in the sandbox ``state["sandbox_id"]``."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def execute_command(
        self, sandbox_id: str, command: str, working_dir: str | None = None, timeout: float | None = None, **_: Any
    ) -> CommandResponse:
        """Run a bash command in a rollout's sandbox."""
        if self._sessions.language != "bash":
            raise HookError(
                f"the sandbox of a PythonEnv cannot start programs such as {command!r:.80}: "
                "use a SandboxEnv, or run Python there: await self.python(code, sandbox_id)"
            )
        session = self._sessions.named(sandbox_id)
        result = await session.run(in_folder(command, working_dir), timeout_s=timeout)
        failed = "\n".join(part for part in (result.stderr, result.error) if part)
        code = result.exit_code if result.exit_code is not None else int(not result.is_ok)
        return CommandResponse(stdout=result.stdout, stderr=failed, exit_code=code)

    async def upload_file(self, sandbox_id: str, file_path: str, local_file_path: str | Path, **_: Any) -> None:
        """Copy a file of this machine into a rollout's sandbox."""
        content = await asyncio.to_thread(Path(local_file_path).read_bytes)
        await self._sessions.named(sandbox_id).write(file_path, content)

    async def download_file(self, sandbox_id: str, file_path: str, local_file_path: str | Path, **_: Any) -> None:
        """Copy a file of a rollout's sandbox to this machine."""
        content = await self._sessions.named(sandbox_id).read(file_path)
        await asyncio.to_thread(Path(local_file_path).write_bytes, content)

    async def wait_for_creation(self, sandbox_id: str, **_: Any) -> None:
        """Does nothing, because a sandbox is created on first use."""


def in_folder(command: str, folder: str | None) -> str:
    """A command that runs in a folder and does not change the shell's current folder.

    >>> in_folder("ls", None), in_folder("ls", "/a b")
    ('ls', "(cd '/a b' && ls\\n)")
    """
    return command if folder is None else f"(cd {shlex.quote(folder)} && {command}\n)"
