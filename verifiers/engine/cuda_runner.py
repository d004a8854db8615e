"""Decoding on CUDA: captured graphs over static rows, sampling on the device, the host a few steps behind.

While steps are in flight, the device's copy of the batch table is the current one: the graph updates each row's last
token, length and step. The host launches the next steps before it reads the results of earlier ones, so the device
never waits for the host. Tokens that a row samples after its last one are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verifiers.engine.cuda_prefill import CudaPrefill
from verifiers.engine.kv_cache import KVCache
from verifiers.kernels.cpu.model import Drawn
from verifiers.kernels.devices import host_index, to_device
from verifiers.kernels.sampling import SamplingColumns, sample

if TYPE_CHECKING:
    from verifiers.engine.batch_table import BatchTable
    from verifiers.engine.cuda_device import CudaDevice
    from verifiers.engine.model_runner import ModelRunner

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
INTS, FLOATS, HEAD_WORDS = 6, 3, 16  # int64 and float32 columns of a row on the device; 32-bit words before its blocks
BURST = 4  # steps launched and read together; a row may overrun by two bursts, 8 tokens (see OVERRUN)
# Up to this many rows, steps are launched one by one: the host is fast enough, and the first time a batch shrinks it
# captures the graphs of all small sizes.
FEW_ROWS = 64
WORDS = 4  # 32-bit words per row sent to the host: two for its token, one for each logprob


@dataclass(slots=True)
class _Launch:
    """Steps in flight."""

    rows_N: np.ndarray  # current rows of the sequences; -1: removed
    is_first: bool  # are these the first tokens of their replies?
    steps: int
    event: Any  # recorded after the copy to the host
    words: Tensor  # on the host: [steps, WORDS, size], followed by unused words
    size: int  # rows of the graph
    is_whole: bool = True  # no sequence was removed or moved since


class CudaDecoder:
    """The device's copy of the batch table, the graphs, and the steps in flight."""

    def __init__(self, table: BatchTable, runner: ModelRunner, cache: KVCache, card: CudaDevice) -> None:
        self.table, self.runner, self.cache, self.card = table, runner, cache, card
        self.rows, device = len(table.length), cache.store.device
        # Rows that are not live stay at position 0 of the null block. The last row is never live: it is the template
        # that is copied over freed rows.
        rows, width = table.blocks.shape
        words = HEAD_WORDS + width + width % 2  # of 32 bits; even, as some columns have 64
        self._rows = torch.zeros((rows + 1, words), dtype=torch.int32, device=device)
        ints, floats, self.blocks = columns_of(self._rows, width)
        self.token, self.length, self.is_live, top_k, seed, step = ints
        temperature, top_p, min_p = floats
        self.columns = SamplingColumns(temperature, top_p, top_k, min_p, seed, step)
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._launched: deque[_Launch] = deque()
        self._buffers: list[Tensor] = []  # free host buffers
        self._angles: tuple[Tensor, Tensor] | None = None  # cos and sin of the rotary embedding at all positions
        self._prefill = CudaPrefill(self)
        self.prefill = self._prefill.run
        self.sample = card.sample

    # --- the table's copy on the device ---------------------------------------------------------------------------

    def assign(self, rows_N: np.ndarray) -> None:
        """Copy rows of the table to the device."""
        table, device = self.table, self.blocks.device
        words = torch.zeros((len(rows_N), self._rows.shape[1]), dtype=torch.int32)
        ints, floats, blocks = columns_of(words, table.blocks.shape[1])
        live = np.ones_like(table.length)
        given: list[np.ndarray] = [table.token, table.length, live, table.top_k, table.seed, table.steps]
        given += [table.temperature, table.top_p, table.min_p]
        for target, column in zip((*ints, *floats), given, strict=True):
            target.numpy()[:] = column[rows_N]
        blocks.numpy()[:] = table.blocks[rows_N]
        self._rows[host_index(rows_N, device)] = to_device(words.numpy(), device)

    def add_blocks(self, rows_N: np.ndarray, column_N: np.ndarray) -> None:
        """Copy new entries of the block table to the device."""
        n = len(rows_N)
        if n:
            words_N = rows_N * self._rows.shape[1] + HEAD_WORDS + column_N
            new = to_device(np.concatenate([words_N, self.table.blocks[rows_N, column_N]]), self.blocks.device)
            self._rows.view(-1).index_copy_(0, new[:n], new[n:].int())

    def move(self, now: np.ndarray, holes: np.ndarray, movers: np.ndarray, first: int, last: int) -> None:
        """Close gaps as the host did: move rows ``movers`` to ``holes`` and free rows ``[first, last)``.

        ``now`` maps an old row to its new row, or to -1 if its sequence was removed.
        """
        for launch in self._launched:
            launch.rows_N, launch.is_whole = now[launch.rows_N], False
        freed = np.arange(first, last)
        moves = to_device(np.concatenate([holes, freed, movers, np.full(len(freed), self.rows)]), self.blocks.device)
        n = len(holes) + len(freed)
        self._rows.index_copy_(0, moves[:n], self._rows.index_select(0, moves[n:]))

    # --- steps ----------------------------------------------------------------------------------------------------

    def burst(self, n: int) -> int:
        """How many steps to launch for the first n rows; 0 if the steps in flight reach every row's last token."""
        has_callback = np.count_nonzero(self.table.has_callback[:n])  # needs each token as soon as it is sampled
        return max(0, min(int(self.table.tokens_left(n).max()), 1 if has_callback or n <= FEW_ROWS else BURST))

    def launch(self, n: int, steps: int) -> None:
        """Launch steps for the first n rows, without synchronizing."""
        truncates = bool(np.count_nonzero(self.table.truncates[:n]))
        size = min(next((size for size in BUCKETS if size >= n), self.rows), self.rows)
        key = (size, truncates)
        if key not in self._graphs:
            self._graphs[key] = self._capture(size, truncates)
        graph, words = self._graphs[key]
        buffer, count = self._buffer(), len(words)
        for k in range(steps):
            graph.replay()
            buffer[k * count : (k + 1) * count].copy_(words, non_blocking=True)
        self.table.ahead[:n] += steps
        self._launched.append(_Launch(np.arange(n), False, steps, self.card.event(), buffer, size))

    def launch_first(self, logits_NV: Tensor, rows_N: np.ndarray) -> None:
        """Sample the first tokens of sequences that have just got these rows, without synchronizing."""
        self.assign(rows_N)
        index = host_index(rows_N, self.blocks.device)
        columns = self.table.columns(rows_N, self.blocks.device)
        outputs = self._draw(logits_NV, columns, truncates=bool(self.table.truncates[rows_N].any()))
        self.token[index] = outputs[0]
        self.columns.step_B[index] += 1
        words, buffer = _words(outputs), self._buffer()
        buffer[: len(words)].copy_(words, non_blocking=True)
        self._launched.append(_Launch(rows_N, True, 1, self.card.event(), buffer, len(rows_N)))

    def _buffer(self) -> Tensor:
        """Pinned host memory for the results of a launch."""
        return self._buffers.pop() if self._buffers else self.card.pinned_buffer(BURST * WORDS * self.rows)

    @property
    def in_flight(self) -> int:
        """Launches whose results have not been read yet."""
        return len(self._launched)

    @property
    def steps_behind_oldest(self) -> int:
        """Steps in flight, without those of the oldest launch."""
        return sum(launch.steps for launch in self._launched) - self._launched[0].steps if self._launched else 0

    def collect(self) -> tuple[np.ndarray, bool, Drawn]:
        """Wait for the oldest launch. Returns the rows of sequences that still run, whether these are the first tokens
        of their replies, and the tokens."""
        launch = self._launched.popleft()
        keep = slice(len(launch.rows_N)) if launch.is_whole else np.flatnonzero(launch.rows_N >= 0)
        rows_N = launch.rows_N[keep]
        if len(rows_N):  # else all sequences were removed: no need to wait
            launch.event.synchronize()
        n = launch.size
        words_K = launch.words.numpy()[: launch.steps * WORDS * n].reshape(launch.steps, WORDS * n)
        token_KN, others_K = words_K[:, : 2 * n].view(np.int64), words_K[:, 2 * n :].view(np.float32)
        self._buffers.append(launch.words)
        return rows_N, launch.is_first, Drawn(token_KN[:, keep], others_K[:, :n][:, keep], others_K[:, n:][:, keep])

    def update_angles(self) -> None:
        """Recompute the angles of the rotary embedding, after weights or buffers have changed."""
        found = self.runner.decoder.angles(self.cache.length)
        if found is None or self._angles is None:
            if found is not self._angles:
                self.drop_graphs()  # captured with precomputed angles, and now there are none, or the reverse
            self._angles = found
            return
        for target, values in zip(self._angles, found, strict=True):
            target.copy_(values)

    def drop_graphs(self) -> None:
        self._graphs.clear()
        self._prefill.drop_graphs()
        self.card.drop_graphs()

    def reset(self) -> None:
        """Forget the steps in flight, and free all rows."""
        self._launched.clear()
        self._rows.zero_()

    def _capture(self, size: int, truncates: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a step. The warm-up runs the real next step, then undoes it; the keys it writes stay valid."""
        state = [self.token, self.length, self.columns.step_B]
        before = [column.clone() for column in state]

        def undo() -> None:
            for column, value in zip(state, before, strict=True):
                column.copy_(value)

        return self.card.capture(lambda: self._step(size, truncates), undo)

    def _step(self, size: int, truncates: bool) -> Tensor:
        length, angles = self.length[:size], self._angles
        # A row may run past the context; those tokens are dropped.
        position = length.clamp(max=self.cache.length - 1) if angles is None else length
        attend = self.card.decode_attention(self.cache, self.blocks[:size], length, angles)
        logits = self.runner.forward(self.token[:size, None], position[:, None], attend)[:, 0]
        columns = SamplingColumns(*(getattr(self.columns, name)[:size] for name in SamplingColumns.__slots__))
        outputs = self._draw(logits, columns, truncates=truncates)
        self.token[:size] = outputs[0]
        length.add_(self.is_live[:size])
        columns.step_B.add_(1)
        return _words(outputs)

    def _draw(self, logits: Tensor, columns: SamplingColumns, *, truncates: bool) -> tuple[Tensor, Tensor, Tensor]:
        return sample(logits, columns, truncates=True) if truncates else self.sample(logits, columns)


def columns_of(rows: Tensor, blocks: int) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor]:
    """Views of rows of 32-bit words: int64 columns, float32 columns, block table. So one copy moves a whole row."""
    ints = rows.view(torch.int64)[:, :INTS].unbind(1)
    floats = rows.view(torch.float32)[:, 2 * INTS : 2 * INTS + FLOATS].unbind(1)
    return ints, floats, rows[:, HEAD_WORDS : HEAD_WORDS + blocks]


def _words(outputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Tokens, logprobs and raw logprobs as 32-bit words, for one copy to the host."""
    return torch.cat([one.view(torch.int32) for one in outputs])
