"""A server of the Model Context Protocol → its tools. It is a process of its own, spoken to over stdin and stdout."""

from __future__ import annotations

import asyncio
import inspect
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TextIO

from verifiers.errors import Error, InfraError, ToolCallError
from verifiers.tools.calling import Content, is_content_parts
from verifiers.tools.tool import Tool, from_schema

START_S = 60.0
STOP_S = 10.0


@dataclass(frozen=True, kw_only=True)
class MCPServerConfig:
    """How a server is started; its tools are named ``<name>_<tool>`` where two servers have a tool of the same name."""

    name: str
    command: str
    args: list[str] = field(default_factory=list)
    env: dict[str, str] | None = None
    description: str = ""
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        given: Any = self.args
        if isinstance(given, str):
            raise TypeError(f"args of the MCP server {self.name!r} must be a list; got the string {given!r}")


def as_config(given: MCPServerConfig | Mapping[str, Any]) -> MCPServerConfig:
    """A configuration, or a dict of one.

    >>> as_config({"name": "files", "command": "server", "args": ["--root", "."]}).args
    ['--root', '.']
    """
    if isinstance(given, MCPServerConfig):
        return given
    try:
        return MCPServerConfig(**given)
    except TypeError as error:
        raise TypeError(f"an MCP server is given as name, command, args, env, description; {error}") from None


class MCPServer:
    """One running server. Its session lives in a thread with a loop of its own, so that any loop may call its tools."""

    def __init__(self, config: MCPServerConfig) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._session: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a server is one that was not started yet."""
        return {"config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["config"])  # type: ignore[misc]

    @property
    def is_running(self) -> bool:
        return self._session is not None and self._thread is not None and self._thread.is_alive()

    def start(self) -> list[Tool]:
        """Start the server unless it is running, and list its tools; blocks until it has said what it can do."""
        with self._lock:
            if not self.is_running:
                self.stop()
                self._launch()
        try:
            listed = self._ask(self._listed(self._session)).result(START_S)
        except Exception as error:  # the protocol's own, by whatever name the installed version has for them
            raise InfraError(f"the MCP server {self.config.name!r} does not list its tools: {error}") from error
        return [self._tool(described) for described in listed]

    async def _listed(self, session: Any) -> list[Any]:
        """What the server says of its tools, page by page."""
        from mcp.types import PaginatedRequestParams

        takes_params = "params" in inspect.signature(session.list_tools).parameters  # early versions do not
        page = await session.list_tools()
        listed, cursors = list(page.tools), set()
        while cursor := getattr(page, "next_cursor", None) or getattr(page, "nextCursor", None):
            if cursor in cursors:
                raise InfraError(f"it sends the page {cursor!r} over and over")
            cursors.add(cursor)
            params = PaginatedRequestParams(cursor=cursor)
            page = await session.list_tools(**({"params": params} if takes_params else {"cursor": cursor}))
            listed += page.tools
        return listed

    def _launch(self) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError:
            raise ImportError("MCP servers need: pip install 'verifiers[tools]'") from None
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, args=(ready,), daemon=True, name=f"mcp-{self.config.name}")
        self._thread.start()
        try:
            ready.result(START_S)
        except Exception as error:  # whatever the server's start raised
            self.stop()
            what = f"did not start within {START_S:g} s" if isinstance(error, TimeoutError) else f"failed: {error}"
            raise InfraError(f"the MCP server {self.config.name!r} ({self.config.command}) {what.strip()}") from error

    def _main(self, ready: Future[None]) -> None:
        with tempfile.TemporaryFile("w+", errors="replace") as complaints:
            try:
                asyncio.run(self._live(ready, complaints))
            except Exception as error:  # the server's start, in whatever way it failed
                if not ready.done():
                    complaints.seek(0)
                    ready.set_exception(RuntimeError("\n".join([str(_first(error)), complaints.read()[-1000:]])))
            finally:
                self._session = None

    async def _live(self, ready: Future[None], complaints: TextIO) -> None:
        """The server's life, from start to stop; it ends by itself when the server does."""
        from mcp import ClientSession, StdioServerParameters, stdio_client

        config = self.config
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        parameters = StdioServerParameters(command=config.command, args=config.args, env=config.env)
        async with stdio_client(parameters, errlog=complaints) as streams, ClientSession(*streams) as session:
            await session.initialize()
            self._session = session
            ready.set_result(None)
            await self._stop.wait()

    def stop(self) -> None:
        """End the server."""
        thread, loop, stop = self._thread, self._loop, self._stop
        if thread is None or not thread.is_alive():
            return
        if loop is not None and stop is not None:
            try:
                loop.call_soon_threadsafe(stop.set)
            except RuntimeError:  # its loop has just ended
                return
        thread.join(STOP_S)

    def _ask(self, request: Any) -> Future[Any]:
        loop = self._loop
        if self._session is None or loop is None or loop.is_closed():
            request.close()
            raise InfraError(f"the MCP server {self.config.name!r} is not running")
        return asyncio.run_coroutine_threadsafe(request, loop)

    def _tool(self, described: Any) -> Tool:
        schema = getattr(described, "input_schema", None) or getattr(described, "inputSchema", None) or {}
        text = described.description or self.config.description
        function = _RemoteTool(self, described.name)
        return from_schema(described.name, function, schema, description=text, timeout_s=self.config.timeout_s)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        """Call one of its tools. What the tool says of itself as an error is the model's to read."""
        session = self._session
        if session is None:
            raise InfraError(f"the MCP server {self.config.name!r} is not running")
        try:
            result = await asyncio.wrap_future(self._ask(session.call_tool(name, dict(arguments))))
        except Error:
            raise
        except Exception as error:  # the protocol's own, by whatever name the installed version has for them
            if _is_ended(error):
                self._session = None  # the next rollout starts the server again
                raise InfraError(f"the MCP server {self.config.name!r} has ended") from error
            raise ToolCallError(f"{name}: {error}") from error
        content = _content(result)
        if getattr(result, "is_error", None) or getattr(result, "isError", None):
            raise ToolCallError(content if isinstance(content, str) else f"{name} failed")
        return content


@dataclass(frozen=True)
class _RemoteTool:
    """The function of a server's tool; an object, so that environments that hold it can be pickled."""

    server: MCPServer
    name: str

    async def __call__(self, **arguments: Any) -> Content:
        return await self.server.call(self.name, arguments)


def _first(error: BaseException) -> BaseException:
    """The first error in a group of them: task groups wrap what went wrong."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _is_ended(error: Exception) -> bool:
    is_closed = type(error).__name__ in ("ClosedResourceError", "BrokenResourceError", "EndOfStream")
    return is_closed or isinstance(error, (OSError, EOFError)) or "connection closed" in str(error).lower()


def _content(result: Any) -> Content:
    """What a server returned, as a message's content: text, or parts where there is an image."""
    parts = [_part(block) for block in result.content or ()]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts if is_content_parts(parts) else str(parts)


def _part(block: Any) -> dict[str, Any]:
    if isinstance(text := getattr(block, "text", None), str):
        return {"type": "text", "text": text}
    if getattr(block, "type", "") == "image":
        kind = getattr(block, "mime_type", None) or getattr(block, "mimeType", "image/png")
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{block.data}"}}
    return {"type": "text", "text": block.model_dump_json(exclude_none=True)}
