"""The batches of a training, one after the other: sampled when they are asked for, or ahead, group by group."""

from __future__ import annotations

import asyncio
import operator
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from functools import reduce
from typing import TYPE_CHECKING, Any

from verifiers.progress import Tally
from verifiers.runner import RunInterruptedError
from verifiers.trainers.advantages import flat_groups
from verifiers.trainers.batch import Batch
from verifiers.trainers.distributed.processes import all_gather
from verifiers.trainers.pipeline import Pipeline, loop_thread
from verifiers.trainers.row_stream import RowStream

if TYPE_CHECKING:
    from verifiers.trainers.grpo_trainer import GRPOTrainer


class Generations(ExitStack):
    """With ``num_batches_ahead`` rollouts go on while the trainer learns, across its updates.

    Their parts are groups, which are learned from as they finish, within ``max_staleness``. A batch that the trainer
    makes in a way of its own (``whole``) is made whole, one after the other. Where there are several processes, no
    batch is made by the thread that takes it: Ctrl-C does not interrupt one, and all stop after the same step.
    """

    def __init__(self, trainer: GRPOTrainer, *, whole: bool) -> None:
        super().__init__()
        config = trainer.config
        self._trainer, self._ahead, self._stride = trainer, config.num_batches_ahead, config.updates_per_generation
        self._whole, self._patience = whole, config.generations_late
        most = max(1, config.max_concurrent // config.group_size) if config.max_concurrent > 0 else None
        self._room: AbstractAsyncContextManager[Any] = nullcontext() if most is None else asyncio.Semaphore(most)
        self._maker = self._pool() if trainer.accelerator.num_processes > 1 and not self._ahead else None
        self._pipeline: Pipeline[Batch] | None = None

    def take(self, step: int) -> Batch:
        """The batch of this step; there is one every ``updates_per_generation`` steps."""
        if self._maker is not None:
            return self._maker.submit(self._trainer._generate_batch, step).result()
        if not self._ahead:
            return self._trainer._generate_batch(step)
        pipeline = self._pipeline = self._pipeline or self._start(step)
        first, end = step // self._stride, -(-self._trainer.total_steps // self._stride)
        try:
            parts = pipeline.take(first, end)
        except KeyboardInterrupt:
            raise RunInterruptedError("stopped among rollouts that were sampled ahead") from None
        return parts[0] if self._whole else _joined(parts)

    def _pool(self) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(1, thread_name_prefix="verifiers-batches")
        self.callback(pool.shutdown, cancel_futures=True)
        return pool

    def _start(self, step: int) -> Pipeline[Batch]:
        limits = {"ahead": self._ahead, "patience": self._patience}
        if self._whole:
            pool = self._pool()

            def make(number: int) -> Future[Batch]:
                return pool.submit(self._trainer._generate_batch, step + number * self._stride)

            return Pipeline(make, size=1, **limits)
        loop = self.enter_context(loop_thread("verifiers-rollouts"))
        self._trainer._start_sampling("ahead", 0, is_apart=False)

        def begin(_: int) -> Future[Batch]:
            # The row is taken here, on the trainer's thread: in order, and counted in a checkpoint as not learned from.
            return asyncio.run_coroutine_threadsafe(self._group(*self._trainer.rows.take_one()), loop)

        return Pipeline(begin, size=self._trainer.rows_per_generation, **limits)

    async def _group(self, place: int, row: Any) -> Batch:
        """Rollouts of one row; with ``dynamic_sampling``, of further ones while they all score the same."""
        began, trainer = time.perf_counter(), self._trainer
        batch = await self._rollouts(row)
        places = [place]
        for _ in range(trainer.config.max_resamples if trainer.config.dynamic_sampling else 0):
            if not flat_groups(batch["rewards"], batch["groups"]):
                break
            place, row = trainer.rows.take_one()
            places.append(place)
            batch = batch.keep([]) + await self._rollouts(row)
        batch.places = {0: places}
        batch.seconds["generation"] = time.perf_counter() - began
        return batch

    async def _rollouts(self, row: Any) -> Batch:
        trainer = self._trainer
        async with self._room:
            version = trainer.weight_version
            results = await trainer.env.generate_async(**trainer._rollouts_of([row], Tally()))
        batch = trainer._batch_of(results, [0] * trainer.config.group_size, version)
        return await asyncio.to_thread(trainer._rewarded, batch) if trainer._scores_itself else batch


def _joined(parts: list[Batch]) -> Batch:
    """Groups as one batch, numbered in the order they were begun in."""
    for number, part in enumerate(parts):
        part["groups"] = [number] * len(part["groups"])
        part.places = {number: part.rows_taken}
    batch = reduce(operator.add, parts)
    batch.seconds["generation"] = max(part.seconds["generation"] for part in parts)
    return batch


def rows_learned(rows: RowStream, batch: Batch, processes: Any) -> tuple[int, list[int]]:
    """How many rows every process has learned from without a gap, and the places of those it has beyond that."""
    in_order = batch.places is None
    rows.note_learned(range(rows.low, batch.cursor) if in_order else batch.rows_taken)
    return rows_so_far(rows, processes)


def rows_so_far(rows: RowStream, processes: Any) -> tuple[int, list[int]]:
    """The position of a training in its rows, for a checkpoint: any number of processes goes on after just these."""
    cursor = min(all_gather(processes, rows.low))
    return cursor, sorted(place for part in all_gather(processes, rows.learned(cursor)) for place in part)
