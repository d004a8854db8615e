"""Sends weights to inference servers, by gloo or NCCL collectives, through vLLM's weight transfer endpoints."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verifiers.clients import wire
from verifiers.clients.control import ServerControl
from verifiers.engine.channel import (
    GlooChannel,
    NcclChannel,
    address_towards,
    backend_here,
    card_here,
    new_unique_id,
)
from verifiers.errors import ConnectionFailedError, Error, RequestRefusedError, first_line
from verifiers.trainers.memory.optimizers import bitsandbytes

OLDEST_VLLM = (0, 32)
INFO_S = 30.0  # timeout of requests for a server's settings and version
QUICK_S = 120.0  # timeout of requests that move no weights: the longest that a hanging server delays a training
ADAPTER, BASE = re.compile(r"\.lora_|\.modules_to_save\."), ".base_layer"
RESET_CACHE = "/reset_prefix_cache?reset_running_requests=true"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One tensor of a model, and a function that reads it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def parameters_of(model: Any) -> list[Parameter]:
    """The tensors of the model under the names they have without adapters; adapters (LoRA) are merged when read.

    Weights in 4 bits are dequantised to the dtype of their computation.
    """
    layers = {name: one for name, one in model.named_modules() if hasattr(one, "get_delta_weight")}
    found = []
    for name, parameter in model.named_parameters():
        if ADAPTER.search(name):
            continue
        adapted = layers.get(name.partition(BASE)[0]) if name.endswith(f"{BASE}.weight") else None
        whole = getattr(parameter, "quant_state", None) or parameter
        found.append(
            Parameter(
                name=name.replace(BASE, "").removeprefix("base_model.model."),
                dtype=whole.dtype,
                shape=tuple(whole.shape),
                read=partial(_read, parameter, adapted),
            )
        )
    return found


def _read(parameter: Any, layer: Any) -> Tensor:
    with torch.no_grad():
        tensor: Tensor = parameter.detach()
        if (packed := getattr(parameter, "quant_state", None)) is not None:
            tensor = bitsandbytes("load_in_4bit=True").functional.dequantize_4bit(tensor, packed)
        if layer is not None and not layer.merged and not layer.disable_adapters:
            for adapter in layer.active_adapters:
                tensor = tensor + layer.get_delta_weight(adapter).to(tensor.dtype)
    return tensor


class WeightChannel:
    """A server that receives weights, and the process group that it shares with this process."""

    def __init__(self, control: ServerControl) -> None:
        self.control = control
        self.model = ""
        self.is_ours = False
        self.failure: Error | None = None
        self._channel: GlooChannel | NcclChannel | None = None
        self._sent: tuple[str, ...] = ()  # versions that the server may have: the last one sent, and the one before

    @property
    def where(self) -> str:
        return self.control.shown(self.control.base_url)

    async def open(self) -> None:
        """Check the server, and join a process group with its workers; RequestRefusedError if that is impossible."""
        backend = await self.check()
        if self._sent:
            self._sent = (*self._sent[:2], "0")  # the server may have been restarted
        await self._check_owner()
        await self.find_model()
        world_size = 1 + await self.get("/get_world_size", "world_size")
        self.close()
        timeout_s = self.control.timeout_s
        init: dict[str, Any] = {"rank_offset": 1, "world_size": world_size, "packed": False}
        if backend == "nccl":
            init["nccl_unique_id_b64"] = new_unique_id()
            made: GlooChannel | NcclChannel = NcclChannel(init["nccl_unique_id_b64"], rank=0, world_size=world_size)
        else:
            address = address_towards(self.control.host)
            made = GlooChannel(address, 0, rank=0, world_size=world_size, timeout_s=timeout_s)
            init |= {"master_address": address, "master_port": made.port}
        body = {"init_info": init}
        await _both(self.control.ask("POST", "/init_weight_transfer_engine", body), made.join, made.close)
        self._channel = made

    async def find_model(self) -> None:
        """Ask the server for the name of its model."""
        listed = await self.get("/v1/models", "data")
        self.model = str(listed[0]["id"]) if listed else ""

    async def check(self) -> str:
        """The backend of weight transfer, gloo or nccl; RequestRefusedError if this process does not support it."""
        await self._check_version()
        backend = await self._backend()
        if backend == "nccl" and backend_here() != "nccl":
            raise RequestRefusedError(
                f"{self.where} receives weights with NCCL, but this trainer is not on CUDA; start the server with "
                '`vf-vllm … --weight-transfer-config \'{"backend": "gloo"}\'`'
            )
        return backend

    async def _get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON object of a GET request; 404 for a reply that is not a JSON object."""
        status, text = await self.control.send("GET", path, None, min(self.control.timeout_s, INFO_S))
        if status not in (404, 405):
            self.control.check("GET", path, status, text)
        try:
            found = wire.decode(text.encode())
        except ValueError:
            found = None
        return (status, found) if isinstance(found, dict) else (404, {})

    async def get(self, path: str, name: str) -> Any:
        """One value of the JSON object at a path."""
        status, found = await self._get(path)
        if name not in found:
            raise RequestRefusedError(f"GET {path}: {status}, without {name!r}; is this server `vf serve` or vLLM?")
        return found[name]

    async def _check_owner(self) -> None:
        """Refuse a server that received weights from another trainer after ours."""
        version = str((await self._get("/weight_info"))[1].get("weight_version", ""))
        if self._sent and version.isdecimal() and version not in self._sent:
            raise RequestRefusedError(
                f"another trainer sends weights to it (it has version {version}, but was sent {self._sent[0]} from "
                "here): give each training its own samplers"
            )

    async def _check_version(self) -> None:
        status, found = await self._get("/version")
        if status in (404, 405):
            raise RequestRefusedError(
                f"{self.where} is an endpoint that takes no weights; sample with `vf serve` or `vf-vllm`, or pass "
                "weight_server=, an object with reload_weights(folder)"
            )
        self.is_ours = found.get("server") == "verifiers"
        number = tuple(int(part) for part in re.findall(r"\d+", str(found.get("version")))[:2])
        if not self.is_ours and number < OLDEST_VLLM:
            raise RequestRefusedError(
                f"{self.where} is vLLM {found.get('version')}, which cannot be sent weights; update it to 0.32 or "
                "later (pip install -U vllm)"
            )

    async def _backend(self) -> str:
        _, info = await self._get("/server_info?config_format=json")
        config = (info.get("vllm_config") or {}).get("weight_transfer_config")
        backend = config.get("backend") if isinstance(config, dict) else None
        if backend not in ("gloo", "nccl"):
            raise RequestRefusedError(
                f"{self.where} does not receive weights with gloo or NCCL (weight_transfer_config: {config}); start it "
                'with `vf-vllm`, which sets this, or with --weight-transfer-config \'{"backend": "nccl"}\''
            )
        is_one_card = self.is_ours and info.get("card") is not None and info["card"] == card_here()
        return "gloo" if is_one_card else str(backend)

    async def begin(self) -> None:
        """Pause the server: running requests keep their state until `end`."""
        self.failure = None
        await self._check_owner()
        await self._post("/pause?mode=keep")
        await self._post("/start_weight_update")

    def broadcast(self, tensor: Tensor) -> None:
        """Send one tensor. If the connection is lost, `failure` is set, and later calls do nothing."""
        channel = self._channel
        if channel is None:
            return
        try:
            channel.broadcast(tensor.to(channel.device).contiguous())
        except RuntimeError as error:  # from gloo or NCCL: the server is gone
            self.failure = ConnectionFailedError(f"the connection to {self.where} was lost: {first_line(error)}")
            self.close()

    async def end(self, version: int) -> None:
        """After all tensors: set their version, drop the KV cache of the old weights, and resume requests."""
        self._sent = (str(version), *self._sent[:1])
        await self._post("/finish_weight_update", {"weight_version": str(version)})
        await self._post(RESET_CACHE)
        await self._post("/resume")

    async def _post(self, path: str, body: Any = None) -> None:
        await self.control.ask("POST", path, body, timeout_s=min(self.control.timeout_s, QUICK_S))

    def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


