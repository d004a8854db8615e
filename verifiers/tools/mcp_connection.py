"""A server's configuration → a session with it, over stdin and stdout or over HTTP, until either side ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from verifiers.errors import InfraError
from verifiers.tools.mcp_config import MCPServerConfig, hidden_in_logs

START_S = 60.0
STOP_S = 10.0
LAST_WORDS_S = 1.0
MAX_COMPLAINT_CHARS = 1000
MAX_KEPT_BYTES = 1 << 16

T = TypeVar("T")


class EndedError(Exception):
    """The session ended before a request was answered."""


class AnswerError(Exception):
    """The server answered a request with an error; the message is without its secrets."""


class Connection:
    """One session. It runs in its own task, because the MCP library must be entered and exited in the same task."""

    def __init__(self, config: MCPServerConfig) -> None:
        self.config = config
        self.session: Any = None
        self._ended = asyncio.Event()
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the server or connect to it; raises `InfraError` with the reason if that fails."""
        try:
            import mcp  # noqa: F401
        except ImportError:
            raise ImportError("MCP servers need the tools extra: pip install 'verifiers[tools]'") from None
        hidden_in_logs.add(self.config)
        ready: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(ready))
        try:
            async with asyncio.timeout(START_S):
                problem = await asyncio.shield(ready)
        except TimeoutError:
            problem = f"did not start within {START_S:g} s"
        except asyncio.CancelledError:
            await self.close()
            raise
        if problem is not None:
            await self.close()
            raise InfraError(f"the MCP server {self.config.name!r} ({self.config.address}) {problem}")

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    async def ask(self, request: Coroutine[Any, Any, T]) -> T:
        """The answer to a request; raises `EndedError` if the session ends first."""
        asked = asyncio.ensure_future(request)
        ended = asyncio.ensure_future(self._ended.wait())
        problem: BaseException | None = None
        try:
            await asyncio.wait([asked, ended], return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
        except Exception as error:  # the MCP library's errors, whose names depend on its version
            problem = error
        finally:
            asked.cancel()
            ended.cancel()
        # Raised outside the except block, so that no traceback contains the library's error, which may have a secret.
        if problem is None or self.has_ended or is_ended(problem):
            self._ended.set()
            raise EndedError
        raise AnswerError(self.config.hide(str(problem) or type(problem).__name__))

    async def _live(self, ready: asyncio.Future[str | None]) -> None:
        """Run the session. Errors and stderr of the server may contain its secrets: only redacted text leaves here."""
        problem = "failed: it ended before it was ready"
        complaints = Complaints()
        try:
            await self._serve(ready, complaints)
        except Exception as error:  # the MCP library's errors, whose names depend on its version
            said = self.config.hide(f"{_message(_first(error))}\n{await complaints.last()}".strip())
            problem = f"failed: {said[-MAX_COMPLAINT_CHARS:]}"
        finally:
            complaints.close()
            self._ended.set()
            self.session = None
            if not ready.done():
                ready.set_result(problem)

    async def _serve(self, ready: asyncio.Future[str | None], complaints: Complaints) -> None:
        from mcp import ClientSession

        async with _streams(self.config, complaints) as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            self.session = session
            if not ready.done():
                ready.set_result(None)
            await self._stop.wait()

    async def close(self) -> None:
        """End the session, and the server if it was started for it."""
        self._stop.set()
        task = self._task
        if task is None:
            return
        if self.session is None and not task.done():  # still starting
            task.cancel()
        done, _ = await asyncio.wait([task], timeout=STOP_S)
        if not done:
            task.cancel()
            await asyncio.wait([task], timeout=STOP_S)


class Complaints:
    """The end of what a server writes to its stderr. A thread reads it, so that it neither fills a disk nor blocks."""

    def __init__(self) -> None:
        self._fd = -1
        self._kept = b""
        self._reader = threading.Thread(target=self._read, name="stderr of an MCP server", daemon=True)

    def open(self) -> None:
        """Make the pipe for a server that is about to start."""
        self._came, self._fd = os.pipe()
        self._reader.start()

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Close this process's end; the thread ends when no other process has the pipe open."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    async def last(self) -> str:
        """The end of it, of a server that has ended."""
        if self._fd < 0:
            return ""
        self.close()
        await asyncio.to_thread(self._reader.join, LAST_WORDS_S)  # a program that the server started may go on
        return self._kept.decode(errors="replace")

    def _read(self) -> None:
        with open(self._came, "rb", buffering=0) as pipe:
            while chunk := pipe.read(MAX_KEPT_BYTES):
                self._kept = (self._kept + chunk)[-MAX_KEPT_BYTES:]


@contextlib.asynccontextmanager
async def _streams(config: MCPServerConfig, complaints: Complaints) -> AsyncIterator[tuple[Any, Any]]:
    """The read and write streams, for any supported version of the MCP library."""
    if config.url is None:
        from mcp import StdioServerParameters, stdio_client

        assert config.command is not None
        parameters = StdioServerParameters(command=config.command, args=config.args, env=config.env)
        complaints.open()
        async with stdio_client(parameters, errlog=complaints) as streams:
            yield streams[0], streams[1]
        return
    from mcp.client import streamable_http

    if hasattr(streamable_http, "streamable_http_client"):
        from mcp.shared._httpx_utils import create_mcp_http_client

        async with (
            create_mcp_http_client(headers=config.headers) as client,
            streamable_http.streamable_http_client(config.url, http_client=client) as streams,
        ):
            yield streams[0], streams[1]
    else:  # before version 1.24
        async with streamable_http.streamablehttp_client(config.url, headers=config.headers) as streams:
            yield streams[0], streams[1]


def _first(error: BaseException) -> BaseException:
    """The first error in an exception group, because task groups wrap errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _message(error: BaseException) -> str:
    return str(error) or type(error).__name__


def is_ended(error: BaseException) -> bool:
    """Does this error mean that the session has ended?"""
    error = _first(error)
    is_closed = type(error).__name__ in ("ClosedResourceError", "BrokenResourceError", "EndOfStream", "ConnectError")
    said = str(error).lower()
    return is_closed or isinstance(error, (OSError, EOFError)) or "connection closed" in said or "session term" in said
