"""Requests → blocks and rows: who waits, whose prompt is run, who decodes, who is preempted, and who has finished.

A request that is admitted gets blocks for its prompt, less those of a prefix that is kept. When its prompt has been
run, chunk by chunk between the steps of others, it gets a row of the batch that decodes. When blocks run out, the
request admitted last gives its own back and waits; what it has sampled is kept, and run again as part of its prompt.
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
from verifiers.engine.finished import Ended
from verifiers.engine.kv_cache import KVCache
from verifiers.engine.logits import CHUNK, LogitsProcessor
from verifiers.engine.model_runner import ModelRunner
from verifiers.engine.sequence import ActiveSequence, Chunk, Generated, Group, delivery, in_order, sharing_key
from verifiers.engine.sequential import SequentialCache

if TYPE_CHECKING:
    from verifiers.engine.cuda_runner import CudaDecoder

ONE_PROMPT = 4  # while others decode, a quarter of the tokens that are run at once is one prompt's at most


class Scheduler:
    """The queues of an engine, its blocks and its rows. ``wake`` guards ``waiting``, which any thread may add to."""

    cache: KVCache | SequentialCache
    blocks: BlockManager
    cuda: CudaDecoder | None = None  # has a copy of the table on the device

    def __init__(
        self,
        runner: ModelRunner,
        *,
        rows: int,
        length: int,
        prefill_tokens: int,
        vocabulary: int,
        stop_ids: frozenset[int],
    ) -> None:
        self._runner, self._rows = runner, rows
        self._prefill_tokens = prefill_tokens
        self._vocabulary, self._stop_ids = vocabulary, stop_ids
        self.table = BatchTable(rows, length)
        self.waiting: deque[ActiveSequence] = deque()
        self.prefilling: list[Group] = []
        self.running: list[ActiveSequence] = []
        self.preempted = 0  # how often a request was
        self._copies: dict[int, int] = {}  # blocks to fill before anything is run, and those to copy them from
        self.wake = threading.Condition()
        self.has_cancelled = False
        self._orders = count()
        self._finished: list[tuple[ActiveSequence, Generated | BaseException]] = []

    def sort_waiting(self) -> None:
        """Put those that wait in an order that does not depend on who came first."""
        self.waiting = deque(in_order(self.waiting))

    def note_cancel(self) -> None:
        """A request was cancelled, on whichever thread."""
        self.has_cancelled = True

    # --- prompts --------------------------------------------------------------------------------------------------

    @property
    def free_rows(self) -> int:
        return self._rows - len(self.running) - sum(len(group.members) for group in self.prefilling)

    def admit(self) -> list[Chunk]:
        """The tokens of prompts to run in this step: those under way go on, then waiting requests that fit come in."""
        now = self.blocks.version  # a group begun with other weights is for those that were there then
        groups = {sharing_key(group.first): group for group in self.prefilling if group.first.kept_version == now}
        room, budget = self.free_rows, self._prefill_tokens - sum(group.left for group in self.prefilling)
        while self.waiting and room > 0:
            sequence = self.waiting[0]
            key = sharing_key(sequence)
            group = groups.get(key)
            if group is None and (budget <= 0 or not self._take_blocks(sequence)):
                break
            self.waiting.popleft()
            if not self._begin(sequence):
                self._give_blocks(sequence)
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
        """As many tokens as are run at once, the oldest prompt's first; others that decode wait for a part of them."""
        chunks, budget, scored = [], self._prefill_tokens, CHUNK
        most = max(1, budget // ONE_PROMPT) if self.running else budget
        is_whole = isinstance(self.cache, SequentialCache)
        for group in self.prefilling:
            n = group.left if is_whole else min(group.left, budget, most)
            if group.first.is_to_be_scored and not is_whole:
                n = min(n, scored)
                scored -= n
            if n > 0:
                chunks.append(Chunk(group, group.first.computed, group.first.computed + n))
                budget -= n
        return chunks

    def _begin(self, sequence: ActiveSequence) -> bool:
        """Is a request that waited still wanted? From here on it cannot be cancelled as one that waits."""
        future = sequence.future
        if not (future.running() or future.set_running_or_notify_cancel()):
            return False
        if sequence.is_cancelled:  # after it was marked as running: it is told so as one that ran
            self._finished.append((sequence, CancelledError()))
            return False
        if sequence.order < 0:
            sequence.order, sequence.weights = next(self._orders), self._runner.version
        return True

    def _take_blocks(self, sequence: ActiveSequence) -> bool:
        """Blocks for all tokens of a sequence and the next one, those of a kept prefix among them; False: not now.

        A block is left for each sequence under way, or it would be preempted again before long.
        """
        blocks, tokens = self.blocks, sequence.tokens
        prefix = Prefix([]) if sequence.is_to_be_scored else blocks.longest_prefix(tokens)
        shared = [*prefix.blocks, *([prefix.source] if prefix.rest else [])]
        blocks.hold(shared)
        n = blocks_for(len(tokens) + 1) - len(prefix.blocks)
        under_way = len(self.running) + len(self.prefilling)
        if n + under_way > blocks.available:
            blocks.release(shared)
            return False
        own = blocks.allocate(n)
        if prefix.rest:
            self._copies[own[0]] = prefix.source
            blocks.release([prefix.source])  # all sources are read before the first copy is written
        sequence.blocks = [*prefix.blocks, *own]
        sequence.computed, sequence.kept_version = prefix.tokens, blocks.version
        if sequence.order < 0:
            sequence.reused = prefix.tokens
        return True

    def start(self, chunks: Sequence[Chunk]) -> list[tuple[ActiveSequence, int]]:
        """Note that chunks were run: rows for those whose prompt is complete, with the number of the chunk.

        Sequences with the same tokens share the full blocks, and get a copy of the last one.
        """
        started, done = list[tuple[ActiveSequence, int]](), set[int]()
        for i, (group, _, end) in enumerate(chunks):
            first = group.first
            first.computed = end
            if group.left:
                continue
            blocks = first.blocks
            self._start(first)
            started.append((first, i))
            whole, rest = divmod(end, BLOCK)
            for n, copy in enumerate(group.copies):
                if rest and not self.blocks.available:
                    self._wait_again(group.copies[n:])
                    break
                copy.blocks, copy.kept_version = blocks[:whole], first.kept_version
                self.blocks.hold(copy.blocks)
                if rest:
                    copy.blocks += self.blocks.allocate(1)
                    self._copies[copy.blocks[-1]] = blocks[whole]
                if not copy.sampled[0]:
                    copy.reused = len(copy.prompt_ids)
                if copy.is_to_be_scored:
                    copy.future.prompt_logprobs = first.future.prompt_logprobs
                self._start(copy)
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

    def _start(self, sequence: ActiveSequence) -> None:
        sequence.note_version(self._runner.weight_version, len(sequence.sampled[0]))
        if sequence.sampling.changes_logits and sequence.processor is None:
            sequence.processor = LogitsProcessor(
                sequence.sampling,
                sequence.prompt_ids,
                stop_ids=self._stop_ids,
                vocabulary=self._vocabulary,
                device=self._runner.device,
            )
        sequence.row = len(self.running)
        self.running.append(sequence)
        self.table.assign(sequence)
        sequence.blocks = []

    def keep_prompt(self, sequence: ActiveSequence) -> None:
        """Let others share the full blocks of a prompt that has been run, and whose numbers are good."""
        if sequence.row >= 0 and sequence.kept_version == self.blocks.version:
            n = len(sequence.tokens) // BLOCK
            self.blocks.keep(self.table.blocks_of(sequence.row)[:n], sequence.tokens[: n * BLOCK])

    # --- blocks for the next tokens ---------------------------------------------------------------------------------

    def reserve(self, steps: int, settle: Callable[[], object] | None = None) -> tuple[int, np.ndarray, np.ndarray]:
        """Blocks for the next tokens of all that run: for how many tokens of each, and the rows and columns they got.

        Where there are too few for so many it is one; where there are too few for that the youngest is preempted,
        after ``settle`` has read all that the device was given.
        """
        missing_N = self.table.missing_blocks(len(self.running), steps)
        while (count := int(missing_N.sum())) > self.blocks.available:
            if steps > 1:
                steps = 1
            elif settle is not None:
                settle()
                settle = None
            else:
                self._preempt_youngest()
            missing_N = self.table.missing_blocks(len(self.running), steps)
        return steps, *self.table.add_blocks(missing_N, self.blocks.allocate(count))

    def trim(self) -> None:
        """Give back blocks that were reserved for tokens which did not come."""
        for row in self.table.rows_with_spare_blocks(len(self.running)).tolist():
            n = blocks_for(int(self.table.length[row]) + 1)
            self.blocks.release(self.table.blocks_of(row)[n:])
            self.table.blocks[row, n:] = 0
            self.table.n_blocks[row] = n

    def _preempt_youngest(self) -> None:
        """The request that was admitted last gives its blocks back, and is run again when there are enough."""
        running = max(self.running, key=lambda one: one.order)
        group = max(self.prefilling, key=lambda one: one.first.order, default=None)
        if group is not None and group.first.order > running.order:
            self.prefilling.remove(group)
            self._give_blocks(group.first)
            self._wait_again(group.members)
            return
        if len(self.running) == 1 and group is None:
            raise OutOfBlocksError("one sequence alone needs more blocks than there are")
        running.sampled = self.table.sampled(running.row)
        running.tokens = np.array([*running.prompt_ids, *running.sampled[0]], np.int32)
        self.preempted += 1
        self._leave([running])
        self._wait_again([running])

    def _wait_again(self, sequences: Sequence[ActiveSequence]) -> None:
        with self.wake:
            self.waiting.extendleft(reversed(sequences))

    def _give_blocks(self, sequence: ActiveSequence) -> list[int]:
        blocks, row = sequence.blocks, sequence.row
        if row >= 0:
            blocks = self.table.blocks_of(row)
            self.table.n_blocks[row] = 0  # they are given once, also if the step fails after this
        sequence.blocks, sequence.computed = [], 0
        return self.blocks.release(blocks)

    # --- the end of a sequence ------------------------------------------------------------------------------------

    def finish(self, ended: Sequence[Ended]) -> None:
        """Free the blocks of sequences that have ended; what they gave is handed out by `deliver`."""
        if not ended:
            return
        for sequence, reason, beyond in ended:
            self.table.take_back(sequence.row, beyond)
            outcome = self.table.output(sequence, reason, self._runner.version) if isinstance(reason, str) else reason
            self._finished.append((sequence, outcome))
        failed = {one.sequence.row for one in ended if not isinstance(one.reason, str)}
        self._leave([one.sequence for one in ended], failed)

    def drop_cancelled(self) -> None:
        """Free the blocks of requests under way that were cancelled, and forget those that wait."""
        if not self.has_cancelled:
            return
        self.has_cancelled = False
        dropped = [sequence for sequence in self.running if sequence.is_cancelled]
        if dropped:
            self._leave(dropped)
        for group in list(self.prefilling):
            gone = [one for one in group.members if one.is_cancelled]
            if len(gone) == len(group.members):
                self.prefilling.remove(group)
                self._give_blocks(group.first)
            elif group.first in gone:  # the others need what it has begun: it leaves when that is done
                self.has_cancelled = True
                gone.remove(group.first)
            group.copies = [one for one in group.copies if one not in gone]
            dropped += gone
        with self.wake:
            left = [sequence for sequence in self.waiting if sequence.is_cancelled]
            if left:
                self.waiting = deque(sequence for sequence in self.waiting if not sequence.is_cancelled)
        for sequence in left:
            if sequence.future.running() or sequence.future.set_running_or_notify_cancel():
                dropped.append(sequence)
        self._finished += [(sequence, CancelledError()) for sequence in dropped]

    def _leave(self, sequences: Sequence[ActiveSequence], failed: Collection[int] = ()) -> None:
        """Take sequences out of the running ones, which stay without gaps; their blocks join the prefix cache, but
        for those of the rows that failed."""
        for sequence in sequences:
            if sequence.row not in failed and sequence.kept_version == self.blocks.version:
                prompt_T = sequence.tokens[: len(sequence.prompt_ids)]
                ids_T = np.concatenate([prompt_T, self.table.reply(sequence.row)])
                self.blocks.keep(self.table.blocks_of(sequence.row), ids_T[: self.table.length[sequence.row]])
            emptied = self._give_blocks(sequence)
            if isinstance(self.cache, SequentialCache):
                self.cache.drop(sequence)
            elif sequence.row in failed:
                self.cache.clear(emptied)  # NaN times a weight of 0 is NaN
        self._close_gaps(sequences)

    def _close_gaps(self, sequences: Sequence[ActiveSequence]) -> None:
        """The last of the running sequences move to the rows of those that leave."""
        now = np.arange(self._rows + 1)  # the row that the sequence of each has now
        now[[self._rows, *(sequence.row for sequence in sequences)]] = -1  # one without a row stays without
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
            self.cuda.follow(now)
            self.cuda.free(holes, movers, n, last)

    def deliver(self) -> None:
        """Hand out what has ended, now that the model is again as its owner left it."""
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
        """Fail what is under way; those that wait too if asked to, or if nothing under way could be at fault."""
        with self.wake:
            under_way = [*self.running, *(one for group in self.prefilling for one in group.members)]
            sequences = list(dict.fromkeys(under_way))
            if waiting or not sequences:
                sequences += self.waiting
                self.waiting.clear()
            self.running.clear()
            self.prefilling.clear()
        self.deliver()
        self.blocks.forget()
        self._copies.clear()
        emptied = [block for sequence in sequences for block in self._give_blocks(sequence)]
        if isinstance(self.cache, KVCache):
            self.cache.clear(emptied)
        for sequence in sequences:
            if isinstance(self.cache, SequentialCache):
                self.cache.drop(sequence)
            sequence.row, future = -1, sequence.future
            # One that waits may be cancelled at any moment: from here on it cannot.
            if not future.done() and (future.running() or future.set_running_or_notify_cancel()):
                future.set_exception(error)
        if self.cuda is not None:
            self.cuda.reset()
