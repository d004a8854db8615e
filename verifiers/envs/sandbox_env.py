"""A shell for the model: a bash tool in a sandbox of its own for each rollout, with files in and out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from verifiers.envs.sandbox_sessions import Sessions, cell_metrics
from verifiers.envs.stateful_tool_env import StatefulToolEnv
from verifiers.rollout import cleanup, teardown
from verifiers.tools.programs import QUEUE_S, Language
from verifiers.tools.tool import Tool, as_tool
from verifiers.types import State

# What 0.1.x says to a service that rents containers out.
_NO_EFFECT = frozenset(
    (
        "advanced_configs",
        "backoff_factor",
        "base_delay",
        "cpu_cores",
        "disk_size_gb",
        "docker_image",
        "environment_vars",
        "gpu_count",
        "jitter",
        "labels",
        "max_backoff_seconds",
        "max_startup_wait_seconds",
        "pip_install_packages",
        "sandbox_name",
        "start_command",
        "team_id",
        "timeout_minutes",
    )
)


class SandboxEnv(StatefulToolEnv):
    """An environment with a bash tool; folder, variables and files live on from call to call of a rollout.

    ``files`` are put into the sandbox, for all rollouts here or for one row in ``info["files"]``; those named in
    ``collect`` are in ``state["files"]`` afterwards, where rewards find them. The sandbox is on this machine.
    """

    language: ClassVar[Language] = "bash"

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | Tool] | None = None,
        max_turns: int = 10,
        *,
        files: Mapping[str, bytes | str] | None = None,
        collect: Iterable[str] = (),
        memory_mb: int = 512,
        timeout_s: float = 30.0,
        packages: Iterable[str] = (),
        allow_unsafe: bool = False,
        memory_gb: float | None = None,
        timeout_per_command_seconds: float | None = None,
        **kwargs: Any,
    ) -> None:
        _warn_of({name for name in kwargs if name in _NO_EFFECT})
        kwargs = {name: value for name, value in kwargs.items() if name not in _NO_EFFECT}
        self.sessions = Sessions(
            self.language,
            files=files,
            collect=collect,
            memory_mb=memory_mb if memory_gb is None else int(memory_gb * 1024),
            timeout_s=timeout_s if timeout_per_command_seconds is None else timeout_per_command_seconds,
            packages=packages,
            allow_unsafe=allow_unsafe,
        )
        super().__init__(tools=tools, max_turns=max_turns, **kwargs)
        # The sandbox has its own limit on a cell; before that, calls may have to wait for a place in it.
        self.add_tool(as_tool(self.sandbox_tool, args_to_skip=["state"], timeout_s=QUEUE_S))

    @property
    def sandbox_tool(self) -> Callable[..., Any]:
        """The tool that runs code."""
        return self.bash

    async def bash(self, command: str, state: State) -> str:
        """Run a bash command. Files, variables and the current folder stay as they are for the next command.

        Args:
            command: The command, or a script of several lines.

        Returns:
            What it wrote, and its exit code if that is not 0.
        """
        return await self.sessions.run(command, state)

    @cleanup(priority=-100)
    async def destroy_sandbox(self, state: State) -> None:
        """Read the files to be kept, then end the rollout's sandbox."""
        await self.sessions.finish(state)

    @teardown
    async def destroy_all_sandboxes(self) -> None:
        """End every sandbox of this environment."""
        self.sessions.close()

    def own_metrics(self, state: State) -> dict[str, float]:
        return {**super().own_metrics(state), **cell_metrics(state)}


def _warn_of(names: set[str]) -> None:
    if names:
        listed = ", ".join(sorted(names))
        warnings.warn(f"{listed}: no effect; the sandbox is on this machine, with what is installed here", stacklevel=3)
