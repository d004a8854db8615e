"""New weights for a served model, by the endpoints of vLLM's weight transfer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from aiohttp import web

from verifiers import errors
from verifiers.dialects.http import json_reply, read_body
from verifiers.engine.channel import backend_here, card_here
from verifiers.engine.engine import PAUSES, Engine
from verifiers.engine.local_model import LocalModel
from verifiers.engine.weight_receiver import WeightReceiver


class WeightEndpoints:
    """Pause, receive the trainer's weights, resume."""

    def __init__(self, model: LocalModel) -> None:
        self._model = model
        self._made: WeightReceiver | None = None

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/version", self._version),
            web.get("/server_info", self._server_info),
            web.post("/pause", self._pause),
            web.post("/resume", self._does("resume", status="resumed")),
            web.get("/is_paused", self._is_paused),
            web.post("/init_weight_transfer_engine", self._init),
            web.post("/shutdown_weight_transfer_engine", self._does("close", message="Weight transfer shut down")),
            web.post("/start_weight_update", self._does("start", message="Weight update started")),
            web.post("/update_weights", self._update),
            web.post("/finish_weight_update", self._finish),
            web.get("/weight_info", self._weight_info),
            web.post("/update_weight_version", self._name),
            web.get("/get_world_size", self._world_size),
            web.post("/reset_prefix_cache", self._reset_prefix_cache),
        ]

    async def close(self, _: web.Application) -> None:
        """Leave the trainer's group, when the server ends."""
        if self._made is not None:
            self._made.close()

    async def _engine(self) -> Engine:
        return (await self._model.ready()).engine

    async def _receiver(self) -> WeightReceiver:
        engine = await self._engine()
        if self._made is None:
            self._made = WeightReceiver(engine)
        return self._made

    def _does(self, what: str, **said: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        """A handler that calls a method of the receiver, and replies ``said``."""

        async def handle(http: web.Request) -> web.Response:
            await asyncio.to_thread(getattr(await self._receiver(), what))
            return json_reply(said)

        return handle

    async def _version(self, http: web.Request) -> web.Response:
        try:
            number = version("verifiers")
        except PackageNotFoundError:  # run from a folder that was never installed
            number = "0"
        return json_reply({"version": number, "server": "verifiers"})

    async def _server_info(self, http: web.Request) -> web.Response:
        config = {"weight_transfer_config": {"backend": backend_here()}}
        return json_reply({"vllm_config": config, "card": card_here((await self._engine()).device)})

    # --- pauses ---------------------------------------------------------------------------------------------------

    async def _pause(self, http: web.Request) -> web.Response:
        mode = http.query.get("mode", "abort")
        if mode not in PAUSES:
            raise errors.RequestRefusedError(f"'mode' is one of {', '.join(PAUSES)}, not {mode!r:.100}")
        await asyncio.to_thread((await self._engine()).pause, mode)
        return json_reply({"status": "paused"})

    async def _is_paused(self, http: web.Request) -> web.Response:
        return json_reply({"is_paused": (await self._engine()).is_paused})

    # --- weights --------------------------------------------------------------------------------------------------

    async def _init(self, http: web.Request) -> web.Response:
        receiver, body = await self._receiver(), await read_body(http)
        await asyncio.to_thread(receiver.open, _object(body, "init_info"))
        return json_reply({"message": "Weight transfer initialized"})

    async def _update(self, http: web.Request) -> web.Response:
        body = await read_body(http)
        if "path" in body:
            return await self._load(body["path"])
        if "update_info" not in body:
            raise errors.RequestRefusedError(
                "give 'update_info', what a trainer sends, or 'path', a folder of safetensors on the server's machine"
            )
        count = await asyncio.to_thread((await self._receiver()).receive, _object(body, "update_info"))
        return json_reply({"message": "Weights updated", "tensors": count})

    async def _load(self, path: Any) -> web.Response:
        if not isinstance(path, str) or not path:
            raise errors.RequestRefusedError("'path' is a folder of safetensors on the server's machine")
        try:
            count = await asyncio.to_thread(self._model.update_weights, path)
        except (ValueError, OSError) as error:
            raise errors.RequestRefusedError(f"these weights were not loaded: {error}") from error
        if self._made is not None:
            self._made.is_torn = False  # a folder is loaded whole, or not at all
        return json_reply({"status": "ok", "tensors": count})

    async def _finish(self, http: web.Request) -> web.Response:
        body = await read_body(http) if http.can_read_body else {}
        name = body.get("weight_version")
        if name is not None and not isinstance(name, str):
            raise errors.RequestRefusedError(f"'weight_version' is a text, not {name!r:.100}")
        await asyncio.to_thread((await self._receiver()).finish, name)
        return json_reply({"message": "Weight update finished"})

    async def _weight_info(self, http: web.Request) -> web.Response:
        return json_reply({"weight_version": (await self._engine()).runner.weight_version})

    async def _name(self, http: web.Request) -> web.Response:
        name = (await read_body(http)).get("new_version")
        if not isinstance(name, str):
            raise errors.RequestRefusedError("'new_version' is missing: a text")
        await asyncio.to_thread((await self._engine()).name_weights, name)
        return json_reply({"success": True, "new_version": name})

    async def _world_size(self, http: web.Request) -> web.Response:
        return json_reply({"world_size": 1})

    async def _reset_prefix_cache(self, http: web.Request) -> web.Response:
        await asyncio.to_thread(self._model.forget)
        return json_reply({"status": "ok"})


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    found = body.get(name)
    if not isinstance(found, dict):
        raise errors.RequestRefusedError(f"{name!r} is missing: an object")
    return found
