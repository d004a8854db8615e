"""For a vLLM worker: a weight transfer backend named ``gloo``. All of vLLM's own backends need CUDA.

Without a GPU, `vf-vllm` passes `Worker` as the worker extension. vLLM then imports this file in each worker, which
registers the backend. It does not import this package, because vLLM may be in a separate environment.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

TIMEOUT_S = 600.0


def _channel() -> Any:
    path = Path(__file__).parents[3] / "engine" / "channel.py"
    spec = importlib.util.spec_from_file_location("verifiers_channel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The sender's address."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed: bool = False


@dataclass(kw_only=True)
class GlooUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The tensors that will be sent, in this order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Receives tensors one by one."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    channel: Any = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        self.shutdown()
        described = {
            "master_address": init_info.master_address,
            "master_port": init_info.master_port,
            "world_size": init_info.world_size,
        }
        self.channel = _channel().opened(described, rank=rank, timeout_s=TIMEOUT_S)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # without vLLM's synchronization with a CUDA device

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self.channel is None:
            raise RuntimeError("there is no sender yet: call /init_weight_transfer_engine first")
        described = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        for name, dtype, shape in described:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.channel.broadcast(tensor)
            self.model.load_weights([(name, tensor)])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self.channel = None


WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)


class Worker:
    """An empty worker extension; importing this file is what matters."""
