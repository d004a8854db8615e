"""A trainer's tensors → the parameters of the served model, in place, while the engine is paused."""

from __future__ import annotations

import threading
from typing import Any

import torch

from verifiers.engine.channel import GlooChannel, NcclChannel, backend_here, opened
from verifiers.engine.engine import Engine
from verifiers.errors import RequestRefusedError, first_line
from verifiers.kernels.devices import current

JOIN_S = 60.0  # timeout of joining the trainer's group, and of each tensor
RANK = 1


class WeightReceiver:
    """The receiving end of a weight transfer: the four steps of vLLM's protocol over one engine.

    What a trainer is about to send is checked against the model before the first tensor is received. An update may take
    several calls, so the engine has to be paused until it is finished. One that breaks off in the middle leaves weights
    of two versions (``is_torn``): then `resume` is refused until a whole update has come.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._guard = threading.Lock()
        self._channel: GlooChannel | NcclChannel | None = None
        self._missing: set[str] | None = None  # parameters that the current update has not brought yet
        self.is_torn = False

    def open(self, init: dict[str, Any]) -> None:
        """Join the trainer's group, and leave the one before."""
        _check_init(init)
        with self._guard:
            self._close()
            try:
                with current(self._engine.device):
                    self._channel = opened(init, rank=RANK, timeout_s=JOIN_S)
            except (RuntimeError, ValueError, TypeError, OSError) as error:
                raise RequestRefusedError(f"the trainer's group was not joined: {first_line(error)}") from error

    def close(self) -> None:
        with self._guard:
            self._close()

    def _close(self) -> None:
        self._drop_update()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _drop_update(self) -> None:
        """Give up the current update; if some of its tensors have come, the weights are of two versions."""
        self.is_torn |= bool(self._missing) and self._has_begun
        self._missing = None

    @property
    def _has_begun(self) -> bool:
        """Have tensors of the current update come?"""
        return self._missing is not None and len(self._missing) < len(dict(self._engine.model.named_parameters()))

    def resume(self) -> None:
        """Sample again, unless the weights are not all of one version."""
        with self._guard:
            if self.is_torn:
                raise RequestRefusedError("the weights are of two versions: a transfer broke off; send them whole")
            if self._has_begun:
                raise RequestRefusedError("an update is under way: POST /finish_weight_update first")
            self._engine.resume()

    def _check_paused(self) -> None:
        if not self._engine.is_paused:
            raise RequestRefusedError(
                "this server is sampling, and would mix the weights of two versions: POST /pause?mode=keep first"
            )

    def start(self) -> None:
        with self._guard:
            if self._channel is None:
                raise RequestRefusedError("no trainer is known here: POST /init_weight_transfer_engine first")
            self._check_paused()
            self._drop_update()
            self._missing = {name for name, _ in self._engine.model.named_parameters()}

    def receive(self, update: dict[str, Any]) -> int:
        """Receive the tensors that ``update`` describes; returns how many."""
        with self._guard:
            if self._channel is None or self._missing is None:
                raise RequestRefusedError("there is no update to be part of: POST /start_weight_update first")
            try:
                self._check_paused()
                described = self._checked(update)
            except RequestRefusedError:
                self._close()  # the sender, which may be sending already, gets an error at once
                raise
            try:
                self._take(self._channel, described)
            except RuntimeError as error:
                self.is_torn = True
                self._close()
                raise RequestRefusedError(f"the transfer broke off: {first_line(error)}") from error
            self._missing -= {name for name, _, _ in described}
            return len(described)

    def _take(self, channel: GlooChannel | NcclChannel, described: list[tuple[str, torch.dtype, list[int]]]) -> None:
        own = dict(self._engine.model.named_parameters())
        with self._engine.lock, torch.no_grad():
            for name, dtype, shape in described:
                tensor = torch.empty(shape, dtype=dtype, device=channel.device)
                channel.broadcast(tensor)
                own[name].copy_(tensor)

    def _checked(self, update: dict[str, Any]) -> list[tuple[str, torch.dtype, list[int]]]:
        columns = [update.get(name) for name in ("names", "dtype_names", "shapes")]
        if not all(isinstance(one, list) for one in columns) or len({len(one or ()) for one in columns}) != 1:
            raise RequestRefusedError("'update_info' has names, dtype_names and shapes: three lists of one length")
        own = dict(self._engine.model.named_parameters())
        found = []
        for name, dtype_name, shape in zip(*columns, strict=True):
            if not isinstance(name, str) or not isinstance(shape, list):
                raise RequestRefusedError(
                    f"a tensor has a name and a list of sizes, not {name!r:.100} and {shape!r:.100}"
                )
            dtype = getattr(torch, str(dtype_name), None)
            if not isinstance(dtype, torch.dtype):
                raise RequestRefusedError(f"{name!r} has the dtype {dtype_name!r}, which PyTorch does not know")
            if name not in own:
                raise RequestRefusedError(f"the sampler has another model: it has no parameter {name!r:.200}")
            if list(own[name].shape) != list(shape):
                have = list(own[name].shape)
                raise RequestRefusedError(f"the sampler has another model: its {name!r} is {have}, not {shape}")
            found.append((name, dtype, list(shape)))
        return found

    def finish(self, version: str | None) -> None:
        """End an update that is complete: name the weights, and drop the prefix cache of the old ones."""
        with self._guard:
            if self._missing is None:
                raise RequestRefusedError("there is no update to finish: POST /start_weight_update first")
            missing, self._missing = sorted(self._missing), None
            if missing:
                self.is_torn = True
                raise RequestRefusedError(
                    f"{len(missing)} parameters have not come, {missing[0]!r} the first; send them all"
                )
            self.is_torn = False
            with self._engine.lock:
                self._engine.forget()
                if version is not None:
                    self._engine.runner.name_weights(version)


def _check_init(init: dict[str, Any]) -> None:
    if not isinstance(init.get("world_size"), int) or init["world_size"] != 2 or init.get("rank_offset", RANK) != RANK:
        raise RequestRefusedError(
            "'init_info' has world_size 2 and rank_offset 1: the trainer, and this server, which is one process"
        )
    if isinstance(init.get("nccl_unique_id_b64"), str):
        if backend_here() != "nccl":
            raise RequestRefusedError("this sampler has no NCCL; send by gloo (master_address and master_port)")
        return
    if not isinstance(init.get("master_address"), str) or not isinstance(init.get("master_port"), int):
        raise RequestRefusedError("'init_info' has master_address and master_port, or nccl_unique_id_b64")
    if init.get("packed"):
        raise RequestRefusedError("this sampler takes tensors one by one: 'packed' is false here")
