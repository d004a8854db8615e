"""Serve a local model over HTTP (OpenAI-compatible), in a thread or until the process is interrupted.

By default the server listens on this machine only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from aiohttp import web

from verifiers.clients.hosts import check_guarded
from verifiers.clients.server_thread import ServerThread
from verifiers.engine.local_model import LocalModel
from verifiers.engine.server.endpoints import ServedModel

logger = logging.getLogger("verifiers.engine")


class LocalServer(ServerThread):
    """A server that runs in a thread within a ``with`` block: ``with LocalServer(model) as server: server.url``.

    It accepts requests whose host is an IP address, ``localhost``, or a name in ``allow_hosts``. To listen beyond this
    machine without an ``api_key``, pass ``insecure=True``.
    """

    def __init__(
        self,
        model: LocalModel,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        allow_hosts: Sequence[str] = (),
        insecure: bool = False,
    ) -> None:
        super().__init__(host=host, port=port)
        check_guarded(host, api_key, insecure, can="use the model and replace its weights")
        self.model = model
        self.api_key = api_key
        self.served = ServedModel(model, api_key=api_key, host=host, allow_hosts=allow_hosts)

    @property
    def url(self) -> str:
        """The base URL for OpenAI clients. `/health`, `/metrics` and `/update_weights` are below `root`."""
        return f"{self.root}/v1"

    def start(self) -> None:
        if self._thread is None:
            self.model.load()
        super().start()

    def make_runner(self) -> web.AppRunner:
        # When a client disconnects, its handler is cancelled, which frees the row.
        return web.AppRunner(self.served.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)


def serve(
    model: LocalModel,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    *,
    allow_hosts: Sequence[str] = (),
    insecure: bool = False,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until the process is interrupted. Calls ``on_ready`` with the base URL once the server listens."""
    with LocalServer(
        model, host=host, port=port, api_key=api_key, allow_hosts=allow_hosts, insecure=insecure
    ) as server:
        logger.info("serving %s on %s", server.served.serving.name, server.url)
        if on_ready is not None:
            on_ready(server.url)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            logger.info("stopping")
