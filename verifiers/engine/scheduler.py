"""Requests → slots: who waits, who is admitted, whose prefix is reused, and who has finished.

Running sequences have the first slots, without gaps, so that a step reads one block of the cache. The slots behind them
keep the keys and values of finished sequences, as a prefix cache, until somebody needs the slot.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import numpy as np

from verifiers.engine.kv_cache import SlotCache
from verifiers.engine.logits import LogitsProcessor
from verifiers.engine.model_runner import ModelRunner
from verifiers.engine.sequence import ActiveSequence, Generated, delivery, in_order
from verifiers.engine.sequential import SequentialCache
from verifiers.engine.slot_table import SlotTable

if TYPE_CHECKING:
    from verifiers.engine.cuda_runner import CudaDecoder

Group = tuple[ActiveSequence, list[ActiveSequence]]
"""A sequence whose prompt is run, and those with the same prompt, which get a copy of its keys and values."""


class Scheduler:
    """The queues of an engine, and its slots. ``wake`` guards ``waiting``, which any thread may add to."""

    cache: SlotCache | SequentialCache
    cuda: CudaDecoder | None = None  # has a copy of the table on the device

    def __init__(
        self,
        runner: ModelRunner,
        *,
        slots: int,
        length: int,
        prefill_tokens: int,
        vocabulary: int,
        stop_ids: frozenset[int],
    ) -> None:
        self._runner, self._slots, self._length = runner, slots, length
        self._prefill_tokens = prefill_tokens
        self._vocabulary, self._stop_ids = vocabulary, stop_ids
        self.table = SlotTable(slots, length)
        self.waiting: deque[ActiveSequence] = deque()
        self.running: list[ActiveSequence] = []
        self.prefilling: list[ActiveSequence] = []
        self.wake = threading.Condition()
        self.has_cancelled = False
        self._finished: list[tuple[ActiveSequence, Generated | BaseException]] = []

    def sort_waiting(self) -> None:
        """Put those that wait in an order that does not depend on who came first."""
        self.waiting = deque(in_order(self.waiting))

    def note_cancel(self) -> None:
        """A request was cancelled, on whichever thread."""
        self.has_cancelled = True

    # --- admission ------------------------------------------------------------------------------------------------

    def admit(self) -> list[Group]:
        """Waiting requests that fit now, as many as have a slot and as the tokens of a prefill allow."""
        groups: dict[tuple[int | None, ...], Group] = {}
        room, budget = self._slots - len(self.running), self._prefill_tokens
        while self.waiting and room > 0:
            sequence = self.waiting[0]
            key = (sequence.sampling.prompt_logprobs, *sequence.prompt_ids)
            same = groups.get(key)
            if same is None and groups and budget < len(sequence.prompt_ids):
                break
            self.waiting.popleft()
            if not sequence.future.set_running_or_notify_cancel():
                continue
            if sequence.is_cancelled:  # after it was marked as running: it is told so as one that ran
                self._finished.append((sequence, CancelledError()))
                continue
            room -= 1
            if same is not None:
                same[1].append(sequence)
            else:
                groups[key] = (sequence, [])
                budget -= len(sequence.prompt_ids)
        return list(groups.values())

    def assign(self, sequence: ActiveSequence) -> None:
        """Give a sequence the next slot, holding as much of its prompt as any slot of the prefix cache has."""
        slot = len(self.running)
        cached, shared = self.table.longest_prefix(sequence.prompt_ids, slot)
        if shared:
            self.cache.swap(cached, slot, shared, int(self.table.cached_length(slot)))
            self.table.swap_cached(cached, slot)
        else:
            self._evict(slot)
        sequence.slot, sequence.reused = slot, shared
        self._start(sequence)

    def assign_copies(self, sequence: ActiveSequence, copies: Sequence[ActiveSequence]) -> None:
        """Give slots to sequences with the prompt of another, and copy its keys and values to them."""
        if not copies:
            return
        first = len(self.running)
        for i, copy in enumerate(copies):
            self._evict(first + i)
            copy.slot, copy.reused = first + i, len(sequence.prompt_ids)
            copy.future.prompt_logprobs = sequence.future.prompt_logprobs
            self._start(copy)
        self.cache.spread(sequence.slot, range(first, len(self.running)), len(sequence.prompt_ids))

    def _start(self, sequence: ActiveSequence) -> None:
        sequence.weights = self._runner.version
        sequence.note_version(self._runner.weight_version, 0)
        if sequence.sampling.changes_logits:
            sequence.processor = LogitsProcessor(
                sequence.sampling,
                sequence.prompt_ids,
                stop_ids=self._stop_ids,
                vocabulary=self._vocabulary,
                device=self._runner.device,
            )
        self.running.append(sequence)
        self.table.assign(sequence)

    def _evict(self, slot: int) -> None:
        """Before a slot is used, what it keeps is moved to the slot that is least worth keeping."""
        if not self.table.cached[slot]:
            return
        oldest = self.table.oldest(slot)
        if oldest != slot:
            self.cache.move(slot, oldest, self.table.cached_length(slot))
            self.table.swap_cached(oldest, slot)

    # --- the end of a sequence ------------------------------------------------------------------------------------

    def finish(self, ended: Sequence[tuple[ActiveSequence, str | Exception]]) -> None:
        """Free the slots of sequences that have ended; what they gave is handed out by `deliver`."""
        if not ended:
            return
        for sequence, reason in ended:
            if isinstance(reason, Exception):
                self._finished.append((sequence, reason))
            else:
                self._finished.append((sequence, self.table.output(sequence, reason, self._runner.version)))
        failed = [sequence for sequence, reason in ended if isinstance(reason, Exception)]
        self._free([sequence for sequence, _ in ended], failed=failed)

    def drop_cancelled(self) -> None:
        """Free the slots of running requests that were cancelled, and forget those that wait."""
        if not self.has_cancelled:
            return
        self.has_cancelled = False
        dropped = [sequence for sequence in self.running if sequence.is_cancelled]
        if dropped:
            self._free(dropped)
        self._finished += [(sequence, CancelledError()) for sequence in dropped]
        with self.wake:
            gone = [sequence for sequence in self.waiting if sequence.future.cancelled()]
            if gone:
                self.waiting = deque(sequence for sequence in self.waiting if not sequence.future.cancelled())
        for sequence in gone:
            sequence.future.set_running_or_notify_cancel()

    def _free(self, sequences: Sequence[ActiveSequence], *, failed: Sequence[ActiveSequence] = ()) -> None:
        """Take sequences out of the running ones, which stay without gaps; their slots join the prefix cache."""
        for sequence in sequences:
            is_good = sequence not in failed and sequence.weights == self._runner.version
            is_long = self.table.length[sequence.slot] >= self.table.least_shared
            self.table.keep_prefix(sequence, keep=is_good and is_long)
        self.cache.clear([sequence.slot for sequence in failed])  # NaN times a weight of 0 is NaN
        gone = {sequence.slot for sequence in sequences}
        n = len(self.running) - len(gone)
        holes = sorted(slot for slot in gone if slot < n)
        movers = [slot for slot in range(n, len(self.running)) if slot not in gone]
        self._close_gaps(holes, movers)
        del self.running[n:]
        for sequence in sequences:
            sequence.slot = -1
        if self.cuda is not None:
            self.cuda.free(holes, movers, n, n + len(gone))
        if isinstance(self.cache, SequentialCache):
            self.cache.keep_first(n)

    def _close_gaps(self, holes: Sequence[int], movers: Sequence[int]) -> None:
        """Move the last running sequences into the slots that became free."""
        if not holes:
            return
        ahead = 0 if self.cuda is None else self.cuda.in_flight + 1  # positions that the device has filled meanwhile
        for hole, mover in zip(holes, movers, strict=True):
            filled = min(int(self.table.length[mover]) + ahead, self._length)
            if self.table.cached[hole]:
                self.cache.swap(hole, mover, int(self.table.cached[hole]), filled)
            else:
                self.cache.move(mover, hole, filled)
        self.table.exchange(np.array([holes, movers]))
        for hole, mover in zip(holes, movers, strict=True):
            self.running[hole] = self.running[mover]
            self.running[hole].slot = hole

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
        """Fail what is running; those that wait too if asked to, or if nothing that runs could be at fault."""
        with self.wake:
            sequences = list(dict.fromkeys([*self.running, *self.prefilling]))
            if waiting or not sequences:
                sequences += self.waiting
                self.waiting.clear()
            n = len(self.running)
            self.running.clear()
            self.prefilling.clear()
        self.deliver()
        for sequence in sequences:
            future = sequence.future
            # One that waits may be cancelled at any moment: from here on it cannot.
            if not future.done() and (future.running() or future.set_running_or_notify_cancel()):
                future.set_exception(error)
        self.table.forget(0)
        self.cache.clear(range(n))
        if self.cuda is not None:
            self.cuda.reset()