async def send(parameters: Sequence[Parameter], channels: Sequence[WeightChannel], version: int) -> list[Error | None]:
    """Send weights to all servers, reading each tensor once; returns an error or None for each server."""
    update = {
        "names": [one.name for one in parameters],
        "dtype_names": [str(one.dtype).removeprefix("torch.") for one in parameters],
        "shapes": [list(one.shape) for one in parameters],
    }

    async def updated(channel: WeightChannel) -> None:
        await channel.control.ask("POST", "/update_weights", {"update_info": update})
        if channel.failure is not None:
            raise channel.failure
        await channel.end(version)

    def broadcast() -> None:
        for parameter in parameters if paused else ():
            tensor = parameter.read()
            for channel in paused:
                channel.broadcast(tensor)

    begun = await asyncio.gather(*(_error_of(one, WeightChannel.begin) for one in channels))
    paused = [one for one, error in zip(channels, begun, strict=True) if error is None]
    *ended, _ = await asyncio.gather(*(_error_of(one, updated) for one in paused), asyncio.to_thread(broadcast))
    errors = dict(zip(paused, ended, strict=True))
    return [errors[one] if error is None else error for one, error in zip(channels, begun, strict=True)]


async def _error_of(channel: WeightChannel, step: Callable[[WeightChannel], Awaitable[None]]) -> Error | None:
    """Run a step, and return its error or None; after an error, this process leaves the group with the server."""
    try:
        await step(channel)
    except Error as error:
        channel.close()
        return error
    return None


async def _both(request: Any, work: Any, close: Any) -> None:
    """Run a request that the server answers once it has joined, while our side joins in a thread."""
    asked = asyncio.ensure_future(request)
    worked = asyncio.ensure_future(asyncio.to_thread(work))
    await asyncio.wait((asked, worked), return_when=asyncio.FIRST_EXCEPTION)
    if asked.done() and (error := asked.exception()) is not None:
        close()  # the server will not join
        worked.add_done_callback(lambda one: one.cancelled() or one.exception())
        raise error
    if worked.done() and (failed := worked.exception()) is not None:
        close()
        try:
            await asyncio.wait_for(asked, 5.0)  # prefer the server's own error
        except TimeoutError:
            pass
        raise RequestRefusedError(f"the weights were not sent: {first_line(failed)}") from failed
    await asked
    await worked
