"""What GRPO and SFT have in common: counting steps and rows, evaluating and saving when due, and the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.kernels.prove import max_positions
from verifiers.trainers import setup
from verifiers.trainers.base_config import TrainingConfig
from verifiers.trainers.checkpoints import save_model
from verifiers.trainers.distributed import processes
from verifiers.trainers.distributed.sharding import ShardedWeights, Whole, check_sharding, make_weights
from verifiers.trainers.functions import call_callbacks
from verifiers.trainers.memory.job import Job, shortest
from verifiers.trainers.memory.plan import MemoryPlan
from verifiers.trainers.row_stream import RowStream
from verifiers.trainers.threads import sensible_threads
from verifiers.trainers.watch.report import Report
from verifiers.trainers.watch.tracking import check_report_to
from verifiers.trainers.weights import Weights

if TYPE_CHECKING:
    from verifiers.trainers.reference import Reference


class Trainer:
    """A loop over rows; a subclass defines how many rows a step takes and how an update uses them."""

    config: TrainingConfig
    env: Any
    model: Any
    tokenizer: Any
    accelerator: Any
    weights: Weights
    memory: MemoryPlan
    rows: RowStream
    step = epoch = cursor = 0
    should_stop = False
    learned: Sequence[int] = ()  # positions after the cursor whose rows were already trained on
    report: Report | None = None

    def _check_config(self) -> None:
        """Refuse settings that do not work with the number of processes, before anything is loaded."""
        self.accelerator, self._sharding = processes.accelerator(), processes.sharding()
        self.config.check(self.accelerator.num_processes)
        check_sharding(self.config, self.accelerator, self._sharding)
        check_report_to(self.config.report_to)

    def _check_evaluation(self) -> None:
        if not self.can_evaluate and self.config.strategy("eval") != "no":
            raise ValueError(
                f"eval_strategy={self.config.strategy('eval')!r} is set, but there is nothing to evaluate on: pass "
                "eval_dataset= (with saved rollouts: env=), or leave out eval_strategy and eval_steps"
            )

    def _load(self, model: Any, tokenizer: Any, **settings: Any) -> None:
        """Load the model and its tokenizer, and plan the memory of training it."""
        job = Job(
            config=self.config,
            device=self.accelerator.device,
            processes=self.accelerator.num_processes,
            sharding=processes.sharded_states(self.accelerator, self._sharding),
            **settings,
        )
        self.model, self.tokenizer, self.memory = setup.model_and_tokenizer(model, tokenizer, job)

    def _make_weights(self, whole: Whole) -> None:
        self.weights = make_weights(self.model, self.config, self.accelerator, self._sharding, whole=whole)
        self.optimizer = self.weights.optimizer

    @property
    def unwrapped_model(self) -> Any:
        """The model itself, even if a subclass had Accelerate wrap it (``accelerator.prepare``)."""
        return self.accelerator.unwrap_model(self.model)

    def _make_stream(self, rows: Any) -> None:
        shard = (self.accelerator.process_index, self.accelerator.num_processes)
        self.rows = RowStream(rows, seed=self.config.seed, shard=shard)

    def _longest(self, limit: int | None) -> int | None:
        """The largest number of tokens of a sequence: within the limit and the positions that the model supports."""
        return shortest(limit, max_positions(self.unwrapped_model.config))

    @property
    def rows_per_step(self) -> int:
        """Rows that one step of this process takes."""
        raise NotImplementedError(f"{type(self).__name__} does not define rows_per_step")

    @property
    def reference(self) -> Reference | None:
        """The reference model of the KL term if it is a copy, else None."""
        return None

    @property
    def can_evaluate(self) -> bool:
        raise NotImplementedError(f"{type(self).__name__} does not define can_evaluate")

    def evaluate(self) -> Any:
        """Evaluate the current weights."""
        raise NotImplementedError(f"{type(self).__name__} has no evaluate()")

    @property
    def num_steps_per_epoch(self) -> int:
        taken: int = self.rows_per_step * self.accelerator.num_processes
        return max(1, math.ceil(len(self.rows) / taken))

    @property
    def total_steps(self) -> int:
        if self.config.max_steps is not None:
            return int(self.config.max_steps)
        return max(1, round(self.config.num_epochs * self.num_steps_per_epoch))

    def save_model(self, path: str | Path) -> None:
        """Write the model (with LoRA: its adapter) and its tokenizer as a folder of safetensors."""
        if isinstance(self.weights, ShardedWeights):
            self.weights.publish_now()
        if self.accelerator.is_main_process:
            save_model(self.unwrapped_model, self.tokenizer, path)
        self.accelerator.wait_for_everyone()

    def unlearned(self) -> list[Any] | None:
        """Batches of each process that were made but not trained on yet, as plain data."""
        return None

    def _resume_from(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        self.step, self.cursor, self.learned = state["step"], state["cursor"], list(state.get("learned", ()))
        self.rows.resume(self.cursor, self.learned)

    def _note_learned(self, positions: Iterable[int]) -> None:
        """Count rows of this process as trained on; the gathered state lets any number of processes resume."""
        self.rows.note_learned(positions)
        self.cursor = min(processes.all_gather(self.accelerator, self.rows.first_unlearned))
        parts = processes.all_gather(self.accelerator, self.rows.learned(self.cursor))
        self.learned = sorted(position for part in parts for position in part)

    @contextmanager
    def _training(self, resume: bool | str | Path) -> Iterator[Report]:
        """The report of a run, open during the block, and finished if the block ends without an error."""
        with Report(self, resume) as report, sensible_threads(self.unwrapped_model):
            self.report, self.should_stop = report, False
            if resume:
                self._resume_from(report.resume(self))
            call_callbacks(self, "on_train_begin")
            yield report
            self.weights.finish()
            call_callbacks(self, "on_train_end")
            report.finish()

    def _after_step(self, report: Report) -> None:
        """Evaluate and save if that is due, then call the callbacks."""
        is_epoch_end = self.step % self.num_steps_per_epoch == 0 or self.step == self.total_steps
        if self.can_evaluate and self._is_due("eval", is_epoch_end):
            report.display.enter("evaluating")
            figures = self.evaluate()
            report.evaluated(self.step, figures)
            call_callbacks(self, "on_evaluate", figures)
        if self._is_due("save", is_epoch_end):
            report.display.enter("saving a checkpoint")
            report.checkpoint(self)
        call_callbacks(self, "on_step_end", report.last)

    def _is_due(self, what: str, is_epoch_end: bool) -> bool:
        """Whether to evaluate or save after this step."""
        strategy = self.config.strategy(what)
        if strategy == "epoch":
            return is_epoch_end
        return strategy == "steps" and self.step % getattr(self.config, f"{what}_steps") == 0
