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
from torch.nn.attention import SDPBackend, sdpa_kernel

from verifiers.engine.kv_cache import Segment, SlotCache
from verifiers.engine.prefix_extension import TOKENS, Extender
from verifiers.engine.sequence import ActiveSequence
from verifiers.kernels.cuda import decode
from verifiers.kernels.cuda import sampling as cuda_sampling
from verifiers.kernels.cuda.projections import OWN_FAULTS, nothing_freed
from verifiers.kernels.devices import host_index, to_device
from verifiers.kernels.norms import HeadNorms
from verifiers.kernels.reference import causal_attention
from verifiers.kernels.sampling import SamplingColumns, sample

if TYPE_CHECKING:
    from verifiers.engine.engine import Engine

T = TypeVar("T")

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)

# Not cuDNN's: it plans anew for every shape, and prompts come in all lengths.
_SDPA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(slots=True)
class CudaDecode:
    """Attention of one token a row, by our kernel."""

    cache: SlotCache
    length_B: Tensor

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        keys, values = self.cache.layers[layer]
        return decode.attend(q, k, v, keys, values, self.length_B, scale=scale, window=window, softcap=softcap)

    def rotated(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, **settings: Any) -> Tensor:
        keys, values = self.cache.layers[layer]
        return decode.attend(q, k, v, keys, values, self.length_B, rotary=(cos, sin), **settings)


class CudaPrefill:
    """Several fresh prompts at once: packed for the linear layers, padded for attention, which is plainly causal."""

    def __init__(self, cache: SlotCache, segments: Sequence[Segment], device: torch.device) -> None:
        self.cache = cache
        sizes = np.array([s.end - s.start for s in segments])
        starts = np.array([s.start for s in segments])
        self.width = int(sizes.max())
        offset_T = np.arange(self.width)
        inside_bT = offset_T[None] < sizes[:, None]
        packed_bT = np.where(inside_bT, starts[:, None] + offset_T[None], 0)
        self.packed = to_device(packed_bT.reshape(-1), device)
        self.inside = to_device(np.flatnonzero(inside_bT.reshape(-1)), device)
        self.rows = host_index([s.slot for s in segments], device)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        keys, values = self.cache.layers[layer]
        q_b, k_b, v_b = (self._padded(x) for x in (q, k, v))
        keys[self.rows, :, : self.width] = k_b
        values[self.rows, :, : self.width] = v_b
        share = q_b.shape[1] // k_b.shape[1]
        if share > 1:  # with heads written out PyTorch takes its quickest kernel
            k_b, v_b = k_b.repeat_interleave(share, 1), v_b.repeat_interleave(share, 1)
        with sdpa_kernel(_SDPA):
            out = causal_attention(q_b, k_b, v_b, 0, scale, window, softcap)
        heads, dim = out.shape[1], out.shape[3]
        return out.transpose(0, 1).reshape(heads, -1, dim).index_select(1, self.inside)[None]

    def rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None,
        **settings: Any,
    ) -> Tensor:  # fmt: skip
        decode.rotate_(q, k, cos, sin, norms)
        return self(layer, q, k, v, **settings)

    def _padded(self, x: Tensor) -> Tensor:
        heads, dim = x.shape[1], x.shape[3]
        return x[0].index_select(1, self.packed).view(heads, -1, self.width, dim).transpose(0, 1)


@dataclass(slots=True)
class _LaunchedStep:
    """A step that was launched: who was in which row, and where its tokens will arrive."""

    sequences: list[ActiveSequence]
    arrived: torch.cuda.Event
    token: Tensor
    logprob: Tensor
    raw: Tensor


