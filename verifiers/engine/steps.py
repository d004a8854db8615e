"""One step of an engine: prefill chunks of prompts, sample a token for running sequences, remove finished ones.

On CUDA the host runs behind the device: it launches the next steps before it reads the results of earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verifiers.engine.block_manager import BLOCK, blocks_for
from verifiers.engine.cuda_runner import CudaDecoder
from verifiers.engine.kv_cache import Decode, KVCache, Prefill, Segment
from verifiers.engine.logits import draw, score_prompt
from verifiers.engine.model_runner import ModelRunner
from verifiers.engine.scheduler import Scheduler
from verifiers.engine.sequence import ActiveSequence, Chunk, Finished
from verifiers.engine.sequential import SequentialCache
from verifiers.errors import ModelError
from verifiers.kernels.cpu.model import Drawn
from verifiers.kernels.devices import host_index

AHEAD = 2  # steps that must be in flight on CUDA while the host reads the results of earlier ones
ADMIT_SHARE = 16  # on CUDA, sequences are admitted when 1/16 of the rows is free, because each prefill delays the batch
SPAN_STEP = 2 * BLOCK  # a decode step's attention reads a number of positions rounded up to a multiple of this
BURST = 32  # maximum tokens per sequence in one C call; the model's speed determines the actual number


class StepRunner:
    """Runs what the scheduler has admitted."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self.runner, self.scheduler, self.table = runner, scheduler, scheduler.table
        self._is_stop_V = np.zeros(runner.vocabulary + 1, bool)  # the tokens that end a reply
        self._is_stop_V[[token for token in scheduler.stop_ids if 0 <= token < runner.vocabulary]] = True
        self.steps = self.tokens = 0  # decode steps run, tokens sampled
        self._version = runner.weight_version

    def run(self) -> None:
        """Run a chunk of each prefilling prompt, then sample one token for every running sequence."""
        scheduler = self.scheduler
        has_prompts = bool(scheduler.waiting or scheduler.prefilling)
        has_changed, has_moved = self.runner.detect_changes(is_idle=scheduler.is_idle, has_prompts=has_prompts)
        if has_changed:
            scheduler.blocks.forget()
        if self._version != self.runner.weight_version:
            self._note_version()
        if has_moved and scheduler.cuda is not None:
            scheduler.cuda.drop_graphs()  # graphs contain the parameters' old addresses
        if has_changed and scheduler.cuda is not None:
            scheduler.cuda.update_angles()
        scheduler.drop_cancelled()
        before = self.runner.buffer_writes
        try:
            self._step()
        finally:  # a forward that writes to its buffers (a token counter, for example) does not change the weights
            self.runner.lock.undone += self.runner.buffer_writes - before

    def _step(self) -> None:
        scheduler = self.scheduler
        if scheduler.cuda is not None:
            self._run_on_cuda(scheduler.cuda)
            return
        if chunks := scheduler.admit():
            self._prefill(chunks)
        if scheduler.running:
            self._decode()

    def _note_version(self) -> None:
        """Record that the next tokens of running sequences are sampled from another version of the weights."""
        self._drain()  # tokens in flight belong to the previous version
        self._version = self.runner.weight_version
        for sequence in self.scheduler.running:
            sequence.note_version(self._version, int(self.table.steps[sequence.row]))

    # --- on CUDA --------------------------------------------------------------------------------------------------

    def _run_on_cuda(self, cuda: CudaDecoder) -> None:
        """Like `run`, but the host reads the results of a step only after it has launched the next ones."""
        scheduler = self.scheduler
        may_admit = scheduler.free_rows * ADMIT_SHARE >= scheduler.rows or not scheduler.running
        if has_prompts := bool(scheduler.prefilling or (scheduler.waiting and may_admit)):
            self._prefill(scheduler.admit())
        if np.count_nonzero(self.table.needs_logits[: len(scheduler.running)]):
            self._drain()
            if scheduler.running:
                self._decode()  # without a graph: logits are processed differently for each sequence and step
                cuda.assign(np.arange(len(scheduler.running)))
        elif scheduler.running:
            self._launch(cuda, is_growing=has_prompts)
        while cuda.in_flight and cuda.steps_behind_oldest >= (AHEAD if scheduler.running else 0):
            self._collect(cuda)

    def _launch(self, cuda: CudaDecoder, *, is_growing: bool) -> None:
        """Launch a burst of steps for the batch, or one step while prompts come in, because more may follow."""
        scheduler, burst = self.scheduler, cuda.burst(len(self.scheduler.running))
        if not burst:
            self._drain()
            return
        steps, rows_M, column_M = scheduler.reserve(1 if is_growing else burst, self._drain)
        if scheduler.running:
            cuda.add_blocks(rows_M, column_M)
            cuda.launch(len(scheduler.running), steps)
            self.steps += steps

    def _drain(self) -> None:
        """Read the results of all steps in flight."""
        while self.scheduler.cuda is not None and self.scheduler.cuda.in_flight:
            self._collect(self.scheduler.cuda)

    def _collect(self, cuda: CudaDecoder) -> None:
        """Read the results of the oldest launch in flight."""
        rows_N, is_first, drawn = cuda.collect()
        if not is_first:
            self.table.ahead[rows_N] -= len(drawn.token_KB)
        self._record(rows_N, drawn, is_first=is_first)

    # --- prefill --------------------------------------------------------------------------------------------------

    def _prefill(self, chunks: Sequence[Chunk]) -> None:
        """Run chunks of prompts and sample the first token of each sequence whose prompt is complete."""
        if not chunks:
            return
        logits_NV, cuda = self._run_chunks(chunks), self.scheduler.cuda
        started = self.scheduler.finish_chunks(chunks)
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
        """The logits after the last token of each chunk. Also records prompt logprobs where they are requested."""
        sequences, cache = [chunk.group.first for chunk in chunks], self.scheduler.cache
        if isinstance(cache, SequentialCache):
            for one in sequences:
                if one.needs_prompt_logprobs:
                    score_prompt(one, 0, cache.logits(one.prompt_ids))
            return cache.prefill(sequences)
        tables = np.zeros((len(chunks), max(len(one.blocks) for one in sequences)), np.int32)
        segments, keep, last = list[Segment](), list[int](), list[int]()  # last: index into keep of each chunk's end
        for i, (sequence, (_, start, end)) in enumerate(zip(sequences, chunks, strict=True)):
            tables[i, : len(sequence.blocks)] = sequence.blocks
            first = segments[-1].end if segments else 0
            stop = first + end - start
            segments.append(Segment(first, stop, i, start))
            keep += range(first if sequence.needs_prompt_logprobs else stop - 1, stop)
            last.append(len(keep) - 1)
        ids_T = np.concatenate([one.tokens[start:end] for one, (_, start, end) in zip(sequences, chunks, strict=True)])
        logits_NV = self._prefill_logits(ids_T, np.array(keep), segments, tables, cache)
        for sequence, (_, start, end), n in zip(sequences, chunks, last, strict=True):
            if sequence.needs_prompt_logprobs:
                score_prompt(sequence, start, logits_NV[n + 1 - (end - start) : n + 1])
        return logits_NV if len(keep) == len(chunks) else logits_NV[host_index(last, logits_NV.device)]

    def _prefill_logits(
        self, ids_T: np.ndarray, keep_N: np.ndarray, segments: list[Segment], tables: np.ndarray, cache: KVCache
    ) -> Tensor:
        """The logits after the tokens at ``keep_N`` of packed prompts. Stores the prompts' keys and values."""
        if self.scheduler.cuda is not None:
            return self.scheduler.cuda.prefill(ids_T, keep_N, segments, tables)
        attend = Prefill(cache, tables, segments)
        ids, positions = (torch.from_numpy(one.astype(np.int64))[None] for one in (ids_T, attend.position_T))
        return self.runner.forward(ids, positions, attend, torch.from_numpy(keep_N))[0]

    # --- decode ---------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """Sample one token for every running sequence, or several in C if the host need not check each token."""
        table, scheduler, cache = self.table, self.scheduler, self.scheduler.cache
        if isinstance(cache, SequentialCache):
            logits_BV = cache.decode(scheduler.running, table.token[: len(scheduler.running)].tolist())
        else:
            self.runner.count_step()
            burst = self._burst(len(scheduler.running))
            steps = scheduler.reserve(max(burst, 1))[0]
            if not scheduler.running:  # the only one was preempted in favour of an older one that is prefilling
                return
            if burst:
                self._decode_burst(steps, cache)
                return
            logits_BV = self._decode_logits(cache)
        rows_N = np.arange(len(scheduler.running))
        self.steps += 1
        self._record(rows_N, draw(logits_BV, scheduler.running, rows_N, table, scheduler.cuda))

    def _burst(self, rows: int) -> int:
        """How many tokens each sequence samples in one C call; 0 if this batch cannot run in C."""
        table = self.table
        if (table.needs_token_check | table.needs_logits)[:rows].any():
            return 0
        most = min(int(table.tokens_left(rows).min()), BURST)
        return self.runner.burst(most, len(self._is_stop_V)) if most > 1 else 0

    def _decode_logits(self, cache: KVCache) -> Tensor:
        table, n, device = self.table, len(self.scheduler.running), self.runner.device
        length_B = torch.from_numpy(table.length[:n]).to(device)
        span = (int(table.length[:n].max()) // SPAN_STEP + 1) * SPAN_STEP
        attend = Decode(cache, table.blocks[:n], length_B, min(span, blocks_for(self.scheduler.length) * BLOCK))
        ids = torch.from_numpy(table.token[:n]).to(device)[:, None]
        return self.runner.forward(ids, length_B[:, None], attend)[:, 0]

    def _decode_burst(self, steps: int, cache: KVCache) -> None:
        table, rows_N = self.table, np.arange(len(self.scheduler.running))
        columns, paged = table.columns(rows_N, self.runner.device), cache.paged(table.blocks)
        drawn = self.runner.decode(table.token[rows_N], table.length[rows_N], columns, steps, self._is_stop_V, paged)
        self.steps += len(drawn.token_KB)
        self._record(rows_N, drawn)
        if len(drawn.token_KB) < steps:
            self.scheduler.trim()

    def _record(self, rows_N: np.ndarray, drawn: Drawn, *, is_first: bool = False) -> None:
        """Store sampled tokens in the table and finish the sequences that ended."""
        table, scheduler = self.table, self.scheduler
        table.record(rows_N, drawn, is_first=is_first)
        started = [scheduler.running[row] for row in rows_N] if is_first else []
        finished = self._find_finished(rows_N, drawn)
        self.tokens += drawn.token_KB.size - sum(one.overrun for one in finished)
        scheduler.finish(finished)
        for sequence in started:
            scheduler.keep_prompt(sequence)

    def _find_finished(self, rows_N: np.ndarray, drawn: Drawn) -> list[Finished]:
        """The sequences that finish: by a stop token, their ``on_token``, their length limit, or a NaN."""
        table, running, steps = self.table, self.scheduler.running, len(drawn.token_KB)
        left_N, is_stop_KN = table.max_tokens[rows_N] - table.steps[rows_N], self._is_stop_V[drawn.token_KB]
        is_last_KN = is_stop_KN | ~np.isfinite(drawn.raw_KB + drawn.logprob_KB)
        some_M = (is_last_KN.any(0) | (left_N <= 0) | table.needs_token_check[rows_N]).nonzero()[0]
        found, rows, left = dict[int, Finished](), rows_N[some_M].tolist(), left_N[some_M].tolist()
        for k in range(steps if rows else 0):
            overrun, columns = steps - 1 - k, (one[k][some_M].tolist() for one in (*drawn, is_stop_KN))
            for row, room, token, logprob, raw, is_stop in zip(rows, left, *columns, strict=True):
                if row in found:
                    continue
                reason = _finish_reason(running[row], token, logprob, raw, is_stop, room + overrun <= 0)
                if reason is not None:
                    found[row] = Finished(running[row], reason, overrun)
        return list(found.values())


def _finish_reason(
    sequence: ActiveSequence, token: int, logprob: float, raw: float, is_stop: bool, is_full: bool
) -> str | Exception | None:
    if not math.isfinite(raw):
        return ModelError("the model returned logits that are not numbers (NaN); check its weights")
    if sequence.failure is not None:
        return sequence.failure
    if not math.isfinite(logprob):
        return ModelError("no token is left to sample: logit_bias and other arguments exclude all of them")
    if token in sequence.sampling.stop_ids or (is_stop and not sequence.sampling.ignore_eos):
        return "stop"
    try:
        if sequence.on_token is not None and sequence.on_token(token, logprob):
            return "stop"
    except Exception as error:  # foreign code: fail only its own request
        return error
    return "length" if is_full else None
