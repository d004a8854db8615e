"""Classic import path: tools from MCP servers."""

from verifiers.envs.mcp_env import MCPEnv, MCPServerConfig

__all__ = ["MCPEnv", "MCPServerConfig"]
