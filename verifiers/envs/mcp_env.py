"""Tools from servers of the Model Context Protocol, started when they are first needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from verifiers import calls
from verifiers.envs.tool_env import ToolEnv
from verifiers.rollout import teardown
from verifiers.tools.mcp_server import MCPServer, MCPServerConfig, as_config
from verifiers.tools.tool import Tool
from verifiers.types import State

__all__ = ["MCPEnv", "MCPServerConfig"]


class MCPEnv(ToolEnv):
    """A `ToolEnv` whose tools are those of MCP servers: ``mcp_servers=[{"name": …, "command": …, "args": […]}]``.

    The servers are processes on this machine. They start with the first rollout and end with the environment; all
    rollouts share them. Functions given as ``tools`` stand beside theirs.
    """

    def __init__(
        self,
        mcp_servers: Sequence[MCPServerConfig | Mapping[str, Any]] = (),
        max_turns: int = 10,
        **kwargs: Any,
    ) -> None:
        configs = [as_config(given) for given in mcp_servers]
        if not configs:
            raise ValueError("MCPEnv needs at least one of mcp_servers")
        if twice := [name for name, count in Counter(config.name for config in configs).items() if count > 1]:
            raise ValueError(f"two MCP servers are named {twice[0]!r}; give them different names")
        self.servers = [MCPServer(config) for config in configs]
        self._is_connected = False
        super().__init__(max_turns=max_turns, **kwargs)

    async def start(self, state: State) -> State:
        await self._connect()
        self.tell(state)
        return await super().start(state)

    def tell(self, state: State) -> None:
        if self._is_connected:  # before that nobody knows what there is to tell
            super().tell(state)

    async def _connect(self) -> None:
        """Start the servers that are not running; their tools are added once."""
        if all(server.is_running for server in self.servers) and self._is_connected:
            return
        listed = await calls.in_thread(lambda: [server.start() for server in self.servers])
        if self._is_connected:
            return
        self._is_connected = True
        names = Counter(tool.name for tools in listed for tool in tools)
        names.update(tool.name for tool in self.toolbox)
        for server, tools in zip(self.servers, listed, strict=True):
            for tool in tools:
                self.toolbox.add(tool if names[tool.name] == 1 else _renamed(tool, f"{server.config.name}_{tool.name}"))
        self._tell_endpoint()

    connect = calls.both(_connect)
    """Start the servers now rather than with the first rollout, so that ``env.tools`` is filled."""

    @teardown
    async def stop_servers(self) -> None:
        """End the servers."""
        for server in self.servers:
            await calls.in_thread(server.stop)


def _renamed(tool: Tool, name: str) -> Tool:
    function = {**tool.schema["function"], "name": name}
    return replace(tool, name=name, schema={**tool.schema, "function": function})
