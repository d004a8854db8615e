"""The weights of a model → servers that sample from them, memory to memory, by vLLM's weight transfer endpoints."""

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
from verifiers.errors import ConnectionFailedError, Error, RequestRefusedError
from verifiers.trainers.memory.optimizers import bitsandbytes

OLDEST_VLLM = (0, 32)
LOOK_S = 30.0  # for what a server says of itself: before the first step nobody waits long for one that says nothing
QUICK_S = 120.0  # for what moves no weights: a server that hangs does not hold up a training for longer
ADAPTER, BASE = re.compile(r"\.lora_|\.modules_to_save\."), ".base_layer"
NEW_CACHE = "/reset_prefix_cache?reset_running_requests=true"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One tensor of a model: what it is, and a way to read it whole."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def parameters_of(model: Any) -> list[Parameter]:
    """The tensors that the model on its own has, by its own names: adapters (LoRA) are added to what they adapt.

    Weights in 4 bits are sent in the dtype that they are computed in: whoever samples holds them whole.
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
    """One server that takes weights: what it can do, and the group that it and this process are in."""

    def __init__(self, control: ServerControl) -> None:
        self.control = control
        self.model = ""
        self.is_ours = False
        self.failure: Error | None = None
        self._channel: GlooChannel | NcclChannel | None = None
        self._named: tuple[str, ...] = ()  # what the weights there may be called: as they came last, and before that

    @property
    def where(self) -> str:
        return self.control.shown(self.control.base_url)

    async def open(self) -> None:
        """Look at what the server is, and join a group with its processes; RequestRefusedError if that cannot be."""
        backend = await self.check()
        if self._named:
            self._named = (*self._named[:2], "0")  # it was started anew
        await self._check_owner(*self._named)
        await self.find_model()
        world_size = 1 + await self.told("/get_world_size", "world_size")
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
        listed = await self.told("/v1/models", "data")
        self.model = str(listed[0]["id"]) if listed else ""

    async def check(self) -> str:
        """What the server can be sent weights by; RequestRefusedError if by nothing that this process has."""
        await self._check_version()
        backend = await self._backend()
        if backend == "nccl" and backend_here() != "nccl":
            raise RequestRefusedError(
                f"{self.where} takes weights by NCCL, and this trainer is not on CUDA; start it with "
                '`vf-vllm … --weight-transfer-config \'{"backend": "gloo"}\'`'
            )
        return backend

    async def _look(self, path: str) -> tuple[int, dict[str, Any]]:
        """The status, and what the server says of itself there; an endpoint of another kind may say anything."""
        status, text = await self.control.send("GET", path, None, min(self.control.timeout_s, LOOK_S))
        if status not in (404, 405):
            self.control.check("GET", path, status, text)
        try:
            said = wire.decode(text.encode())
        except ValueError:
            said = None
        return (status, said) if isinstance(said, dict) else (404, {})

    async def told(self, path: str, name: str) -> Any:
        """One figure of what the server says of itself."""
        status, said = await self._look(path)
        if name not in said:
            raise RequestRefusedError(f"GET {path}: {status}, and no {name!r} in it; is this `vf serve` or vLLM?")
        return said[name]

    async def _check_owner(self, *named: str) -> None:
        """Refuse a server that has got other weights since it was sent ours: its replies would be of another model."""
        said = str((await self._look("/weight_info"))[1].get("weight_version", ""))
        if self._named and said.isdecimal() and said not in named:
            raise RequestRefusedError(
                f"another trainer sends it weights (it has version {said}, and was sent {self._named[0]} from here): "
                "give each training samplers of its own"
            )

    async def _check_version(self) -> None:
        status, said = await self._look("/version")
        if status in (404, 405):
            raise RequestRefusedError(
                f"{self.where} is an endpoint that takes no weights; sample with `vf serve` or `vf-vllm`, or pass "
                "weight_server=, an object with reload_weights(folder)"
            )
        self.is_ours = said.get("server") == "verifiers"
        number = tuple(int(part) for part in re.findall(r"\d+", str(said.get("version")))[:2])
        if not self.is_ours and number < OLDEST_VLLM:
            raise RequestRefusedError(
                f"{self.where} is vLLM {said.get('version')}, which cannot be sent weights in this way; 0.32 or later "
                "can (pip install -U vllm)"
            )

    async def _backend(self) -> str:
        _, info = await self._look("/server_info?config_format=json")
        config = (info.get("vllm_config") or {}).get("weight_transfer_config")
        backend = config.get("backend") if isinstance(config, dict) else None
        if backend not in ("gloo", "nccl"):
            raise RequestRefusedError(
                f"{self.where} takes no weights by gloo or NCCL (weight_transfer_config: {config}); start it with "
                '`vf-vllm`, which says so to vLLM, or with --weight-transfer-config \'{"backend": "nccl"}\''
            )
        is_one_card = self.is_ours and info.get("card") is not None and info["card"] == card_here()
        return "gloo" if is_one_card else str(backend)

    @property
    def is_open(self) -> bool:
        return self._channel is not None

    async def begin(self) -> None:
        """Requests under way stop where they are, until `end`."""
        self.failure = None
        await self._check_owner(*self._named)
        await self._tell("/pause?mode=keep")
        await self._tell("/start_weight_update")

    def take(self, tensor: Tensor) -> None:
        """Send one tensor; a server that has gone is passed over, and `failure` says why."""
        channel = self._channel
        if channel is None:
            return
        try:
            channel.broadcast(tensor.to(channel.device).contiguous())
        except RuntimeError as error:  # whatever gloo or NCCL say: the other side is gone
            self.failure = ConnectionFailedError(f"{self.where} was lost: {str(error).splitlines()[0][:300]}")
            self.close()

    async def end(self, version: int) -> None:
        """The weights have come whole: this is their version; what was computed with those before is dropped."""
        self._named = (str(version), *self._named[:1])
        await self._tell("/finish_weight_update", {"weight_version": str(version)})
        await self._tell(NEW_CACHE)
        await self._tell("/resume")

    async def _tell(self, path: str, body: Any = None) -> None:
        await self.control.ask("POST", path, body, timeout_s=min(self.control.timeout_s, QUICK_S))

    def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


async def send(parameters: Sequence[Parameter], channels: Sequence[WeightChannel], version: int) -> list[Error | None]:
    """Give every server these weights, each tensor read once; for each what went wrong, if anything did."""
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
        for parameter in parameters if there else ():
            tensor = parameter.read()
            for channel in there:
                channel.take(tensor)

    begun = await asyncio.gather(*(_tried(one, WeightChannel.begin) for one in channels))
    there = [one for one, error in zip(channels, begun, strict=True) if error is None]
    *ended, _ = await asyncio.gather(*(_tried(one, updated) for one in there), asyncio.to_thread(broadcast))
    errors = dict(zip(there, ended, strict=True))
    return [errors[one] if error is None else error for one, error in zip(channels, begun, strict=True)]


async def _tried(channel: WeightChannel, step: Callable[[WeightChannel], Awaitable[None]]) -> Error | None:
    """What went wrong in a step, if anything did: then the group with the server is left."""
    try:
        await step(channel)
    except Error as error:
        channel.close()
        return error
    return None


async def _both(request: Any, work: Any, close: Any) -> None:
    """A request that is answered when the server has done its part, and our part of it, in a thread."""
    asked = asyncio.ensure_future(request)
    worked = asyncio.ensure_future(asyncio.to_thread(work))
    await asyncio.wait((asked, worked), return_when=asyncio.FIRST_EXCEPTION)
    if asked.done() and (error := asked.exception()) is not None:
        close()  # the other side will not come
        worked.add_done_callback(lambda one: one.cancelled() or one.exception())
        raise error
    if worked.done() and (failed := worked.exception()) is not None:
        close()
        try:
            await asyncio.wait_for(asked, 5.0)  # what the server says of it is the better reason
        except TimeoutError:
            pass
        raise RequestRefusedError(f"the weights were not sent: {str(failed).splitlines()[0][:300]}") from failed
    await asked
    await worked
