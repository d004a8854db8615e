"""Endpoints that update a served model's weights, as in vLLM's weight transfer: pause, receive, resume."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from aiohttp import web

from verifiers.dialects.http import json_reply, read_body
from verifiers.engine.channel import GlooChannel, NcclChannel, backend_here, card_here, opened
from verifiers.engine.engine import PAUSES, Engine
from verifiers.engine.local_model import LocalModel
from verifiers.errors import RequestRefusedError, first_line
from verifiers.kernels.devices import current

JOIN_S = 60.0  # timeout for joining the trainer's group, and for each tensor
RANK = 1

Described = list[tuple[str, torch.dtype, list[int]]]
"""Name, dtype and shape of each tensor that a trainer is about to send."""


class WeightEndpoints:
    """The receiving end of a weight transfer, for one model.

    The description of the tensors is checked against the model before the first tensor is received. An update may take
    several calls, so the engine must stay paused until the update is finished. An update that breaks off leaves weights
    of two versions; `/resume` is then refused until a complete update has arrived.
    """

    def __init__(self, model: LocalModel) -> None:
        self._model = model
        self._guard = threading.Lock()
        self._channel: GlooChannel | NcclChannel | None = None
        self._missing: set[str] | None = None  # parameters that have not arrived yet in the current update
        self._has_begun = False  # some parameters of the current update have arrived
        self._is_torn = False  # the weights are of two versions

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/version", self._version),
            web.get("/server_info", self._server_info),
            web.get("/is_paused", self._is_paused),
            web.get("/weight_info", self._weight_info),
            web.get("/get_world_size", self._world_size),
            web.post("/pause", self._pause),
            web.post("/resume", _in_thread(self._resume, status="resumed")),
            web.post(
                "/init_weight_transfer_engine",
                _in_thread(self._open, reads=True, message="Weight transfer initialized"),
            ),
            web.post("/shutdown_weight_transfer_engine", _in_thread(self._shut, message="Weight transfer shut down")),
            web.post("/start_weight_update", _in_thread(self._start, message="Weight update started")),
            web.post("/update_weights", self._update),
            web.post("/finish_weight_update", _in_thread(self._finish, reads=True, message="Weight update finished")),
            web.post("/update_weight_version", self._name),
            web.post("/reset_prefix_cache", _in_thread(self._model.forget, status="ok")),
        ]

    async def close(self, _: web.Application) -> None:
        """Leave the trainer's group when the server ends."""
        self._shut()

    @property
    def _engine(self) -> Engine:
        return self._model.engine

    # --- the server -----------------------------------------------------------------------------------------------

    async def _version(self, http: web.Request) -> web.Response:
        try:
            number = version("verifiers")
        except PackageNotFoundError:  # run from a checkout that is not installed
            number = "0"
        return json_reply({"version": number, "server": "verifiers"})

    async def _server_info(self, http: web.Request) -> web.Response:
        config = {"weight_transfer_config": {"backend": backend_here()}}
        return json_reply({"vllm_config": config, "card": card_here(self._engine.device)})

    async def _is_paused(self, http: web.Request) -> web.Response:
        return json_reply({"is_paused": self._engine.is_paused})

    async def _weight_info(self, http: web.Request) -> web.Response:
        return json_reply({"weight_version": self._engine.runner.weight_version})

    async def _world_size(self, http: web.Request) -> web.Response:
        return json_reply({"world_size": 1})

    async def _pause(self, http: web.Request) -> web.Response:
        mode = http.query.get("mode", "abort")
        if mode not in PAUSES:
            raise RequestRefusedError(f"'mode' must be one of {', '.join(PAUSES)}, not {mode!r:.100}")
        await asyncio.to_thread(self._engine.pause, mode)
        return json_reply({"status": "paused"})

    def _resume(self) -> None:
        """Resume sampling; refused if the weights are of two versions."""
        with self._guard:
            if self._is_torn:
                raise RequestRefusedError(
                    "the weights are of two versions, because a transfer broke off: send all of them again"
                )
            if self._has_begun:
                raise RequestRefusedError("an update is in progress: POST /finish_weight_update first")
            self._engine.resume()

    async def _name(self, http: web.Request) -> web.Response:
        name = (await read_body(http)).get("new_version")
        if not isinstance(name, str):
            raise RequestRefusedError("'new_version' is missing or not a text")
        await asyncio.to_thread(self._engine.name_weights, name)
        return json_reply({"success": True, "new_version": name})

    # --- a transfer -----------------------------------------------------------------------------------------------

    def _open(self, body: dict[str, Any]) -> None:
        """Leave the previous group and join the trainer's."""
        init = _object(body, "init_info")
        _check_init(init)
        with self._guard:
            self._leave()
            try:
                with current(self._engine.device):
                    self._channel = opened(init, rank=RANK, timeout_s=JOIN_S)
            except (RuntimeError, ValueError, TypeError, OSError) as error:
                raise RequestRefusedError(f"could not join the trainer's group: {first_line(error)}") from error

    def _shut(self) -> None:
        with self._guard:
            self._leave()

    def _leave(self) -> None:
        self._drop_update()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _drop_update(self) -> None:
        """Give up the current update. If only some of its tensors have arrived, the weights are of two versions."""
        self._is_torn |= bool(self._missing) and self._has_begun
        self._missing, self._has_begun = None, False

    def _check_paused(self) -> None:
        if not self._engine.is_paused:
            raise RequestRefusedError(
                "this server is sampling and would mix the weights of two versions: POST /pause?mode=keep first"
            )

    def _start(self) -> None:
        with self._guard:
            if self._channel is None:
                raise RequestRefusedError("no trainer is connected: POST /init_weight_transfer_engine first")
            self._check_paused()
            self._drop_update()
            self._missing = {name for name, _ in self._engine.model.named_parameters()}

    async def _update(self, http: web.Request) -> web.Response:
        body = await read_body(http)
        if "path" in body:
            return json_reply({"status": "ok", "tensors": await asyncio.to_thread(self._load, body["path"])})
        if "update_info" not in body:
            raise RequestRefusedError(
                "pass 'update_info', which describes a trainer's tensors, or 'path', a safetensors folder on the server"
            )
        count = await asyncio.to_thread(self._receive, _object(body, "update_info"))
        return json_reply({"message": "Weights updated", "tensors": count})

    def _load(self, path: Any) -> int:
        """Load a folder of safetensors completely or not at all; returns the number of tensors."""
        if not isinstance(path, str) or not path:
            raise RequestRefusedError("'path' must be a folder of safetensors on the server's machine")
        try:
            count = self._model.update_weights(path)
        except (ValueError, OSError) as error:
            raise RequestRefusedError(f"the weights could not be loaded: {error}") from error
        self._is_torn = False
        return count

    def _receive(self, update: dict[str, Any]) -> int:
        """Receive the tensors that ``update`` describes; returns how many."""
        with self._guard:
            if self._channel is None or self._missing is None:
                raise RequestRefusedError("no update was started: POST /start_weight_update first")
            try:
                self._check_paused()
                described = self._described(update)
            except RequestRefusedError:
                self._leave()  # the sender may already be sending, and gets an error immediately
                raise
            try:
                self._take(self._channel, described)
            except RuntimeError as error:
                self._is_torn = True
                self._leave()
                raise RequestRefusedError(f"the transfer broke off: {first_line(error)}") from error
            self._missing -= {name for name, _, _ in described}
            self._has_begun |= bool(described)
            return len(described)

    def _described(self, update: dict[str, Any]) -> Described:
        columns = [update.get(name) for name in ("names", "dtype_names", "shapes")]
        if not all(isinstance(one, list) for one in columns) or len({len(one or ()) for one in columns}) != 1:
            raise RequestRefusedError("'update_info' must have names, dtype_names and shapes: lists of equal length")
        own = dict(self._engine.model.named_parameters())
        found = []
        for name, dtype_name, shape in zip(*columns, strict=True):
            if not isinstance(name, str) or not isinstance(shape, list):
                raise RequestRefusedError(
                    f"a tensor needs a name and a list of sizes, not {name!r:.100} and {shape!r:.100}"
                )
            dtype = getattr(torch, str(dtype_name), None)
            if not isinstance(dtype, torch.dtype):
                raise RequestRefusedError(f"{name!r} has the dtype {dtype_name!r}, which PyTorch does not support")
            if name not in own:
                raise RequestRefusedError(f"the sampler has another model: it has no parameter {name!r:.200}")
            if (have := list(own[name].shape)) != shape:
                raise RequestRefusedError(f"the sampler has another model: its {name!r} is {have}, not {shape}")
            found.append((name, dtype, shape))
        return found

    def _take(self, channel: GlooChannel | NcclChannel, described: Described) -> None:
        own = dict(self._engine.model.named_parameters())
        with self._engine.lock, torch.no_grad():
            for name, dtype, shape in described:
                tensor = torch.empty(shape, dtype=dtype, device=channel.device)
                channel.broadcast(tensor)
                own[name].copy_(tensor)

    def _finish(self, body: dict[str, Any]) -> None:
        """End a complete update: name the weights, and drop the prefix cache of the old ones."""
        name = body.get("weight_version")
        if name is not None and not isinstance(name, str):
            raise RequestRefusedError(f"'weight_version' must be a text, not {name!r:.100}")
        with self._guard:
            if self._missing is None:
                raise RequestRefusedError("no update was started: POST /start_weight_update first")
            missing, self._missing, self._has_begun = sorted(self._missing), None, False
            if missing:
                self._is_torn = True
                raise RequestRefusedError(
                    f"{len(missing)} parameters have not arrived, for example {missing[0]!r}; send all parameters"
                )
            self._is_torn = False
            with self._engine.lock:
                self._engine.forget()
                if name is not None:
                    self._engine.runner.name_weights(name)


