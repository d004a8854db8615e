"""Tools of Model Context Protocol (MCP) servers, which are started on first use."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from verifiers import calls
from verifiers.envs.tool_env import ToolEnv
from verifiers.rollout import cleanup, teardown
from verifiers.tools.mcp_server import SERVER, MCPServer, MCPServerConfig, as_config, server_of
from verifiers.tools.tool import MAX_NAME_CHARS, Tool, renamed, usable_name
from verifiers.types import Messages, State

__all__ = ["MCPEnv", "MCPServerConfig"]


class MCPEnv(ToolEnv):
    """A `ToolEnv` whose tools are those of MCP servers: ``mcp_servers=[{"name": …, "command": …, "args": […]}]``.

    A server is a process on this machine (``command``) or is reached over HTTP (``url``). Servers start with the first
    rollout and end with the environment. All rollouts share them, unless ``per_rollout`` gives each rollout its own.
    Functions passed as ``tools`` are offered too.
    """

    def __init__(
        self,
        mcp_servers: Sequence[MCPServerConfig | Mapping[str, Any]] = (),
        max_turns: int = 10,
        *,
        per_rollout: bool = False,
        **kwargs: Any,
    ) -> None:
        configs = [as_config(given) for given in mcp_servers]
        if not configs:
            raise ValueError("MCPEnv needs at least one server in mcp_servers")
        if twice := [name for name, count in Counter(config.name for config in configs).items() if count > 1]:
            raise ValueError(f"two MCP servers are named {twice[0]!r}; give them different names")
        if per_rollout:
            configs = [replace(config, per_rollout=True) for config in configs]
        self.servers = [MCPServer(config) for config in configs]
        self._own: dict[str, dict[str, MCPServer]] = {}
        self._is_connected = False
        self._lock = threading.Lock()
        super().__init__(max_turns=max_turns, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """The servers of running rollouts are not pickled."""
        return {key: value for key, value in super().__getstate__().items() if key not in ("_own", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._own = {}
        self._lock = threading.Lock()

    async def start(self, state: State) -> State:
        await self._connect()
        await self._start_own(state)
        self.tell(state)
        return await super().start(state)

    def tell(self, state: State) -> None:
        if self._is_connected:  # before that, the tools are not known
            super().tell(state)

    # --- servers --------------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        """Start the shared servers that are not running. The tools of all servers are added once."""
        if not self._is_connected or not all(server.is_running for server in self._shared):
            await calls.in_thread(self._start_servers)

    def _start_servers(self) -> None:
        with self._lock:
            if self._is_connected:
                for server in self._shared:
                    if not server.is_running:
                        server.start()
                return
            self._add_tools([server.start() for server in self.servers])
            self._is_connected = True
            for server in self.servers:
                if server.config.per_rollout:  # it was started only to list its tools
                    server.stop()

    @property
    def _shared(self) -> list[MCPServer]:
        return [server for server in self.servers if not server.config.per_rollout]

    connect = calls.both(_connect)
    """Start the servers now rather than with the first rollout, so that ``env.tools`` is complete."""

    def _add_tools(self, listed: Sequence[Sequence[Tool]]) -> None:
        """Add the servers' tools under their own names, or prefixed with the server's name if a name is not unique."""
        names = Counter(name for tools in listed for name in {tool.name for tool in tools})
        names.update(tool.name for tool in self.toolbox)
        for server, tools in zip(self.servers, listed, strict=True):
            for tool in tools:
                name = tool.name if names[tool.name] == 1 else usable_name(f"{server.config.name}_{tool.name}")
                self.toolbox.add(renamed(tool, self._free(name, names)))
        self._tell_endpoint()

    def _free(self, name: str, names: Mapping[str, int]) -> str:
        """The name, with a number appended if another tool has it already."""
        free, number = name, 2
        while free in self.toolbox or (free != name and free in names):
            suffix = f"_{number}"
            free, number = name[: MAX_NAME_CHARS - len(suffix)] + suffix, number + 1
        return free

    async def _start_own(self, state: State) -> None:
        """Start this rollout's own servers."""
        configs = [server.config for server in self.servers if server.config.per_rollout]
        if configs:
            own = {config.name: MCPServer(config) for config in configs}
            self._own[state["trajectory_id"]] = own
            await asyncio.gather(*(server.open() for server in own.values()))

    async def fill_in(self, tool: Tool, arguments: dict[str, Any], messages: Messages, state: State) -> dict[str, Any]:
        arguments = await super().fill_in(tool, arguments, messages, state)
        server = server_of(tool)
        own = self._own.get(state["trajectory_id"], {}).get(server.config.name) if server is not None else None
        return arguments if own is None else {**arguments, SERVER: own}

    @cleanup
    async def stop_own_servers(self, state: State) -> None:
        """Stop the servers of a finished rollout."""
        for server in self._own.pop(state["trajectory_id"], {}).values():
            await calls.in_thread(server.stop)

    @teardown
    async def stop_servers(self) -> None:
        """Stop all servers."""
        left = [server for own in self._own.values() for server in own.values()]
        for server in [*self.servers, *left]:
            await calls.in_thread(server.stop)
