"""The engine's interface to CUDA: attention and sampling kernels, graph capture, pinned memory, events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from verifiers.engine.kv_cache import KVCache
from verifiers.kernels.cuda import decode
from verifiers.kernels.cuda import sampling as cuda_sampling
from verifiers.kernels.cuda.extend import extend, queries_at_once, store
from verifiers.kernels.cuda.launch import multiprocessors
from verifiers.kernels.cuda.projections import OWN_FAULTS, nothing_freed
from verifiers.kernels.cuda.splits import counters, splits_for
from verifiers.kernels.norms import HeadNorms
from verifiers.kernels.sampling import SamplingColumns

T = TypeVar("T")


class CudaDecode:
    """Attention of one new token per row, by our kernel."""

    def __init__(
        self, cache: KVCache, tables: Tensor, length_B: Tensor, angles: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self.cache, self.tables, self.length_B, self.angles = cache, tables, length_B, angles
        programs = len(length_B) * cache.store.shape[3]
        self.splits = splits_for(programs, multiprocessors(tables.device))
        self.stored = counters(programs, tables.device) if self.splits > 1 else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
        keys, values = self.cache.layers[layer]
        return decode.attend(
            q, k, v, keys, values, self.tables, self.length_B, self.splits, stored=self.stored, **settings
        )

    def rotated(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, **settings: Any) -> Tensor:
        return self(layer, q, k, v, rotary=(cos, sin), **settings)


class CudaExtend:
    """Attention of several packed prompts, by our kernels. Each attends to itself and to its sequence's past."""

    def __init__(self, cache: KVCache, tables: Tensor, row_T: Tensor, position_T: Tensor, blocks: Tensor) -> None:
        self.cache, self.tables, self.row_T, self.position_T, self.blocks = cache, tables, row_T, position_T, blocks
        programs = blocks.shape[1] * cache.store.shape[3]
        self.splits = splits_for(programs, multiprocessors(tables.device))
        self.stored = counters(programs, tables.device) if self.splits > 1 else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
        keys, values = self.cache.layers[layer]
        store(k, v, keys, values, self.tables, self.row_T, self.position_T)
        return extend(q, keys, values, self.tables, self.blocks, splits=self.splits, stored=self.stored, **settings)

    def rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None,
        **settings: Any,
    ) -> Tensor:  # fmt: skip
        decode.rotate_(q, k, cos, sin, norms)
        return self(layer, q, k, v, **settings)


_capturing = threading.Lock()


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One stream for all captures of a process, because cuBLAS keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream(device)


class CudaDevice:
    """The GPU. Tests and benchmarks replace it with versions that run on the CPU."""

    decode_attention, extend_attention = CudaDecode, CudaExtend

    def __init__(self) -> None:
        self.captures = 0  # graphs captured so far
        self._pool: Any = None  # memory pool shared by all graphs

    def drop_graphs(self) -> None:
        self._pool = None

    def capture(self, work: Callable[[], T], undo: Callable[[], None] | None = None) -> tuple[torch.cuda.CUDAGraph, T]:
        """Run and undo the work twice on a side stream as a warm-up, then capture it as a graph."""
        stream, graph = _capture_stream(torch.cuda.current_device()), torch.cuda.CUDAGraph()
        with _capturing:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    work()
                    if undo is not None:
                        undo()
            torch.cuda.current_stream().wait_stream(stream)
            with nothing_freed(), torch.cuda.graph(graph, self._pool, stream, capture_error_mode=OWN_FAULTS):
                outputs = work()
        if self._pool is None:
            self._pool = graph.pool()
        self.captures += 1
        return graph, outputs

    def pinned_buffer(self, n: int) -> Tensor:
        """Host memory for ``n`` words that the device copies to asynchronously."""
        return torch.empty(n, dtype=torch.int32, pin_memory=True)

    def event(self) -> torch.cuda.Event:
        """An event after all work launched so far."""
        event = torch.cuda.Event()
        event.record()
        return event

    def tokens_at_once(self, share: int) -> int:
        """Prompt tokens per program of the attention kernel, if ``share`` query heads share a key head."""
        return queries_at_once(share) // share

    def sample(self, logits_NV: Tensor, columns: SamplingColumns) -> tuple[Tensor, Tensor, Tensor]:
        """Sample without truncation, in one pass over the logits."""
        return cuda_sampling.sample(logits_NV, columns.temperature_B, columns.seed_B, columns.step_B)
