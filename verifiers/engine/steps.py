"""One step of an engine: tokens of prompts are run, all that decode get a token, and what has ended is finished.

On CUDA the host is behind the device: it launches the next steps before it reads the first of them (`cuda_runner`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verifiers.engine.block_manager import BLOCK, blocks_for
from verifiers.engine.cuda_runner import CudaDecoder
from verifiers.engine.finished import ends
from verifiers.engine.kv_cache import Decode, KVCache, Prefill, Segment
from verifiers.engine.logits import score_prompt
from verifiers.engine.model_runner import ModelRunner
from verifiers.engine.sampler import draw
from verifiers.engine.scheduler import Scheduler
from verifiers.engine.sequence import Chunk
from verifiers.engine.sequential import SequentialCache
from verifiers.kernels.cpu.model import Drawn, Paged
from verifiers.kernels.devices import host_index

AHEAD = 2  # steps that CUDA has to go on with, at least, while the host reads those before
ADMIT_SHARE = 16  # on CUDA, new requests are taken in when a 16th of the rows is free: each time costs a prefill
SPAN_STEP = 2 * BLOCK
BURST = 32  # tokens at most that each sequence draws in one call of C; how many are, its speed decides


class Steps:
    """Runs what the scheduler has admitted. ``is_stop_V`` says which tokens end a reply."""

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, *, rows: int, length: int, is_stop_V: np.ndarray
    ) -> None:
        self.runner, self.scheduler, self.table = runner, scheduler, scheduler.table
        self.rows, self.length, self.is_stop_V = rows, length, is_stop_V
        self.steps = self.tokens = 0  # that were run, and drawn
        self._version = runner.weight_version

    def run(self) -> None:
        """A chunk of the prompts that are being run, then one token for every sequence that decodes."""
        scheduler = self.scheduler
        is_idle = not scheduler.running and not scheduler.prefilling
        has_prompts = bool(scheduler.waiting or scheduler.prefilling)
        has_changed, has_moved = self.runner.notice(is_idle=is_idle, has_prompts=has_prompts)
        if has_changed:
            scheduler.blocks.forget()
        if self._version != self.runner.weight_version:
            self._note_version()
        if has_moved and scheduler.cuda is not None:
            scheduler.cuda.drop_graphs()  # they read from where the parameters were
        scheduler.drop_cancelled()
        if scheduler.cuda is not None:
            self._run_ahead(scheduler.cuda)
            return
        if chunks := scheduler.admit():
            self._prefill(chunks)
        if scheduler.running:
            self._decode()

    def _note_version(self) -> None:
        """Running sequences go on with other weights: what they sample from here on is of another version."""
        self._settle()  # these tokens are of the weights before
        self._version = self.runner.weight_version
        for sequence in self.scheduler.running:
            sequence.note_version(self._version, int(self.table.steps[sequence.row]))

    # --- on CUDA --------------------------------------------------------------------------------------------------

    def _run_ahead(self, cuda: CudaDecoder) -> None:
        """As `run`, but the host reads a step only when the next ones have been launched."""
        scheduler = self.scheduler
        is_worth_it = scheduler.free_rows * ADMIT_SHARE >= self.rows or not scheduler.running
        if has_prompts := bool(scheduler.prefilling or (scheduler.waiting and is_worth_it)):
            self._prefill(scheduler.admit())
        if np.count_nonzero(self.table.needs_logits[: len(scheduler.running)]):
            self._settle()
            if scheduler.running:
                self._decode()  # what is changed differs between sequences and steps: not worth a graph
                cuda.assign(np.arange(len(scheduler.running)))
        elif scheduler.running:
            self._launch(cuda, is_growing=has_prompts)
        while cuda.in_flight and cuda.steps_behind_oldest >= (AHEAD if scheduler.running else 0):
            self._collect(cuda)

    def _launch(self, cuda: CudaDecoder, *, is_growing: bool) -> None:
        """Some more tokens for all that run; one, while there are prompts: more of them may have come meanwhile."""
        scheduler, burst = self.scheduler, cuda.burst(len(self.scheduler.running))
        if not burst:
            self._settle()
            return
        steps, rows_M, column_M = scheduler.reserve(1 if is_growing else burst, self._settle)
        if scheduler.running:
            cuda.add_blocks(rows_M, column_M)
            cuda.launch(len(scheduler.running), steps)
            self.steps += steps

    def _settle(self) -> None:
        """Read all that was launched."""
        while self.scheduler.cuda is not None and self.scheduler.cuda.in_flight:
            self._collect(self.scheduler.cuda)

    def _collect(self, cuda: CudaDecoder) -> None:
        """Read the oldest steps that were launched."""
        rows_N, is_first, drawn = cuda.collect()
        if not is_first:
            self.table.ahead[rows_N] -= len(drawn.token_KB)
        self._record(rows_N, drawn, is_first=is_first)

    # --- prompts --------------------------------------------------------------------------------------------------

    def _prefill(self, chunks: Sequence[Chunk]) -> None:
        """Run tokens of prompts, and draw a token of each sequence whose prompt is complete."""
        if not chunks:
            return
        logits_NV, cuda = self._run_chunks(chunks), self.scheduler.cuda
        started = self.scheduler.start(chunks)
        if not started:
            return
        sequences, order = [sequence for sequence, _ in started], [i for _, i in started]
        if order != list(range(len(logits_NV))):
            logits_NV = logits_NV[host_index(order, logits_NV.device)]
        rows_N = np.array([sequence.row for sequence in sequences])
        if cuda is not None and not self.table.needs_logits[rows_N].any():
            cuda.launch_first(logits_NV, rows_N)
            return
        self._record(rows_N, draw(logits_NV, sequences, rows_N, self.table, cuda), is_first=True)
        if cuda is not None and (begun := [sequence.row for sequence in sequences if sequence.row >= 0]):
            cuda.assign(np.array(begun))

    def _run_chunks(self, chunks: Sequence[Chunk]) -> Tensor:
        """The logits behind the last token of each chunk; those before it too where a prompt is to be scored."""
        sequences, cache = [chunk.group.first for chunk in chunks], self.scheduler.cache
        if isinstance(cache, SequentialCache):
            for one in sequences:
                if one.is_to_be_scored:
                    score_prompt(one, 0, cache.logits(one.prompt_ids))
            return cache.prefill(sequences)
        tables = np.zeros((len(chunks), max(len(one.blocks) for one in sequences)), np.int32)
        segments, kept, at = list[Segment](), list[int](), 0
        for i, (sequence, (_, start, end)) in enumerate(zip(sequences, chunks, strict=True)):
            tables[i, : len(sequence.blocks)] = sequence.blocks
            segments.append(Segment(at, at + end - start, i, start))
            at += end - start
            kept += range(segments[-1].start, at) if sequence.is_to_be_scored else [at - 1]
        ids_T = np.concatenate([one.tokens[start:end] for one, (_, start, end) in zip(sequences, chunks, strict=True)])
        logits_NV = self._run_prompts(ids_T, np.array(kept), segments, tables, cache)
        if not any(one.is_to_be_scored for one in sequences):
            return logits_NV
        last, n = [], 0
        for sequence, (_, start, end) in zip(sequences, chunks, strict=True):
            if sequence.is_to_be_scored:
                score_prompt(sequence, start, logits_NV[n : n + end - start])
                n += end - start - 1
            last.append(n)
            n += 1
        return logits_NV[host_index(last, logits_NV.device)]

    def _run_prompts(
        self, ids_T: np.ndarray, kept_N: np.ndarray, segments: list[Segment], tables: np.ndarray, cache: KVCache
    ) -> Tensor:
        """The logits behind the tokens at ``kept``, of prompts laid end to end; their keys and values are stored."""
        if self.scheduler.cuda is not None:
            return self.scheduler.cuda.prefill(ids_T, kept_N, segments, tables)
        attend = Prefill(cache, tables, segments)
        ids, positions = (torch.from_numpy(one.astype(np.int64))[None] for one in (ids_T, attend.position_T))
        return self.runner.forward(ids, positions, attend, torch.from_numpy(kept_N))[0]

    # --- tokens ---------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """One token for every running sequence; several, where none of them has to be looked at before the next."""
        table, scheduler, cache = self.table, self.scheduler, self.scheduler.cache
        if isinstance(cache, SequentialCache):
            logits_BV = cache.decode(scheduler.running, table.token[: len(scheduler.running)].tolist())
        else:
            self.runner.count_step()
            burst = self._burst(len(scheduler.running))
            steps = scheduler.reserve(max(burst, 1))[0]
            if not scheduler.running:  # the only one had to make room for a prompt that came before it
                return
            if burst:
                self._decode_several(steps, cache)
                return
            logits_BV = self._run_step(cache)
        rows_N = np.arange(len(scheduler.running))
        self.steps += 1
        self._record(rows_N, draw(logits_BV, scheduler.running, rows_N, table, scheduler.cuda))

    def _burst(self, rows: int) -> int:
        """How many tokens each sequence draws in one call of C; 0: it is not done in C."""
        table = self.table
        if (table.is_watched | table.needs_logits)[:rows].any():
            return 0
        most = min(int(table.tokens_left(rows).min()), BURST)
        return self.runner.burst(most, len(self.is_stop_V)) if most > 1 else 0

    def _run_step(self, cache: KVCache) -> Tensor:
        table, n, device = self.table, len(self.scheduler.running), self.runner.device
        length_B = torch.from_numpy(table.length[:n]).to(device)
        span = (int(table.length[:n].max()) // SPAN_STEP + 1) * SPAN_STEP
        attend = Decode(cache, table.blocks[:n], length_B, min(span, blocks_for(self.length) * BLOCK))
        ids = torch.from_numpy(table.token[:n]).to(device)[:, None]
        return self.runner.forward(ids, length_B[:, None], attend)[:, 0]

    def _decode_several(self, most: int, cache: KVCache) -> None:
        table, rows = self.table, len(self.scheduler.running)
        drawn = self.runner.decode(
            table.decode_columns(rows), most, self.is_stop_V, Paged(cache.store, table.blocks, cache.length)
        )
        self.steps += len(drawn.token_KB)
        self._record(np.arange(rows), drawn)
        if len(drawn.token_KB) < most:
            self.scheduler.trim()

    def _record(self, rows_N: np.ndarray, drawn: Drawn, *, is_first: bool = False) -> None:
        """Keep what was drawn, and finish the sequences for which it was the last."""
        table, scheduler = self.table, self.scheduler
        table.record(rows_N, drawn, is_first=is_first)
        begun = [scheduler.running[row] for row in rows_N] if is_first else []
        found = ends(scheduler.running, rows_N, drawn, table, self.is_stop_V)
        self.tokens += drawn.token_KB.size - sum(one.beyond for one in found)
        scheduler.finish(found)
        for sequence in begun:
            scheduler.keep_prompt(sequence)
