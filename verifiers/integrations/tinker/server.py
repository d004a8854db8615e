"""A model → a Tinker server for it, in its own thread or until the process is stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from verifiers.clients.hosts import check_guarded
from verifiers.clients.server_thread import ServerThread
from verifiers.engine.files import models
from verifiers.engine.plan import Plan, free_memory, plan
from verifiers.engine.ready_model import name_of
from verifiers.engine.server.serving import served_name
from verifiers.integrations.tinker import wire
from verifiers.integrations.tinker.endpoints import Endpoints
from verifiers.integrations.tinker.service import Service

logger = logging.getLogger("verifiers.integrations.tinker")

DEFAULT_FOLDER = "outputs/tinker"


class TinkerServer(ServerThread):
    """A server within a block: ``with TinkerServer("smollm2") as server: …``; its ``url`` is the SDK's base_url.

    ``model`` is a name, a folder, or a module with its ``tokenizer``. Its weights are not changed: LoRA adapters are
    trained, and saved in ``folder``.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        folder: str | Path = DEFAULT_FOLDER,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        allow_hosts: Sequence[str] = (),
        insecure: bool = False,
        rows: int | None = None,
        length: int | None = None,
    ) -> None:
        super().__init__(host=host, port=port)
        check_guarded(host, api_key, insecure, can="train and read")
        wire.message("Chunk")  # raises if a package is missing, before a model is loaded
        base = models.get_model(model) if isinstance(model, str | Path) else model
        if hasattr(base, "peft_config"):
            raise ValueError("this model already has adapters: merge them, and serve the result")
        where = getattr(tokenizer, "name_or_path", "") or getattr(base.config, "_name_or_path", "") or None
        tokenizer = models.get_tokenizer(base) if tokenizer is None else tokenizer
        fits = _plan(base, rows, length)
        self.service = Service(
            base,
            tokenizer,
            name=name or served_name(name_of(model)),
            tokenizer_id=where,
            folder=folder,
            rows=fits.rows,
            length=fits.length,
        )
        self._endpoints = Endpoints(self.service, api_key=api_key, host=host, allow_hosts=allow_hosts)

    @property
    def url(self) -> str:
        """The clients' ``base_url`` or TINKER_BASE_URL."""
        return self.root

    def make_runner(self) -> web.AppRunner:
        return web.AppRunner(self._endpoints.app(), access_log=None, shutdown_timeout=0.1)

    def start(self) -> None:
        try:
            super().start()
        except BaseException:
            self.service.close()
            raise

    def stop(self) -> None:
        super().stop()
        self.service.close()


def _plan(base: Any, rows: int | None, length: int | None) -> Plan:
    """The sizes of the engine; half of the free memory is reserved for training."""
    parameter = next(base.parameters())
    return plan(
        base.config,
        rows=rows,
        length=length,
        dtype=parameter.dtype,
        device=parameter.device,
        weights_loaded=True,
        free_bytes=free_memory(parameter.device) // 2,
    )


def serve(server: TinkerServer, on_ready: Callable[[str], None]) -> None:
    """Serve until the process is stopped; ``on_ready`` gets the URL once the server listens."""
    with server:
        on_ready(server.url)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            logger.info("stopping")