def _in_thread(
    work: Callable[..., None], *, reads: bool = False, **said: str
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A handler that calls ``work`` in a thread, with the request's body if ``reads``, and replies with ``said``."""

    async def handle(http: web.Request) -> web.Response:
        body = [await read_body(http) if http.can_read_body else {}] if reads else []
        await asyncio.to_thread(work, *body)
        return json_reply(said)

    return handle


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    found = body.get(name)
    if not isinstance(found, dict):
        raise RequestRefusedError(f"{name!r} is missing or not an object")
    return found


def _check_init(init: dict[str, Any]) -> None:
    if not isinstance(init.get("world_size"), int) or init["world_size"] != 2 or init.get("rank_offset", RANK) != RANK:
        raise RequestRefusedError(
            "'init_info' must have world_size 2 and rank_offset 1: the trainer and this server are one process each"
        )
    if isinstance(init.get("nccl_unique_id_b64"), str):
        if backend_here() != "nccl":
            raise RequestRefusedError("this sampler has no NCCL; use gloo (master_address and master_port)")
        return
    if not isinstance(init.get("master_address"), str) or not isinstance(init.get("master_port"), int):
        raise RequestRefusedError("'init_info' must have master_address and master_port, or nccl_unique_id_b64")
    if init.get("packed"):
        raise RequestRefusedError("this sampler receives tensors one by one: 'packed' must be false")
