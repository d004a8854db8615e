"""A tiny MCP server for the tests: run as a script, it speaks the protocol over stdin and stdout."""

import os
import sys
import time

try:
    from mcp.server import MCPServer as Server
except ImportError:  # before version 2
    from mcp.server.fastmcp import FastMCP as Server

server = Server("tiny")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ValueError(why)


@server.tool()
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "waited"


@server.tool()
def end() -> str:
    """End the server at once."""
    os._exit(3)


if __name__ == "__main__":
    if "--broken" in sys.argv:
        raise SystemExit("it cannot start")
    server.run("stdio")
