"""A local model → an OpenAI-compatible server, in a thread of its own or until the process is told to stop.

It listens on this machine only unless it is told otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from types import TracebackType

from aiohttp import web

from verifiers.engine.endpoints import ServedModel
from verifiers.engine.local_model import LocalModel

logger = logging.getLogger("verifiers.engine")

START_TIMEOUT_S = 60.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class LocalServer:
    """A server in a thread of its own, while the block lasts: ``with LocalServer(model) as server: server.url``."""

    def __init__(
        self, model: LocalModel, *, host: str = "127.0.0.1", port: int = 0, api_key: str | None = None
    ) -> None:
        self.model = model
        self.host = host
        self.api_key = api_key
        self.served = ServedModel(model, api_key=api_key)
        self._wanted_port = port
        self._port = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None

    @property
    def port(self) -> int:
        if not self._port:
            raise RuntimeError("the server is not running; use it in a block: `with LocalServer(...) as server:`")
        return self._port

    @property
    def root(self) -> str:
        """Where `/health`, `/metrics` and `/update_weights` are."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def url(self) -> str:
        """The base URL for OpenAI clients."""
        return f"{self.root}/v1"

    def start(self) -> None:
        if self._thread is not None:
            raise RuntimeError("this server is already running")
        self.model.load()
        _warn(self.host, self.api_key)
        ready = threading.Event()
        raised: list[BaseException] = []

        def target() -> None:
            try:
                asyncio.run(self._serve(ready))
            except BaseException as error:  # handed to the starting thread
                raised.append(error)
                ready.set()

        self._thread = threading.Thread(target=target, daemon=True, name="verifiers-local-server")
        self._thread.start()
        if not ready.wait(START_TIMEOUT_S):
            raise RuntimeError(f"the server did not start within {START_TIMEOUT_S} s")
        if raised:
            self._thread = None
            raise raised[0]

    def stop(self) -> None:
        if self._thread is None or self._loop is None or self._stopping is None:
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        self._thread, self._loop, self._stopping, self._port = None, None, None, 0

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        # Cancelling the handler when its client hangs up is what frees the row.
        runner = web.AppRunner(self.served.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self.host, self._wanted_port, backlog=4096)
            await site.start()
            self._port = runner.addresses[0][1]
            ready.set()
            await self._stopping.wait()
        finally:
            await runner.cleanup()

    def __enter__(self) -> LocalServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> LocalServer:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)


def serve(
    model: LocalModel,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    *,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until the process is told to stop; ``on_ready`` gets the base URL once it listens."""
    with LocalServer(model, host=host, port=port, api_key=api_key) as server:
        logger.info("serving %s on %s", model.model, server.url)
        if on_ready is not None:
            on_ready(server.url)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            logger.info("stopping")


def _warn(host: str, api_key: str | None) -> None:
    if host not in LOOPBACK and api_key is None:
        logger.warning("serving on %s without an API key: whoever reaches it can use it and replace its weights", host)
