"""An aiohttp server that runs in its own thread within a ``with`` block, for sync and async callers."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Self

from aiohttp import web

START_TIMEOUT_S = 60.0
ROUNDS = 8  # loop iterations: enough to hand an accepted connection to the runner and to close an aborted one


class ServerThread:
    """``with Server(...) as server:``; a subclass defines what is served (`make_runner`)."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        self._wanted_port = port
        self._port = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None

    def make_runner(self) -> web.BaseRunner:
        raise NotImplementedError

    @property
    def port(self) -> int:
        if not self._port:
            name = type(self).__name__
            raise RuntimeError(f"the server is not running; use it in a with block: `with {name}(...) as server:`")
        return self._port

    @property
    def root(self) -> str:
        """The server's URL, as seen from this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def start(self) -> None:
        if self._thread is not None:
            raise RuntimeError("this server is already running")
        ready = threading.Event()
        raised: list[BaseException] = []

        def target() -> None:
            try:
                asyncio.run(self._serve(ready))
            except BaseException as error:  # re-raised in the thread that called `start`
                raised.append(error)
                ready.set()

        self._thread = threading.Thread(target=target, daemon=True, name=f"verifiers-{type(self).__name__}")
        self._thread.start()
        if not ready.wait(START_TIMEOUT_S):
            raise RuntimeError(f"the server did not start within {START_TIMEOUT_S:g} s")
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
        runner = self.make_runner()
        await runner.setup()
        assert runner.server is not None
        try:
            server = await self._loop.create_server(runner.server, self.host, self._wanted_port, backlog=4096)
            self._port = server.sockets[0].getsockname()[1]
            ready.set()
            await self._stopping.wait()
            # A connection that asyncio accepts in the same iteration in which the server closes is never closed.
            for listening in server.sockets:
                self._loop.remove_reader(listening.fileno())
            await _rounds()
            server.close()
        finally:
            left = [one.transport for one in runner.server.connections]
            await runner.cleanup()
            for transport in left:
                if transport is not None:
                    transport.abort()  # it would wait for a client that has stopped reading
            await _rounds()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)


async def _rounds() -> None:
    for _ in range(ROUNDS):
        await asyncio.sleep(0)
