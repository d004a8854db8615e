"""A bash tool for the model, with a separate sandbox and files for each rollout."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypedDict

from verifiers.envs.hooks import takes_messages
from verifiers.envs.sandbox_client import SandboxClient, in_folder
from verifiers.envs.sandbox_sessions import Sessions, cell_metrics
from verifiers.envs.stateful_tool_env import StatefulToolEnv
from verifiers.rollout import cleanup, teardown
from verifiers.sandbox.backend import MakeBackend
from verifiers.signatures import signature_of
from verifiers.tools.programs import QUEUE_S, Language, report
from verifiers.tools.tool import Tool, as_tool
from verifiers.types import Messages, SamplingArgs, State

# Settings of 0.1.x for a service that rents containers.
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
        "sandbox_client_max_connections",
        "sandbox_client_max_keepalive_connections",
        "sandbox_client_max_workers",
        "sandbox_name",
        "start_command",
        "team_id",
        "timeout_minutes",
    )
)


class SandboxState(TypedDict):
    """The ``sandbox_state`` argument of tools. The sandbox of a rollout is always ready."""

    ready: bool
    ready_wait_time: float
    command_execution_times: list[float]


_HIDDEN = ("state", "sandbox_id", "sandbox_state", "python_state", "working_dir")


class SandboxEnv(StatefulToolEnv):
    """An environment with a bash tool, which keeps folder, variables and files between the calls of a rollout.

    ``files`` are copied into the sandbox of every rollout, and those in a row's ``info["files"]`` into that of its
    rollouts. Files named in ``collect`` are in ``state["files"]`` afterwards, for reward functions. By default the
    sandbox is on this machine; ``backend`` may be ``"docker"``, ``"podman"`` or your own `SandboxBackend`.

    As in 0.1.x, ``state["sandbox_id"]`` is the id of a rollout's sandbox for ``self.sandbox_client``, tools may have a
    hidden argument ``sandbox_id``, and ``post_rollout(state)`` runs before the sandbox is destroyed.
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
        backend: str | MakeBackend = "local",
        memory_gb: float | None = None,
        timeout_per_command_seconds: float | None = None,
        **kwargs: Any,
    ) -> None:
        asked = {name for name in kwargs if name in _NO_EFFECT}
        _warn_of(asked | ({"get_sandbox_request"} if hasattr(self, "get_sandbox_request") else set()))
        kwargs = {name: value for name, value in kwargs.items() if name not in _NO_EFFECT}
        self.sessions = Sessions(
            self.language,
            files=files,
            collect=collect,
            memory_mb=memory_mb if memory_gb is None else int(memory_gb * 1024),
            timeout_s=timeout_s if timeout_per_command_seconds is None else timeout_per_command_seconds,
            packages=packages,
            allow_unsafe=allow_unsafe,
            backend=backend,
        )
        super().__init__(tools=tools, max_turns=max_turns, **kwargs)
        self.sandbox_client = SandboxClient(self.sessions)
        # The sandbox limits the time of a cell itself; this limit is for waiting until the sandbox has a free slot.
        hidden = [name for name in signature_of(self.sandbox_tool).parameters if name in _HIDDEN]
        self.add_tool(as_tool(self.sandbox_tool, args_to_skip=hidden, timeout_s=QUEUE_S))

    def new_state(self, row: Mapping[str, Any], client: Any, model: str, sampling_args: SamplingArgs | None) -> State:
        state = super().new_state(row, client, model, sampling_args)
        state["sandbox_id"] = self.sessions.expect(state)
        state["sandbox_state"] = SandboxState(ready=True, ready_wait_time=0.0, command_execution_times=[])
        return state

    def known_args(self, messages: Messages, state: State) -> dict[str, Any]:
        own = {"sandbox_id": state["sandbox_id"], "sandbox_state": state["sandbox_state"]}
        return {**super().known_args(messages, state), **own, "working_dir": state.get("working_dir")}

    @property
    def sandbox_tool(self) -> Callable[..., Any]:
        """The tool that runs code."""
        return self.bash

    async def bash(
        self,
        command: str,
        sandbox_id: str | State | None = None,
        sandbox_state: Any = None,
        working_dir: str | None = None,
        state: State | None = None,
    ) -> str:
        """Run a bash command. Files, variables and the current folder stay as they are for the next command.

        Args:
            command: The command, or a script of several lines.

        Returns:
            What it wrote, and its exit code if that is not 0.
        """
        return await self._run_cell(in_folder(command, working_dir), state, sandbox_id)

    async def _run_cell(self, code: str, state: State | None, sandbox_id: str | State | None) -> str:
        if isinstance(sandbox_id, State):  # the second argument may be the state, or the sandbox's id as in 0.1.9
            state, sandbox_id = sandbox_id, None
        if state is not None:
            return await self.sessions.run(code, state)
        if sandbox_id is None:
            name = self.sandbox_tool.__name__
            raise TypeError(f"{name}() needs the rollout: state=state, or sandbox_id=state['sandbox_id']")
        return report(await self.sessions.named(sandbox_id).run(code))

    async def post_rollout(self, state: State) -> None:
        """Override to read results from the sandbox at the end of a rollout, before it is destroyed."""

    @cleanup(priority=-100)
    async def destroy_sandbox(self, state: State) -> None:
        """Read the files to collect, then end the rollout's sandbox."""
        try:
            given = (self.conversation(state), state) if takes_messages(self.post_rollout) else (state,)
            await self.post_rollout(*given)  # with the messages first, as in 0.1.7
        finally:
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
        warnings.warn(f"{listed}: no effect; the sandbox uses this machine and its installed software", stacklevel=3)
