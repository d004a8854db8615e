"""Decoding on CUDA: captured graphs over static rows, sampling on the device, the host one step behind.

The device holds the truth while it runs: last token, length and columns of each row, updated by the graph itself. The
host launches the next step before it reads the one before, so it never waits for a token; what a row samples after its
end is thrown away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from verifiers.engine.cuda_prefill import CudaPrefill
from verifiers.engine.kv_cache import KVCache
from verifiers.engine.sampler import Drawn
from verifiers.engine.sequence import ActiveSequence
from verifiers.kernels.cuda import decode
from verifiers.kernels.cuda import sampling as cuda_sampling
from verifiers.kernels.cuda.projections import OWN_FAULTS, nothing_freed
from verifiers.kernels.cuda.splits import multiprocessors, splits_for
from verifiers.kernels.devices import host_index, to_device
from verifiers.kernels.sampling import SamplingColumns, sample

if TYPE_CHECKING:
    from verifiers.engine.engine import Engine

T = TypeVar("T")

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)


class CudaDecode:
    """Attention of one token a row, by our kernel."""

    def __init__(self, cache: KVCache, tables: Tensor, length_B: Tensor) -> None:
        self.cache, self.tables, self.length_B = cache, tables, length_B
        programs = len(length_B) * cache.store.shape[3]
        self.splits = splits_for(programs, multiprocessors(tables.device))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
        keys, values = self.cache.layers[layer]
        return decode.attend(q, k, v, keys, values, self.tables, self.length_B, self.splits, **settings)

    def rotated(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, **settings: Any) -> Tensor:
        return self(layer, q, k, v, rotary=(cos, sin), **settings)


@dataclass(slots=True)
class _LaunchedStep:
    """A step that was launched: who has which of its tokens, and where they will arrive; the first ones of a reply?"""

    sequences: list[ActiveSequence]
    is_first: bool
    arrived: torch.cuda.Event
    token: Tensor
    logprob: Tensor
    raw: Tensor


class CudaDecoder:
    """The device's side of the table, the graphs, and the steps in flight."""

    def __init__(self, engine: Engine, cache: KVCache) -> None:
        self.engine, self.cache = engine, cache
        rows, device = engine.rows, engine.device
        # Rows that are not live have no blocks: they stay at position 0 of nobody's.
        self.blocks = torch.zeros(engine.table.blocks.shape, dtype=torch.int32, device=device)
        self._whole = torch.zeros((6, rows), dtype=torch.int64, device=device)
        self._real = torch.zeros((3, rows), device=device)
        self.token, self.length, self.is_live, top_k, seed, step = self._whole
        temperature, top_p, min_p = self._real
        self.columns = SamplingColumns(temperature, top_p, top_k, min_p, seed, step)
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor, Tensor]]] = {}
        self._pool: Any = None
        self._launched: deque[_LaunchedStep] = deque()
        self._spare: list[tuple[Tensor, Tensor, Tensor]] = []
        self._prefill = CudaPrefill(self)
        self.prefill = self._prefill.run
        cuda_sampling.warm_up(device)

    # --- the table's copy on the device ---------------------------------------------------------------------------

    def assign(self, rows: np.ndarray) -> None:
        """Tell the device about rows that were just filled."""
        table, device = self.engine.table, self.engine.device
        index, live = host_index(rows.tolist(), device), np.ones_like(table.length)
        whole = (table.token, table.length, live, table.top_k, table.seed, table.steps)
        real = (table.temperature, table.top_p, table.min_p)
        for target, columns in ((self._whole, whole), (self._real, real)):
            target[:, index] = to_device(np.stack([column[rows] for column in columns]), device)
        self.blocks[index] = to_device(table.blocks[rows], device)

    def add_blocks(self, rows: Sequence[int]) -> None:
        """Tell the device of the block that each of these rows got."""
        if not rows:
            return
        table = self.engine.table
        last = table.n_blocks[rows] - 1
        row, column, block = to_device(np.stack([rows, last, table.blocks[rows, last]]), self.engine.device)
        self.blocks[row, column] = block.int()

    def free(self, holes: Sequence[int], movers: Sequence[int], first: int, last: int) -> None:
        """Follow the host in closing gaps."""
        if holes:
            index = host_index([*holes, *movers], self.engine.device)
            to, source = index.split(len(holes))
            self._whole[:, to] = self._whole[:, source]
            self._real[:, to] = self._real[:, source]
            self.blocks[to] = self.blocks[source]
        self._rest(first, last)

    def _rest(self, first: int, last: int) -> None:
        for column in (self.blocks, self.length, self.is_live):
            column[first:last] = 0

    def sample(self, logits_NV: Tensor, columns: SamplingColumns) -> tuple[Tensor, Tensor, Tensor]:
        """Untruncated sampling, in one sweep."""
        return cuda_sampling.sample(logits_NV, columns.temperature_B, columns.seed_B, columns.step_B)

    # --- steps ----------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start a step for all live rows without waiting for anything."""
        sequences = list(self.engine.live)
        truncates = bool(self.engine.table.truncates[: len(sequences)].any())
        bucket = next((size for size in BUCKETS if size >= len(sequences)), self.engine.rows)
        graph, outputs = self._graph(min(bucket, self.engine.rows), truncates)
        graph.replay()
        self.engine.table.ahead[: len(sequences)] += 1
        self._note(sequences, outputs, is_first=False)

    def launch_first(self, logits_NV: Tensor, sequences: list[ActiveSequence]) -> None:
        """Draw the first tokens of sequences that have just got their rows, without waiting for them."""
        table, rows = self.engine.table, np.array([sequence.row for sequence in sequences])
        self.assign(rows)
        index = host_index(rows.tolist(), self.engine.device)
        columns = table.columns(rows, self.engine.device)
        outputs = self._draw(logits_NV, columns, truncates=bool(table.truncates[rows].any()))
        self.token[index] = outputs[0]
        self.columns.step_B[index] += 1
        self._note(sequences, outputs, is_first=True)

    def _note(self, sequences: list[ActiveSequence], outputs: Sequence[Tensor], *, is_first: bool) -> None:
        n = len(sequences)
        buffers = self._spare.pop() if self._spare else self._pinned()
        for buffer, output in zip(buffers, outputs, strict=True):
            buffer[:n].copy_(output[:n], non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._launched.append(_LaunchedStep(sequences, is_first, arrived, *buffers))

    def drop_graphs(self) -> None:
        self._graphs.clear()
        self._prefill.drop_graphs()
        self._pool = None

    def reset(self) -> None:
        """Forget the steps in flight, and let no row write."""
        self._launched.clear()
        self._rest(0, self.engine.rows)

    @property
    def in_flight(self) -> int:
        return len(self._launched)

    def collect(self) -> tuple[list[ActiveSequence], bool, Drawn]:
        """Wait for the oldest step in flight; gives the sequences that still run, with their tokens (their first?)."""
        step = self._launched.popleft()
        keep = [i for i, sequence in enumerate(step.sequences) if sequence.row >= 0]
        sequences = [step.sequences[i] for i in keep]
        if sequences:  # nobody waits for what was run on beyond the end
            step.arrived.synchronize()
        values = [buffer.numpy()[keep] for buffer in (step.token, step.logprob, step.raw)]
        self._spare.append((step.token, step.logprob, step.raw))
        return sequences, step.is_first, (values[0], values[1], values[2])

    def _pinned(self) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.engine.rows
        kinds = (torch.int64, torch.float32, torch.float32)
        one, two, three = (torch.empty(rows, dtype=kind, pin_memory=True) for kind in kinds)
        return one, two, three

    def _graph(self, size: int, truncates: bool) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor, Tensor]]:
        key = (size, truncates)
        if key not in self._graphs:
            self._graphs[key] = self._capture(size, truncates)
        return self._graphs[key]

    def _capture(self, size: int, truncates: bool) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor, Tensor]]:
        """Record a step. What is practised is the step that comes next: it writes the keys that this one will."""
        state = [self.token, self.length, self.columns.step_B]
        before = [column.clone() for column in state]

        def put_back() -> None:
            for column, value in zip(state, before, strict=True):
                column.copy_(value)

        return self.record(lambda: self._step(size, truncates), put_back)

    def record(self, work: Callable[[], T], tidy: Callable[[], None] | None = None) -> tuple[torch.cuda.CUDAGraph, T]:
        """Do something a few times aside, tidying up each time, then record it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
                if tidy is not None:
                    tidy()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with nothing_freed(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode=OWN_FAULTS):
            outputs = work()
        if self._pool is None:
            self._pool = graph.pool()
        return graph, outputs

    def _step(self, size: int, truncates: bool) -> tuple[Tensor, Tensor, Tensor]:
        engine = self.engine
        length = self.length[:size]
        position = length.clamp(max=engine.length - 1)  # a row may be run on beyond its end, and thrown away
        attend = CudaDecode(self.cache, self.blocks[:size], length)
        logits = engine.runner.forward(self.token[:size, None], position[:, None], attend)[:, 0]
        columns = SamplingColumns(*(getattr(self.columns, name)[:size] for name in SamplingColumns.__slots__))
        outputs = self._draw(logits, columns, truncates=truncates)
        self.token[:size] = outputs[0]
        length.add_(self.is_live[:size])
        columns.step_B.add_(1)
        return outputs

    def _draw(self, logits: Tensor, columns: SamplingColumns, *, truncates: bool) -> tuple[Tensor, Tensor, Tensor]:
        return sample(logits, columns, truncates=True) if truncates else self.sample(logits, columns)