class CudaDecoder:
    """The device's side of the table, the graphs, and the steps in flight."""

    def __init__(self, engine: Engine, cache: SlotCache) -> None:
        self.engine, self.cache = engine, cache
        rows, device = engine.rows, engine.device
        self._whole = torch.zeros((5, rows), dtype=torch.int64, device=device)
        self._real = torch.zeros((3, rows), device=device)
        self.token, self.length, top_k, seed, step = self._whole
        temperature, top_p, min_p = self._real
        self.columns = SamplingColumns(temperature, top_p, top_k, min_p, seed, step)
        self.length.fill_(engine.length)
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor, Tensor]]] = {}
        self._pool: Any = None
        self._launched: deque[_LaunchedStep] = deque()
        self._spare: list[tuple[Tensor, Tensor, Tensor]] = []
        self._extender = Extender(self)
        cuda_sampling.warm_up(device)

    # --- the table's copy on the device ---------------------------------------------------------------------------

    def assign(self, rows: np.ndarray) -> None:
        """Tell the device about rows that were just filled and have sampled their first token."""
        table, device = self.engine.table, self.engine.device
        index = host_index(rows.tolist(), device)
        whole = np.stack([column[rows] for column in (table.token, table.length, table.top_k, table.seed, table.steps)])
        real = np.stack([column[rows] for column in (table.temperature, table.top_p, table.min_p)])
        for target, values in ((self._whole, whole), (self._real, real)):
            target[:, index] = to_device(values, device)

    def free(self, holes: Sequence[int], movers: Sequence[int], first: int, last: int) -> None:
        """Follow the host in closing gaps; rows that are not live write to the spare position behind every end."""
        if holes:
            index = host_index([*holes, *movers], self.engine.device)
            to, source = index.split(len(holes))
            self._whole[:, to] = self._whole[:, source]
            self._real[:, to] = self._real[:, source]
        self.length[first:last] = self.engine.length

    def sample(self, logits_NV: Tensor, columns: SamplingColumns) -> tuple[Tensor, Tensor, Tensor]:
        """Untruncated sampling, in one sweep."""
        return cuda_sampling.sample(logits_NV, columns.temperature_B, columns.seed_B, columns.step_B)

    def prefill(
        self, ids: Sequence[int], positions: Sequence[int], last: Sequence[int], segments: list[Segment]
    ) -> Tensor:
        """Run prompts, or what is new in them; the logits at the places ``last``."""
        if len(ids) <= TOKENS[-1] or any(segment.past for segment in segments):
            return self._extender.run(ids, positions, last, segments)
        device = self.engine.device
        ids_T, position_T, last_N = (host_index(values, device) for values in (ids, positions, last))
        attend = CudaPrefill(self.cache, segments, device)
        return self.engine.runner.forward(ids_T[None], position_T[None], attend, last_N)[0]

    # --- steps ----------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start a step for all live rows without waiting for anything."""
        sequences = list(self.engine.live)
        truncates = bool(self.engine.table.truncates[: len(sequences)].any())
        bucket = next((size for size in BUCKETS if size >= len(sequences)), self.engine.rows)
        graph, outputs = self._graph(min(bucket, self.engine.rows), truncates)
        graph.replay()
        n = len(sequences)
        buffers = self._spare.pop() if self._spare else self._pinned()
        for buffer, output in zip(buffers, outputs, strict=True):
            buffer[:n].copy_(output[:n], non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._launched.append(_LaunchedStep(sequences, arrived, *buffers))

    def drop_graphs(self) -> None:
        self._graphs.clear()
        self._extender.drop_graphs()
        self._pool = None

    def reset(self) -> None:
        """Forget the steps in flight, and let no row write."""
        self._launched.clear()
        self.length.fill_(self.engine.length)

    @property
    def in_flight(self) -> int:
        return len(self._launched)

    def collect(self) -> tuple[list[ActiveSequence], np.ndarray, np.ndarray, np.ndarray]:
        """Wait for the oldest step in flight; gives the rows that are still live, with their tokens."""
        step = self._launched.popleft()
        step.arrived.synchronize()
        keep = [i for i, sequence in enumerate(step.sequences) if sequence.slot >= 0]
        sequences = [step.sequences[i] for i in keep]
        values = [buffer.numpy()[keep] for buffer in (step.token, step.logprob, step.raw)]
        self._spare.append((step.token, step.logprob, step.raw))
        return sequences, values[0], values[1], values[2]

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
        """Record a step. The rows' state is put back after it was practised."""
        state = [self.token, self.length, self.columns.step_B]
        before = [column.clone() for column in state]

        def practise() -> tuple[Tensor, Tensor, Tensor]:
            if not torch.cuda.is_current_stream_capturing():
                self.length.fill_(self.engine.length)  # on the spare position
            return self._step(size, truncates)

        def put_back() -> None:
            for column, value in zip(state, before, strict=True):
                column.copy_(value)

        return self.record(practise, put_back)

    def record(self, work: Callable[[], T], tidy: Callable[[], None] | None = None) -> tuple[torch.cuda.CUDAGraph, T]:
        """Do something a few times aside, tidy up, then record it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        if tidy is not None:
            tidy()
        graph = torch.cuda.CUDAGraph()
        with nothing_freed(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode=OWN_FAULTS):
            outputs = work()
        if self._pool is None:
            self._pool = graph.pool()
        return graph, outputs

    def _step(self, size: int, truncates: bool) -> tuple[Tensor, Tensor, Tensor]:
        engine = self.engine
        length = self.length[:size]
        position = length.clamp(max=engine.length - 1)  # resting rows stand one behind the last that a model knows
        attend = CudaDecode(self.cache, length)
        logits = engine.runner.forward(self.token[:size, None], position[:, None], attend)[:, 0]
        columns = SamplingColumns(*(getattr(self.columns, name)[:size] for name in SamplingColumns.__slots__))
        if truncates:
            outputs = sample(logits, columns, truncates=True)
        else:
            outputs = self.sample(logits, columns)
        self.token[:size] = outputs[0]
        length.add_(1).clamp_(max=engine.length)
        columns.step_B.add_(1)
        return outputs
