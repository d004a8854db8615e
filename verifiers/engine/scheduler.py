"""Schedule sequences onto KV cache blocks and batch rows: waiting, prefilling, running, preempted, finished.

An admitted sequence gets blocks for the part of its prompt that is not in the prefix cache. Its prompt runs in chunks
between the decode steps of other sequences; then it gets a row of the decode batch. When blocks run out, the sequence
admitted last is preempted: it releases its blocks and waits, and its sampled tokens later run again with its prompt.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from verifiers.engine.batch_table import BatchTable
from verifiers.engine.block_manager import BLOCK, BlockManager, OutOfBlocksError, Prefix, blocks_for
from verifiers.engine.kv_cache import KVCache
from verifiers.engine.logits import CHUNK, LogitsProcessor
from verifiers.engine.model_runner import ModelRunner
from verifiers.engine.sequence import ActiveSequence, Chunk, Finished, Generated, Group, delivery, sharing_key
from verifiers.engine.sequential import SequentialCache

if TYPE_CHECKING:
    from verifiers.engine.cuda_runner import CudaDecoder

ONE_PROMPT = 4  # while others decode, one prompt gets at most a quarter of a step's prefill tokens


class Scheduler:
    """The queues of an engine, its blocks and its batch. ``wake`` guards ``waiting``; any thread may append to it."""

    cache: KVCache | SequentialCache
    blocks: BlockManager
    cuda: CudaDecoder | None = None  # holds the device's copy of the batch table

    def __init__(
        self, runner: ModelRunner, *, rows: int, length: int, prefill_tokens: int, stop_ids: frozenset[int]
    ) -> None:
        self._runner, self._prefill_tokens = runner, prefill_tokens
        self.rows, self.length, self.stop_ids = rows, length, stop_ids
        self.table = BatchTable(rows, length)
        self.waiting: deque[ActiveSequence] = deque()
        self.prefilling: list[Group] = []
        self.running: list[ActiveSequence] = []
        self.preempted = 0  # preemptions so far
        self._copies: dict[int, int] = {}  # target block → source block, to be copied before the next forward
        self.wake = threading.Condition()
        self.has_cancelled = False
        self._admissions = count()
        self._finished: list[tuple[ActiveSequence, Generated | BaseException]] = []  # for `deliver`

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.prefilling

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or not self.is_idle

    @property
    def free_rows(self) -> int:
        return self.rows - len(self.running) - sum(len(group.members) for group in self.prefilling)

    def sort_waiting(self) -> None:
        """Sort the waiting sequences by prompt and seed, which does not depend on their order of arrival."""
        self.waiting = deque(sorted(self.waiting, key=lambda one: (one.prompt_ids, one.seed)))

    def note_cancel(self) -> None:
        """Note that a request was cancelled. Safe to call from any thread."""
        self.has_cancelled = True

    # --- prefill --------------------------------------------------------------------------------------------------

    def admit(self) -> list[Chunk]:
        """Admit waiting sequences that fit; returns the prompt tokens to run in this step, oldest groups first."""
        now = self.blocks.version  # a group whose prefill began with other weights accepts no new members
        groups = {sharing_key(group.first): group for group in self.prefilling if group.first.cache_version == now}
        room, budget = self.free_rows, self._prefill_tokens - sum(group.left for group in self.prefilling)
        while self.waiting and room > 0:
            sequence = self.waiting[0]
            key = sharing_key(sequence)
            group = groups.get(key)
            if group is None and (budget <= 0 or not self._allocate(sequence)):
                break
            self.waiting.popleft()
            if not self._claim(sequence):
                self._release(sequence)
                continue
            room -= 1
            if group is not None:
                group.copies.append(sequence)
                continue
            groups[key] = Group(sequence)
            self.prefilling.append(groups[key])
            budget -= groups[key].left
        self._copy_blocks()
        return self._chunks()

    def _chunks(self) -> list[Chunk]:
        """Up to ``prefill_tokens`` prompt tokens, oldest prompt first; fewer per prompt while others decode."""
        chunks, budget, scored = [], self._prefill_tokens, CHUNK
        most = max(1, budget // ONE_PROMPT) if self.running else budget
        is_whole = isinstance(self.cache, SequentialCache)
        for group in self.prefilling:
            n = group.left if is_whole else min(group.left, budget, most)
            if group.first.needs_prompt_logprobs and not is_whole:
                n = min(n, scored)
                scored -= n
            if n > 0:
                chunks.append(Chunk(group, group.first.computed, group.first.computed + n))
                budget -= n
        return chunks

    def _claim(self, sequence: ActiveSequence) -> bool:
        """Mark a waiting request as running; False if it was cancelled."""
        if not sequence.future.claim():
            return False
        if sequence.is_cancelled:  # after it was marked as running, so its future needs an outcome
            self._finished.append((sequence, CancelledError()))
            return False
        if sequence.order < 0:
            sequence.order, sequence.weights = next(self._admissions), self._runner.changes
        return True

    def _allocate(self, sequence: ActiveSequence) -> bool:
        """Give a sequence blocks for all its tokens and the next one, reusing a cached prefix. False: too few are free.

        One block per admitted sequence stays in reserve, because otherwise a sequence would soon be preempted.
        """
        blocks, tokens = self.blocks, sequence.tokens
        prefix = Prefix([]) if sequence.needs_prompt_logprobs else blocks.longest_prefix(tokens)
        shared = [*prefix.blocks, *([prefix.source] if prefix.rest else [])]
        blocks.hold(shared)
        n = blocks_for(len(tokens) + 1) - len(prefix.blocks)
        admitted = len(self.running) + len(self.prefilling)
        if n + admitted > blocks.available:
            blocks.release(shared)
            return False
        own = blocks.allocate(n)
        if prefix.rest:
            self._copies[own[0]] = prefix.source
            blocks.release([prefix.source])  # all sources are read before the first copy is written
        sequence.blocks = [*prefix.blocks, *own]
        sequence.computed, sequence.cache_version = prefix.tokens, blocks.version
        if sequence.order < 0:
            sequence.reused = prefix.tokens
        return True

    def finish_chunks(self, chunks: Sequence[Chunk]) -> list[tuple[ActiveSequence, int]]:
        """After a prefill, give rows to the sequences whose prompt is complete; returns each with its chunk's index.

        Sequences with the same tokens share the full blocks and get a copy of the last one.
        """
        started, done = list[tuple[ActiveSequence, int]](), set[int]()
        for i, (group, _, end) in enumerate(chunks):
            first = group.first
            first.computed = end
            if group.left:
                continue
            blocks = first.blocks
            self._add_running(first)
            started.append((first, i))
            whole, rest = divmod(end, BLOCK)
            for n, copy in enumerate(group.copies):
                if rest and not self.blocks.available:
                    self._requeue(group.copies[n:])
                    break
                copy.blocks, copy.cache_version = blocks[:whole], first.cache_version
                self.blocks.hold(copy.blocks)
                if rest:
                    copy.blocks += self.blocks.allocate(1)
                    self._copies[copy.blocks[-1]] = blocks[whole]
                if not copy.sampled[0]:
                    copy.reused = len(copy.prompt_ids)
                if copy.needs_prompt_logprobs:
                    copy.future.prompt_logprobs = first.future.prompt_logprobs
                self._add_running(copy)
                started.append((copy, i))
            if isinstance(self.cache, SequentialCache):
                self.cache.fork(first, group.copies)
            done.add(id(group))
        self.prefilling = [group for group in self.prefilling if id(group) not in done]
        self._copy_blocks()
        return started

    def _copy_blocks(self) -> None:
        if self._copies and isinstance(self.cache, KVCache):
            self.cache.copy(list(self._copies.values()), list(self._copies))
        self._copies.clear()

    def _add_running(self, sequence: ActiveSequence) -> None:
        sequence.note_version(self._runner.weight_version, len(sequence.sampled[0]))
        if sequence.sampling.changes_logits and sequence.processor is None:
            sequence.processor = LogitsProcessor(
                sequence.sampling,
                sequence.prompt_ids,
                stop_ids=self.stop_ids,
                vocabulary=self._runner.vocabulary,
                device=self._runner.device,
            )
        sequence.row = len(self.running)
        self.running.append(sequence)
        self.table.assign(sequence)
        sequence.blocks = []

    def keep_prompt(self, sequence: ActiveSequence) -> None:
        """Add the full blocks of a prompt to the prefix cache. Called after its first token: its logits were finite."""
        if sequence.row >= 0 and sequence.cache_version == self.blocks.version:
            n = len(sequence.tokens) // BLOCK
            self.blocks.keep(self.table.blocks_of(sequence.row)[:n], sequence.tokens[: n * BLOCK])

    # --- blocks for the next tokens ---------------------------------------------------------------------------------

    def reserve(self, steps: int, drain: Callable[[], object] | None = None) -> tuple[int, np.ndarray, np.ndarray]:
        """Allocate blocks for the next ``steps`` tokens of every running sequence.

        Returns for how many tokens there are blocks, and the rows and columns of the table that got new ones. If there
        are too few free blocks for all steps, only one step is reserved. If there are too few even for that, ``drain``
        reads the steps in flight, then the sequence admitted last is preempted.
        """
        missing_N = self.table.missing_blocks(len(self.running), steps)
        while (count := int(missing_N.sum())) > self.blocks.available:
            if steps > 1:
                steps = 1
            elif drain is not None:
                drain()
                drain = None
            else:
                self._preempt_youngest()
            missing_N = self.table.missing_blocks(len(self.running), steps)
        return steps, *self.table.add_blocks(missing_N, self.blocks.allocate(count))

    def trim(self) -> None:
        """Release blocks that were reserved for tokens that were not sampled."""
        for row in self.table.rows_with_spare_blocks(len(self.running)).tolist():
            n = blocks_for(int(self.table.length[row]) + 1)
            self.blocks.release(self.table.blocks_of(row)[n:])
            self.table.blocks[row, n:] = 0
            self.table.n_blocks[row] = n

    def _preempt_youngest(self) -> None:
        """Preempt the sequence that was admitted last: release its blocks and put it back into the queue."""
        running = max(self.running, key=lambda one: one.order)
        group = max(self.prefilling, key=lambda one: one.first.order, default=None)
        if group is not None and group.first.order > running.order:
            self.prefilling.remove(group)
            self._release(group.first)
            self._requeue(group.members)
            return
        if len(self.running) == 1 and group is None:
            raise OutOfBlocksError("a single sequence needs more blocks than the KV cache has")
        running.sampled = self.table.sampled(running.row)
        running.tokens = np.array([*running.prompt_ids, *running.sampled[0]], np.int32)
        self.preempted += 1
        self._remove([running])
        self._requeue([running])

    def _requeue(self, sequences: Sequence[ActiveSequence]) -> None:
        with self.wake:
            self.waiting.extendleft(reversed(sequences))

    def _release(self, sequence: ActiveSequence) -> list[int]:
        """Release the blocks of a sequence; returns the blocks that are now empty."""
        blocks, row = sequence.blocks, sequence.row
        if row >= 0:
            blocks = self.table.blocks_of(row)
            self.table.n_blocks[row] = 0  # so they are not released twice if the step fails after this
        sequence.blocks, sequence.computed = [], 0
        return self.blocks.release(blocks)

    # --- the end of a sequence ------------------------------------------------------------------------------------

    def finish(self, finished: Sequence[Finished]) -> None:
        """Release the blocks of sequences that have finished; `deliver` sets their results."""
        if not finished:
            return
        for sequence, reason, overrun in finished:
            self.table.drop_last(sequence.row, overrun)
            outcome = self.table.output(sequence, reason, self._runner.changes) if isinstance(reason, str) else reason
            self._finished.append((sequence, outcome))
        failed = {one.sequence.row for one in finished if not isinstance(one.reason, str)}
        self._remove([one.sequence for one in finished], failed)

    def drop_cancelled(self) -> None:
        """Release the blocks of admitted requests that were cancelled, and drop the waiting ones."""
        if not self.has_cancelled:
            return
        self.has_cancelled = False
        dropped = [sequence for sequence in self.running if sequence.is_cancelled]
        if dropped:
            self._remove(dropped)
        for group in list(self.prefilling):
            gone = [one for one in group.members if one.is_cancelled]
            if len(gone) == len(group.members):
                self.prefilling.remove(group)
                self._release(group.first)
            elif group.first in gone:  # the others need its prefill, so it is dropped when that is complete
                self.has_cancelled = True
                gone.remove(group.first)
            group.copies = [one for one in group.copies if one not in gone]
            dropped += gone
        with self.wake:
            left = [sequence for sequence in self.waiting if sequence.is_cancelled]
            if left:
                self.waiting = deque(sequence for sequence in self.waiting if not sequence.is_cancelled)
        dropped += [sequence for sequence in left if sequence.future.claim()]
        self._finished += [(sequence, CancelledError()) for sequence in dropped]

    def _remove(self, sequences: Sequence[ActiveSequence], failed: Collection[int] = ()) -> None:
        """Remove sequences from the batch. Their blocks join the prefix cache, except for rows in ``failed``, whose
        blocks may contain NaN."""
        for sequence in sequences:
            if sequence.row not in failed and sequence.cache_version == self.blocks.version:
                prompt_T = sequence.tokens[: len(sequence.prompt_ids)]
                ids_T = np.concatenate([prompt_T, self.table.reply(sequence.row)])
                self.blocks.keep(self.table.blocks_of(sequence.row), ids_T[: self.table.length[sequence.row]])
            emptied = self._release(sequence)
            if sequence.row in failed and isinstance(self.cache, KVCache):
                self.cache.clear(emptied)  # a NaN would spread, because NaN times a weight of 0 is NaN
        self._close_gaps(sequences)

    def _close_gaps(self, sequences: Sequence[ActiveSequence]) -> None:
        """Move the last running sequences to the rows of the removed ones."""
        now = np.arange(self.rows + 1)  # old row → new row; -1: removed. The last entry maps index -1 to -1
        now[[self.rows, *(sequence.row for sequence in sequences)]] = -1
        last = len(self.running)
        n = last - len(sequences)
        holes, movers = (now[:n] < 0).nonzero()[0], now[n:last][now[n:last] >= 0]
        self.table.move(holes, movers)
        for hole, mover in zip(holes.tolist(), movers.tolist(), strict=True):
            self.running[hole] = self.running[mover]
            self.running[hole].row = hole
        del self.running[n:]
        for sequence in sequences:
            sequence.row = -1
        if self.cuda is not None:
            now[movers] = holes
            self.cuda.move(now, holes, movers, n, last)

    def deliver(self) -> None:
        """Set the futures of finished requests. Called after the step, because their callbacks may use the model."""
        if not self._finished:
            return
        finished, self._finished = self._finished, []
        with delivery():
            for sequence, outcome in finished:
                if isinstance(outcome, Generated):
                    sequence.future.set_result(outcome)
                else:
                    sequence.future.set_exception(outcome)

    def fail(self, error: Exception, *, waiting: bool = False) -> None:
        """Fail the admitted requests, and the waiting ones too if ``waiting`` is set or none is admitted."""
        with self.wake:
            admitted = [*self.running, *(one for group in self.prefilling for one in group.members)]
            sequences = list(dict.fromkeys(admitted))
            if waiting or not sequences:
                sequences += self.waiting
                self.waiting.clear()
            self.running.clear()
            self.prefilling.clear()
        self.deliver()
        self.blocks.forget()
        self._copies.clear()
        emptied = [block for sequence in sequences for block in self._release(sequence)]
        if isinstance(self.cache, KVCache):
            self.cache.clear(emptied)
        for sequence in sequences:
            sequence.row, future = -1, sequence.future
            if not future.done() and future.claim():  # a waiting request may be cancelled until it is claimed
                future.set_exception(error)
        if self.cuda is not None:
            self.cuda.reset()
