"""The batches of a training, sampled when the trainer needs them or ahead of it: asynchronously, group by group."""

from __future__ import annotations

import asyncio
import logging
import operator
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from functools import reduce
from typing import TYPE_CHECKING, Any

from verifiers.progress import Tally
from verifiers.runner import RunInterruptedError
from verifiers.trainers.advantages import flat_groups
from verifiers.trainers.batch import Batch
from verifiers.trainers.distributed.processes import all_gather
from verifiers.trainers.distributed.shards import readable
from verifiers.trainers.pipeline import Pipeline, loop_thread

if TYPE_CHECKING:
    from verifiers.trainers.grpo_trainer import GRPOTrainer

logger = logging.getLogger("verifiers.trainers")


class Generations(ExitStack):
    """Samples the batches of a trainer; with ``num_batches_ahead``, while the trainer updates the policy.

    When sampling ahead, a batch consists of the groups that finish first, within ``max_staleness``. Batches that the
    trainer can only generate whole are generated one after the other. With several processes, batches are sampled in a
    thread of their own, which Ctrl-C does not interrupt, so that all processes stop after the same step.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        super().__init__()
        self._trainer, self._whole, config = trainer, trainer._makes_whole_batches, trainer.config
        self._ahead, self._stride = config.num_batches_ahead, config.updates_per_generation
        most = max(1, config.max_concurrent // config.group_size) if config.max_concurrent > 0 else None
        self._groups: AbstractAsyncContextManager[Any] = nullcontext() if most is None else asyncio.Semaphore(most)
        self._thread = self._one_thread() if trainer.accelerator.num_processes > 1 and not self._ahead else None
        self._pipeline: Pipeline[Batch] | None = None

    def take(self, step: int) -> Batch:
        """The batch of this step; there is one every ``updates_per_generation`` steps."""
        if self._thread is not None:
            return self._thread.submit(self._trainer._generate_batch, step).result()
        if not self._ahead:
            return self._trainer._generate_batch(step)
        pipeline = self._pipeline = self._pipeline or self._start(step)
        try:
            parts = pipeline.take(step // self._stride, -(-self._trainer.total_steps // self._stride))
        except KeyboardInterrupt:
            raise RunInterruptedError("interrupted while waiting for rollouts that are sampled ahead") from None
        return parts[0] if self._whole else _joined(parts)

    def _one_thread(self) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(1, thread_name_prefix="verifiers-batches")
        self.callback(pool.shutdown, cancel_futures=True)
        return pool

    def _start(self, step: int) -> Pipeline[Batch]:
        limits = {"ahead": self._ahead, "max_delay": self._trainer.config.max_generations_late}
        if self._whole:
            thread = self._one_thread()

            def generate(number: int) -> Future[Batch]:
                return thread.submit(self._trainer._generate_batch, step + number * self._stride)

            return Pipeline(generate, size=1, **limits)
        loop = self.enter_context(loop_thread("verifiers-rollouts"))
        self._trainer._start_sampling(self._trainer.step, "ahead", 0, is_disjoint=False)

        def begin(_: int) -> Future[Batch]:
            # The row is taken on the trainer's thread, so that the order is fixed. A checkpoint counts it as untrained.
            return asyncio.run_coroutine_threadsafe(self._group(*self._trainer.rows.take_one()), loop)

        return Pipeline(begin, size=self._trainer.rows_per_generation, **limits)

    async def _group(self, position: int, row: Any) -> Batch:
        """Rollouts of one row; with ``dynamic_sampling``, of the next row as long as the rewards have no variance."""
        began, trainer = time.perf_counter(), self._trainer
        batch = await self._rollouts(row)
        positions = [position]
        for _ in range(trainer.config.max_resamples if trainer.config.dynamic_sampling else 0):
            if not flat_groups(batch["rewards"], batch["groups"]):
                break
            position, row = trainer.rows.take_one()
            positions.append(position)
            batch = batch.keep([]) + await self._rollouts(row)
        batch.row_positions = {0: positions}
        batch.seconds["generation"] = time.perf_counter() - began
        return batch

    async def _rollouts(self, row: Any) -> Batch:
        trainer = self._trainer
        async with self._groups:
            version = trainer.weight_version
            results = await trainer.env.generate_async(**trainer._generate_args([row], Tally()))
        batch = trainer._batch_of(results, [0] * trainer.config.group_size, version)
        return await asyncio.to_thread(trainer._rewarded, batch, trainer.epoch) if trainer._scores_itself else batch


def saved_parts(trainer: GRPOTrainer, parts: Iterable[Batch]) -> list[Any] | None:
    """The untrained batches of each process, for a checkpoint; None for a process whose batches cannot be saved."""
    parts = list(parts)
    # A text that was sampled is looked up in memory; saved rollouts can be tokenized again.
    is_known = trainer.offline is not None or all(state is not None for part in parts for state in part.states)
    return all_gather(trainer.accelerator, [part.saved() for part in parts] if is_known else None) if parts else None


def restored_parts(trainer: GRPOTrainer, saved: Sequence[Any]) -> list[Batch]:
    """The untrained batches that this process saved; none, with a warning, if the checkpoint does not hold them."""
    processes = trainer.accelerator
    if not saved or trainer.report is None:
        return []
    if len(saved) != processes.num_processes or None in saved:
        logger.warning(
            "the checkpoint was written in the middle of a generation (steps_per_generation) and does not hold the "
            "rest of it for %d processes: its rows are sampled again, so that losses differ from an uninterrupted run",
            processes.num_processes,
        )
        return []
    with readable(trainer.report.from_checkpoint):
        return [Batch.of_saved(one) for one in saved[processes.process_index]]


def _joined(parts: list[Batch]) -> Batch:
    """Groups as one batch, numbered in the order in which they started."""
    for number, part in enumerate(parts):
        part["groups"] = [number] * len(part["groups"])
        part.row_positions = {number: part.rows_taken}
    batch = reduce(operator.add, parts)
    batch.seconds["generation"] = max(part.seconds["generation"] for part in parts)
    return batch
