"""A card that is played by PyTorch on the CPU: the steps of an engine go the way they go on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verifiers.engine.block_manager import BLOCK, BlockManager, blocks_for
from verifiers.engine.cuda_runner import CudaDecoder
from verifiers.engine.engine import LEAST_SHARED_CUDA, Engine
from verifiers.engine.kv_cache import Decode, KVCache
from verifiers.kernels.reference import causal_attention
from verifiers.kernels.sampling import SamplingColumns, sample


class HostGraph:
    """Does its work again when it is replayed, into the same outputs."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self.work, self.outputs = work, work()

    def replay(self) -> None:
        self.outputs.copy_(self.work())


class HostExtend:
    """Prompts end to end: keys and values are stored, then each block of queries sees its sequence up to itself."""

    def __init__(self, cache: KVCache, tables: Tensor, row_T: Tensor, position_T: Tensor, blocks: Tensor) -> None:
        self.cache, self.tables, self.row_T, self.position_T, self.blocks = cache, tables, row_T, position_T, blocks

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: Any, softcap: Any
    ) -> Tensor:
        block_T = self.tables[self.row_T.long(), self.position_T.long() // BLOCK].long()
        out = torch.zeros_like(q)
        for stored, new in zip(self.cache.layers[layer], (k, v), strict=True):
            stored[block_T, :, self.position_T.long() % BLOCK] = new[0].transpose(0, 1)
        for first, count, table, position in self.blocks.T.tolist():
            end = position + count
            read = self.tables[table, : blocks_for(end)].long()
            seen = [x[read].transpose(0, 1).flatten(1, 2)[None, :, :end] for x in self.cache.layers[layer]]
            part = slice(first, first + count)
            if count:
                out[:, :, part] = causal_attention(q[:, :, part], *seen, position, scale, window, softcap)
        return out


class HostCard:
    """In the place of `CudaDevice`."""

    extend_attention = HostExtend

    def __init__(self) -> None:
        self.captures = 0

    def decode_attention(self, cache: KVCache, tables: Tensor, length_B: Tensor, angles: Any) -> Decode:
        return Decode(cache, tables.numpy(), length_B, tables.shape[1] * BLOCK)

    def capture(self, work: Callable[[], Tensor], undo: Callable[[], None] | None = None) -> tuple[HostGraph, Tensor]:
        graph = HostGraph(work)
        if undo is not None:
            undo()
        self.captures += 1
        return graph, graph.outputs

    def drop_graphs(self) -> None:
        return

    def pinned_buffer(self, n: int) -> Tensor:
        return torch.empty(n, dtype=torch.int32)

    def event(self) -> HostCard:
        return self

    def synchronize(self) -> None:
        return

    def tokens_at_once(self, share: int) -> int:
        return 16

    def sample(self, logits_NV: Tensor, columns: SamplingColumns) -> tuple[Tensor, Tensor, Tensor]:
        return sample(logits_NV, columns, truncates=False)


def triton_card() -> HostCard:
    """A card whose attention and sampling are the Triton kernels themselves, run by Triton's interpreter."""
    from verifiers.engine import cuda_device

    class TritonCard(HostCard):
        decode_attention: Any = cuda_device.CudaDecode
        extend_attention: Any = cuda_device.CudaExtend
        tokens_at_once: Any = cuda_device.CudaDevice.tokens_at_once
        sample: Any = cuda_device.CudaDevice.sample

    return TritonCard()


def on_host_card(model: Any, *, card: Any = None, **settings: Any) -> Engine:
    """An engine whose steps go the way of a card."""
    engine = Engine(model, **settings)
    cache: Any = engine.scheduler.cache
    card = card or HostCard()
    engine.scheduler.blocks = BlockManager(cache.store.shape[2], least_shared=LEAST_SHARED_CUDA)
    engine.scheduler.cuda = CudaDecoder(engine.table, engine.runner, cache, card)
    return engine
