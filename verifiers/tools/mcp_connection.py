"""A server's configuration → a session with it, over stdin and stdout or over HTTP, until one of the two ends it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TextIO, TypeVar

from verifiers.errors import InfraError
from verifiers.tools.mcp_config import MCPServerConfig, hidden_in_logs

START_S = 60.0
STOP_S = 10.0
MAX_COMPLAINT_CHARS = 1000

T = TypeVar("T")


class EndedError(Exception):
    """The session ended before a request was answered."""


class AnswerError(Exception):
    """The server answered a request with an error; the text holds none of its secrets."""


class Connection:
    """One session; it lives in a task of its own, as the protocol's library wants to be entered and left in one."""

    def __init__(self, config: MCPServerConfig) -> None:
        self.config = config
        self.session: Any = None
        self._ended = asyncio.Event()
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the server, or reach it; an `InfraError` says why it cannot be."""
        try:
            import mcp  # noqa: F401
        except ImportError:
            raise ImportError("MCP servers need: pip install 'verifiers[tools]'") from None
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
        """The answer to a request of the session; raises `EndedError` where the session ends before it."""
        asked = asyncio.ensure_future(request)
        ended = asyncio.ensure_future(self._ended.wait())
        problem: BaseException | None = None
        try:
            await asyncio.wait([asked, ended], return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
        except Exception as error:  # the protocol's own, by whatever name the installed version has for them
            problem = error
        finally:
            asked.cancel()
            ended.cancel()
        # Raised out here: the protocol's error, which may hold a secret, is then in no traceback.
        if problem is None or self.has_ended or is_ended(problem):
            self._ended.set()
            raise EndedError
        raise AnswerError(self.config.hide(str(problem) or type(problem).__name__))

    async def _live(self, ready: asyncio.Future[str | None]) -> None:
        """From start to stop. What the server raised or wrote may hold its secrets: only the hidden text gets out."""
        problem = "failed: it ended before it was ready"
        with tempfile.TemporaryFile("w+", errors="replace") as complaints:
            try:
                await self._serve(ready, complaints)
            except Exception as error:  # foreign code: the protocol's library, by whatever name it has for them
                complaints.seek(0)
                said = "\n".join([_message(_first(error)), complaints.read()[-MAX_COMPLAINT_CHARS:]]).strip()
                problem = f"failed: {self.config.hide(said)}"
            finally:
                self._ended.set()
                self.session = None
                if not ready.done():
                    ready.set_result(problem)

    async def _serve(self, ready: asyncio.Future[str | None], complaints: TextIO) -> None:
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
        if self.session is None and not task.done():  # it hangs in its start
            task.cancel()
        done, _ = await asyncio.wait([task], timeout=STOP_S)
        if not done:
            task.cancel()
            await asyncio.wait([task], timeout=STOP_S)


@contextlib.asynccontextmanager
async def _streams(config: MCPServerConfig, complaints: TextIO) -> AsyncIterator[tuple[Any, Any]]:
    """The two streams of messages, from whatever version of the library is installed."""
    if config.url is None:
        from mcp import StdioServerParameters, stdio_client

        assert config.command is not None
        parameters = StdioServerParameters(command=config.command, args=config.args, env=config.env)
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
    """The first error in a group of them: task groups wrap what went wrong."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _message(error: BaseException) -> str:
    return str(error) or type(error).__name__


def is_ended(error: BaseException) -> bool:
    """Does an error say that the session is over?"""
    error = _first(error)
    is_closed = type(error).__name__ in ("ClosedResourceError", "BrokenResourceError", "EndOfStream", "ConnectError")
    said = str(error).lower()
    return is_closed or isinstance(error, (OSError, EOFError)) or "connection closed" in said or "session term" in said
