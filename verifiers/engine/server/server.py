"""A local model → an OpenAI-compatible server, in a thread of its own or until the process is interrupted.

It listens on this machine only unless another host is given.
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
    """A server in a thread of its own, while the block lasts: ``with LocalServer(model) as server: server.url``.

    It answers to addresses, to ``localhost`` and to the names in ``allow_hosts``. To listen beyond this machine without
    an ``api_key`` it takes ``insecure=True``.
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
        """The base URL for OpenAI clients; at `root` are `/health`, `/metrics` and `/update_weights`."""
        return f"{self.root}/v1"

    def start(self) -> None:
        if self._thread is None:
            self.model.load()
        super().start()

    def make_runner(self) -> web.AppRunner:
        # Cancelling the handler when its client hangs up is what frees the row.
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
    """Serve until the process is interrupted; ``on_ready`` gets the base URL once it listens."""
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
