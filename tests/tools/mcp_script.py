"""A tiny MCP server for the tests: run as a script, it speaks the protocol over stdin and stdout, or over HTTP.

``--http`` makes it listen; it prints its port.
"""

import asyncio
import os
import socket
import sys
import time

try:
    from mcp.server import MCPServer as Server
    from mcp.server.mcpserver import Context
except ImportError:  # before version 2
    from mcp.server.fastmcp import Context
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


sessions: dict[object, int] = {}


@server.tool()
def count(ctx: Context) -> int:
    """How many times it was called in this session."""
    session = ctx.request_context.request.headers["mcp-session-id"]
    sessions[session] = sessions.get(session, 0) + 1
    return sessions[session]


@server.tool()
def authorization(ctx: Context) -> str:
    """The header that the client sent."""
    return str(ctx.request_context.request.headers.get("authorization"))


async def listen() -> None:
    import uvicorn

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        print(listener.getsockname()[1], flush=True)
        await uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="critical")).serve([listener])


if __name__ == "__main__":
    if "--broken" in sys.argv:
        raise SystemExit("it cannot start")
    if "--http" in sys.argv:
        asyncio.run(listen())
    else:
        server.run("stdio")
