"""Decoding on CUDA: captured graphs over static rows, sampling on the device, the host some steps behind.

The device holds the truth while it runs: last token, length and columns of each row, updated by the graph itself. The
host launches the next steps before it reads those before, so it never waits for a token; what a row samples after its
end is thrown away.
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
WHOLE, REAL, HEAD_WORDS = 6, 3, 16  # columns of a row on the device, and the words of 32 bits before its blocks
BURST = 4  # steps that are launched at once, and read at once; a row runs on for two bursts, so 8 at most (see BEYOND)
# With so few rows a step is launched at a time: the host has little to do for it, and a batch that ends meets every
# size of graph the first time already.
FEW_ROWS = 64
WORDS = 4  # of 32 bits that a row sends to the host: its token has two, each logprob one


@dataclass(slots=True)
class _Launch:
    """Steps that were launched: where their numbers arrive, and whose they are.

    ``rows_N`` are the rows that the sequences have now, -1 for those that are gone; as long as nobody has left or
    moved ``is_whole``. Are these tokens the first of their replies?
    """

    rows_N: np.ndarray
    is_first: bool
    steps: int
    arrived: Any
    words: Tensor  # [steps, WORDS, rows of the graph] and more
    size: int
    is_whole: bool = True


class CudaDecoder:
    """The device's side of the table, the graphs, and the steps in flight."""

    def __init__(self, table: BatchTable, runner: ModelRunner, cache: KVCache, card: CudaDevice) -> None:
        self.table, self.runner, self.cache, self.card = table, runner, cache, card
        self.rows, device = len(table.length), cache.store.device
        # Rows that are not live have no blocks: they stay at position 0 of nobody's. The last one never is.
        rows, width = table.blocks.shape
        self._rows = torch.zeros((rows + 1, row_words(width)), dtype=torch.int32, device=device)
        whole, real, self.blocks = columns_of(self._rows, width)
        self.token, self.length, self.is_live, top_k, seed, step = whole
        temperature, top_p, min_p = real
        self.columns = SamplingColumns(temperature, top_p, top_k, min_p, seed, step)
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._launched: deque[_Launch] = deque()
        self._spare: list[Tensor] = []
        self._prefill = CudaPrefill(self)
        self.prefill = self._prefill.run
        self.sample = card.sample

    # --- the table's copy on the device ---------------------------------------------------------------------------

    def assign(self, rows_N: np.ndarray) -> None:
        """Tell the device about rows that were just filled."""
        table, device = self.table, self.blocks.device
        told = torch.zeros((len(rows_N), self._rows.shape[1]), dtype=torch.int32)
        whole, real, blocks = columns_of(told, table.blocks.shape[1])
        live = np.ones_like(table.length)
        given: list[np.ndarray] = [table.token, table.length, live, table.top_k, table.seed, table.steps]
        given += [table.temperature, table.top_p, table.min_p]
        for target, column in zip((*whole, *real), given, strict=True):
            target.numpy()[:] = column[rows_N]
        blocks.numpy()[:] = table.blocks[rows_N]
        self._rows[host_index(rows_N, device)] = to_device(told.numpy(), device)

    def add_blocks(self, rows_N: np.ndarray, column_N: np.ndarray) -> None:
        """Tell the device of the blocks that rows got."""
        n = len(rows_N)
        if n:
            words_N = rows_N * self._rows.shape[1] + HEAD_WORDS + column_N
            told = to_device(np.concatenate([words_N, self.table.blocks[rows_N, column_N]]), self.blocks.device)
            self._rows.view(-1).index_copy_(0, told[:n], told[n:].int())

    def free(self, holes: np.ndarray, movers: np.ndarray, first: int, last: int) -> None:
        """Follow the host in closing gaps: rows ``first`` to ``last`` are free from here on."""
        freed = np.arange(first, last)
        moves = to_device(np.concatenate([holes, freed, movers, np.full(len(freed), self.rows)]), self.blocks.device)
        n = len(holes) + len(freed)
        self._rows.index_copy_(0, moves[:n], self._rows.index_select(0, moves[n:]))

    def follow(self, now: np.ndarray) -> None:
        """Sequences have left or moved: the one of row i is in row ``now[i]``, or nowhere (-1, which stays)."""
        for launch in self._launched:
            launch.rows_N, launch.is_whole = now[launch.rows_N], False

    # --- steps ----------------------------------------------------------------------------------------------------

    def burst(self, n: int) -> int:
        """How many steps to launch for the first n rows: none, if those in flight are the last of all of them."""
        is_told = np.count_nonzero(self.table.is_told[:n])  # of each token as it comes
        return max(0, min(int(self.table.tokens_left(n).max()), 1 if is_told or n <= FEW_ROWS else BURST))

    def launch(self, n: int, steps: int) -> None:
        """Start some steps for the first n rows without waiting for anything."""
        truncates = bool(np.count_nonzero(self.table.truncates[:n]))
        size = min(next((size for size in BUCKETS if size >= n), self.rows), self.rows)
        key = (size, truncates)
        if key not in self._graphs:
            self._graphs[key] = self._capture(size, truncates)
        graph, words = self._graphs[key]
        there, count = self._arrivals(), len(words)
        for k in range(steps):
            graph.replay()
            there[k * count : (k + 1) * count].copy_(words, non_blocking=True)
        self.table.ahead[:n] += steps
        self._launched.append(_Launch(np.arange(n), False, steps, self.card.event(), there, size))

    def launch_first(self, logits_NV: Tensor, rows_N: np.ndarray) -> None:
        """Draw the first tokens of sequences that have just got these rows, without waiting for them."""
        self.assign(rows_N)
        index = host_index(rows_N, self.blocks.device)
        columns = self.table.columns(rows_N, self.blocks.device)
        outputs = self._draw(logits_NV, columns, truncates=bool(self.table.truncates[rows_N].any()))
        self.token[index] = outputs[0]
        self.columns.step_B[index] += 1
        words = _words(outputs)
        there = self._arrivals()
        there[: len(words)].copy_(words, non_blocking=True)
        self._launched.append(_Launch(rows_N, True, 1, self.card.event(), there, len(rows_N)))

    def _arrivals(self) -> Tensor:
        """Where the words of a launch arrive."""
        return self._spare.pop() if self._spare else self.card.arrivals(BURST * WORDS * self.rows)

    @property
    def in_flight(self) -> int:
        """Launches that were not read yet."""
        return len(self._launched)

    @property
    def steps_behind_oldest(self) -> int:
        """Steps in flight that the device can go on with when the oldest launch is done."""
        return sum(launch.steps for launch in self._launched) - self._launched[0].steps if self._launched else 0

    def collect(self) -> tuple[np.ndarray, bool, Drawn]:
        """Wait for the oldest launch in flight; gives the rows whose sequences still run, and their tokens (the first
        of a reply?)."""
        launch = self._launched.popleft()
        keep = slice(len(launch.rows_N)) if launch.is_whole else np.flatnonzero(launch.rows_N >= 0)
        rows_N = launch.rows_N[keep]
        if len(rows_N):  # nobody waits for what was run on beyond the end
            launch.arrived.synchronize()
        n = launch.size
        words_K = launch.words.numpy()[: launch.steps * WORDS * n].reshape(launch.steps, WORDS * n)
        token_KN, others_K = words_K[:, : 2 * n].view(np.int64), words_K[:, 2 * n :].view(np.float32)
        self._spare.append(launch.words)
        return rows_N, launch.is_first, Drawn(token_KN[:, keep], others_K[:, :n][:, keep], others_K[:, n:][:, keep])

    def drop_graphs(self) -> None:
        self._graphs.clear()
        self._prefill.drop_graphs()
        self.card.drop_graphs()

    def reset(self) -> None:
        """Forget the steps in flight, and let no row write."""
        self._launched.clear()
        self._rows.zero_()

    def _capture(self, size: int, truncates: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Record a step. What is practised is the step that comes next: it writes the keys that this one will."""
        state = [self.token, self.length, self.columns.step_B]
        before = [column.clone() for column in state]

        def put_back() -> None:
            for column, value in zip(state, before, strict=True):
                column.copy_(value)

        return self.card.record(lambda: self._step(size, truncates), put_back)

    def _step(self, size: int, truncates: bool) -> Tensor:
        length = self.length[:size]
        position = length.clamp(max=self.cache.length - 1)  # a row may be run on beyond its end, and thrown away
        attend = self.card.decode_attention(self.cache, self.blocks[:size], length)
        logits = self.runner.forward(self.token[:size, None], position[:, None], attend)[:, 0]
        columns = SamplingColumns(*(getattr(self.columns, name)[:size] for name in SamplingColumns.__slots__))
        outputs = self._draw(logits, columns, truncates=truncates)
        self.token[:size] = outputs[0]
        length.add_(self.is_live[:size])
        columns.step_B.add_(1)
        return _words(outputs)

    def _draw(self, logits: Tensor, columns: SamplingColumns, *, truncates: bool) -> tuple[Tensor, Tensor, Tensor]:
        return sample(logits, columns, truncates=True) if truncates else self.sample(logits, columns)


def row_words(blocks: int) -> int:
    """Words of 32 bits that a row has on the device; an even number of them."""
    return HEAD_WORDS + blocks + blocks % 2


def columns_of(rows: Tensor, blocks: int) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor]:
    """Rows of words as columns: whole numbers of 64 bits, real ones, and the block table. One copy moves a row."""
    whole = rows.view(torch.int64)[:, :WHOLE].unbind(1)
    real = rows.view(torch.float32)[:, 2 * WHOLE : 2 * WHOLE + REAL].unbind(1)
    return whole, real, rows[:, HEAD_WORDS : HEAD_WORDS + blocks]


def _words(outputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Tokens and both logprobs side by side, so that one copy brings them to the host."""
    return torch.cat([one.view(torch.int32) for one in outputs])
