"""An MCP server → its tools, callable from any event loop; a server that ends is restarted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from verifiers.errors import InfraError, ToolCallError
from verifiers.signatures import signature_of
from verifiers.tools.calling import Content, as_text, is_content_parts
from verifiers.tools.mcp_config import MCPServerConfig, as_config
from verifiers.tools.mcp_connection import START_S, STOP_S, AnswerError, Connection, EndedError
from verifiers.tools.tool import Tool, from_schema, usable_name

__all__ = ["MCPServer", "MCPServerConfig", "as_config"]

RETRY_DELAYS_S = (0.2, 1.0)
SERVER = "verifiers server"
"""The argument in which an environment passes the server to call a tool on; no schema can have this name."""


class MCPServer:
    """One server, in its own thread with its own event loop. A server that has ended is restarted by the next call.

    A request during which it ends is retried once, with no concurrent call. If it ends again, the request fails.
    """

    def __init__(self, config: MCPServerConfig) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._life: _Life | None = None
        self._thread: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only the configuration: a copy is not running."""
        return {"config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["config"])  # type: ignore[misc]

    @property
    def is_running(self) -> bool:
        life = self._life
        return life is not None and life.is_connected and self._thread is not None and self._thread.is_alive()

    def start(self) -> list[Tool]:
        """Start the server unless it is running, and list its tools. Blocks until the server has answered."""
        return self._tools(self._submit("list").result(2 * START_S))

    async def open(self) -> list[Tool]:
        """The same as `start`, for async code."""
        return self._tools(await self._answer_to("list"))

    def _tools(self, listed: list[Any]) -> list[Tool]:
        return [self._tool(described) for described in listed]

    async def _answer_to(self, what: str, *arguments: Any) -> Any:
        try:
            return await asyncio.wrap_future(self._submit(what, *arguments))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        raise InfraError(f"the MCP server {self.config.name!r} was stopped")

    def _tool(self, described: Any) -> Tool:
        config = self.config
        schema = getattr(described, "input_schema", None) or getattr(described, "inputSchema", None) or {}
        return from_schema(
            usable_name(described.name),
            _RemoteTool(self, described.name),
            json.loads(config.hide(json.dumps(schema))),
            description=config.hide(described.description or config.description),
            timeout_s=config.timeout_s,
            sequential=config.sequential,
        )

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        """Call one of the server's tools. An error result raises `ToolCallError`, which the model reads."""
        result = await self._answer_to("call", name, dict(arguments))
        content = _content(result, self.config)
        if getattr(result, "is_error", None) or getattr(result, "isError", None):
            raise ToolCallError(content if isinstance(content, str) else f"{name} failed")
        return content

    def _submit(self, what: str, *arguments: Any) -> Future[Any]:
        """Run a method of `_Life` on the server's event loop; the first call starts the thread and its loop."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                ready = threading.Event()
                name = f"mcp-{self.config.name}"
                self._thread = threading.Thread(target=self._main, args=(ready,), daemon=True, name=name)
                self._thread.start()
                ready.wait()
            assert self._life is not None
            assert self._loop is not None
            request: Coroutine[Any, Any, Any] = getattr(self._life, what)(*arguments)
            return asyncio.run_coroutine_threadsafe(request, self._loop)

    def _main(self, ready: threading.Event) -> None:
        async def live() -> None:
            self._loop, self._life = asyncio.get_running_loop(), _Life(self.config)
            ready.set()
            await self._life.wait()

        asyncio.run(live())

    def stop(self) -> None:
        """Stop the server."""
        with self._lock:
            thread, loop, life = self._thread, self._loop, self._life
            self._thread = self._loop = self._life = None
        if thread is None or loop is None or life is None or not thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):  # the loop has just closed
            loop.call_soon_threadsafe(life.stop)
        thread.join(2 * STOP_S)


class _Life:
    """The state on the server's event loop: the current connection, and which calls may run concurrently."""

    def __init__(self, config: MCPServerConfig) -> None:
        self.config = config
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._retrying = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._may_start, self._is_idle = asyncio.Event(), asyncio.Event()
        self._may_start.set()
        self._is_idle.set()
        self._n_calls = 0

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and not self._connection.has_ended

    async def wait(self) -> None:
        """Wait for `stop`, then close the connection."""
        await self._stopping.wait()
        if self._connection is not None:
            await self._connection.close()

    def stop(self) -> None:
        self._stopping.set()

    async def _ask_for_tools(self) -> list[Any]:
        connection = await self._connected()
        try:
            async with asyncio.timeout(START_S):
                return await connection.ask(_listed(connection.session))
        except TimeoutError:
            problem = f"no answer within {START_S:g} s"
        except AnswerError as error:
            problem = str(error)
        raise InfraError(f"the MCP server {self.config.name!r} does not list its tools: {problem}")

    async def list(self) -> list[Any]:
        """The server's descriptions of its tools, from all pages."""
        with contextlib.suppress(EndedError):  # perhaps because of a concurrent call
            return await self._ask_for_tools()
        async with self._exclusively():
            with contextlib.suppress(EndedError):
                return await self._ask_for_tools()
        raise InfraError(f"the MCP server {self.config.name!r} does not list its tools: it ended twice")

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        with contextlib.suppress(EndedError):
            async with self._concurrently():
                return await self._ask(name, arguments)
        async with self._exclusively():
            with contextlib.suppress(EndedError):
                return await self._ask(name, arguments)
        raise InfraError(f"the MCP server {self.config.name!r} ended twice when {name!r} was called")

    async def _ask(self, name: str, arguments: dict[str, Any]) -> Any:
        connection = await self._connected()
        try:
            return await connection.ask(connection.session.call_tool(name, arguments))
        except AnswerError as error:
            raise ToolCallError(f"{name}: {error}") from None

    async def _connected(self) -> Connection:
        async with self._connecting:
            if self._connection is None or not self.is_connected:
                if self._connection is not None:
                    await self._connection.close()
                self._connection = await self._new_connection()
            return self._connection

    async def _new_connection(self) -> Connection:
        """Connect, with retries for a server over HTTP, which may be unavailable for a moment."""
        for delay_s in RETRY_DELAYS_S if self.config.url is not None else ():
            connection = Connection(self.config)
            try:
                await connection.open()
                return connection
            except InfraError:
                await asyncio.sleep(delay_s)
        connection = Connection(self.config)
        await connection.open()
        return connection

    @contextlib.asynccontextmanager
    async def _concurrently(self) -> AsyncIterator[None]:
        while not self._may_start.is_set():
            await self._may_start.wait()
        self._n_calls += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._n_calls -= 1
            if not self._n_calls:
                self._is_idle.set()

    @contextlib.asynccontextmanager
    async def _exclusively(self) -> AsyncIterator[None]:
        """Run without concurrent calls, so that if the server ends, this call is the cause."""
        async with self._retrying:
            self._may_start.clear()
            try:
                await self._is_idle.wait()
                yield
            finally:
                self._may_start.set()


async def _listed(session: Any) -> list[Any]:
    from mcp.types import PaginatedRequestParams

    takes_params = "params" in signature_of(session.list_tools).parameters  # not in early versions
    page = await session.list_tools()
    listed, cursors = list(page.tools), set()
    while cursor := getattr(page, "next_cursor", None) or getattr(page, "nextCursor", None):
        if cursor in cursors:
            raise InfraError(f"the server sends the page {cursor!r} repeatedly")
        cursors.add(cursor)
        params = PaginatedRequestParams(cursor=cursor)
        page = await session.list_tools(**({"params": params} if takes_params else {"cursor": cursor}))
        listed += page.tools
    return listed


@dataclass(frozen=True)
class _RemoteTool:
    """The function of a server's tool; a class, so that environments with this tool can be pickled."""

    server: MCPServer
    name: str

    async def __call__(self, /, **arguments: Any) -> Content:
        server: MCPServer = arguments.pop(SERVER, self.server)
        return await server.call(self.name, arguments)


def server_of(tool: Tool) -> MCPServer | None:
    """The MCP server of a tool; None for any other tool."""
    return tool.function.server if isinstance(tool.function, _RemoteTool) else None


def _content(result: Any, config: MCPServerConfig) -> Content:
    """A server's result as message content, without secrets: a text, or parts if there is an image."""
    parts = [_part(block, config) for block in result.content or ()]
    if all(part["type"] == "text" for part in parts):
        text = "\n".join(part["text"] for part in parts)
        structured = getattr(result, "structured_content", None) or getattr(result, "structuredContent", None)
        return text if text or structured is None else config.hide(as_text(structured))
    return parts if is_content_parts(parts) else str(parts)


def _part(block: Any, config: MCPServerConfig) -> dict[str, Any]:
    if isinstance(text := getattr(block, "text", None), str):
        return {"type": "text", "text": config.hide(text)}
    if getattr(block, "type", "") == "image":
        kind = getattr(block, "mime_type", None) or getattr(block, "mimeType", "image/png")
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{block.data}"}}
    return {"type": "text", "text": config.hide(block.model_dump_json(exclude_none=True))}
