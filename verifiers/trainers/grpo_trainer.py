"""The GRPO training loop: sample groups of rollouts from an environment, score them, update the model, repeat."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from verifiers import calls
from verifiers.chat import ChatWriter
from verifiers.envs.evaluation import score_states
from verifiers.envs.remote.workers import Workers, as_workers, check_installed
from verifiers.progress import Tally
from verifiers.results import Results
from verifiers.runner import RunInterruptedError, long_lived
from verifiers.trainers import sampler, sampling, setup
from verifiers.trainers.advantages import Estimator, flat_groups
from verifiers.trainers.batch import Batch, Reply, as_batch, refusals, with_advantages
from verifiers.trainers.config import GRPOConfig
from verifiers.trainers.distributed import processes
from verifiers.trainers.distributed.remote_weights import remote_weights
from verifiers.trainers.distributed.sharding import Whole
from verifiers.trainers.functions import Function, RowSampler, WeightSchedule, call_fitting, is_overridden, own_function
from verifiers.trainers.generations import Generations, restored_parts, saved_parts
from verifiers.trainers.learning.micro_batches import TrainSample
from verifiers.trainers.learning.sequences import trained_sequences
from verifiers.trainers.losses import Loss
from verifiers.trainers.offline import read_offline
from verifiers.trainers.reference import Reference
from verifiers.trainers.reward_weights import check_weights, reward_weights, scheduled_weights
from verifiers.trainers.staleness import note_versions, staleness_figures
from verifiers.trainers.stopping import nothing_scored
from verifiers.trainers.trainer import Trainer
from verifiers.trainers.update import PolicyUpdate
from verifiers.trainers.watch.report import Report
from verifiers.trainers.weights import learning_rate
from verifiers.types import Row


class GRPOTrainer(Trainer):
    """Trains a model on an environment, in this process, by comparing rollouts of the same prompt with each other.

    ``model`` is a name, a folder or a module. With ``client``, rollouts are sampled from a model served elsewhere.
    ``row_sampler(all rows, epochs so far)`` returns the rows to sample from, and ``weight_schedule(epochs so far)`` the
    weights of the reward functions. ``advantage`` and ``loss`` are names as in the configuration, or functions (see
    `trainers.advantages` and `trainers.losses`). The public methods may be overridden.
    """

    config: GRPOConfig
    _update: PolicyUpdate | None = None
    _workers: Workers | None = None  # environment workers, connected for the whole training
    _batch_step, _batch_at = 0, (0, 0)  # step, and (epoch, step within it), of the batch that is being generated

    def __init__(
        self,
        model: Any = None,
        env: Any = None,
        config: Any = None,
        *,
        args: Any = None,
        tokenizer: Any = None,
        processing_class: Any = None,
        dataset: Any = None,
        eval_dataset: Any = None,
        peft_config: Any = None,
        client: Any = None,
        weight_server: Any = None,
        callbacks: Sequence[Any] = (),
        row_sampler: RowSampler | None = None,
        weight_schedule: WeightSchedule | None = None,
        advantage: str | Function | None = None,
        loss: str | Function | None = None,
    ) -> None:
        self.config = GRPOConfig.of(setup.one_of("config", config, "args", args))
        tokenizer = setup.one_of("tokenizer", tokenizer, "processing_class", processing_class)
        self._own_loss = own_function(self.config, "loss", "loss_type", loss)
        self._own_advantage = own_function(self.config, "advantage", "advantage", advantage)
        self._check_config()
        self.env, self.offline = env, None if dataset is None else read_offline(dataset)
        if self.offline is None:
            setup.check_env(env)
        check_weights(env, self._estimator)
        self._check_evaluation()
        self.config.warn_unused(has_own_loss=self._own_loss is not None, is_offline=self.offline is not None)
        whole: Whole = "sampled" if client is None or self.config.kl_coef else "sent"
        how = {"adapters": peft_config, "samples": client is None, "is_read": whole == "sampled"}
        self._load(model, tokenizer, env=env, **how)
        setup.check_template(self.tokenizer, env)
        setup.check_reference(self.model, self.config)
        sampling.check(self.sampling, "this environment with this configuration")
        self._make_weights(whole)
        self._remote = remote_weights(client, weight_server, self.model, self.tokenizer)
        if client is None:
            client = sampler.make_sampler(self.model, self.tokenizer, self.config, env, self.memory)
        self.client = client
        self.callbacks, self.row_sampler, self.weight_schedule = list(callbacks), row_sampler, weight_schedule
        self._prepare_loop(dataset, eval_dataset)

    def _prepare_loop(self, dataset: Any, eval_dataset: Any) -> None:
        """Set what the loop keeps between steps: the rows and their order, and the state of a generation."""
        if self.offline is not None:
            rows, self.dropped_prompts = self.offline.groups, 0
        else:
            rows, self.dropped_prompts = setup.training_rows(self.env, dataset, self.tokenizer, self.config)
        self._make_stream(rows)
        self.eval_rows = setup.eval_rows(self.env, eval_dataset)
        self.evaluates_training_rows = dataset is None and eval_dataset is None and self.env.eval_dataset is None
        self._parts: deque[Batch] = deque()  # the batches of the last generation that are not trained on yet
        self._started: Counter[int] = Counter()  # rounds of rollouts of this generation, by the number of rows taken
        # Tokenizes saved rollouts whose token ids were not saved. Rollouts of this policy are never retokenized.
        self._writer = None if self.offline is None else ChatWriter(self.tokenizer)

    def _check_config(self) -> None:
        super()._check_config()
        check_installed(self.config.workers)
        if self._own_advantage is not None and (self.config.advantage or self.config.scale_rewards is not None):
            raise TypeError("advantage= is a function, but the configuration also names an estimator; pass only one")
        self._estimator = Estimator(self._own_advantage or self.config.estimator)
        Loss(self.config.objective, self._own_loss)  # both check the signature of a user's function

    # --- the loop -------------------------------------------------------------------------------------------------

    def train(self, resume: bool | str | Path = False) -> Report:
        """Train for ``max_steps`` steps, or for ``num_epochs`` passes through the rows; returns the report."""
        with self._training(resume) as report, Generations(self) as generations:
            while self.step < self.total_steps and not self.should_stop:
                self.epoch, step_in_epoch = divmod(self.step, self.num_steps_per_epoch)
                if step_in_epoch == 0:
                    self.on_epoch_begin(self.epoch)
                began = time.perf_counter()
                batch = self._next_batch(generations, report)
                sampled = time.perf_counter()
                if (error := nothing_scored(batch, self.accelerator)) is not None:
                    report.keep_rollouts(self.step + 1, batch)
                    raise error
                report.display.enter(f"learning from {len(batch['rewards'])} rollouts")
                figures = self.train_step(batch) or {}
                if self.config.num_batches_ahead or self._remote is not None:
                    figures |= staleness_figures(batch, self.step)
                self.step += 1
                report.step(self, batch, figures, waited_s=sampled - began, trained_s=time.perf_counter() - sampled)
                in_order = range(self.rows.first_unlearned, batch.cursor)
                self._note_learned(in_order if batch.row_positions is None else batch.rows_taken)
                if self._remote is not None:
                    self._remote.send(self.accelerator, self.step)
                self._after_step(report)
                self.should_stop = any(processes.all_gather(self.accelerator, self.should_stop))
        return report

    def get_batch(self, epoch: int | None = None, step: int | None = None) -> Any:
        """Sample the batch of a step: rollouts of the next rows, or of rows from ``row_sampler``."""
        if self.row_sampler is None:
            return self.sample_batch(self.rows.take(self.rows_per_generation))
        now, within_epoch = self._batch_at
        epochs = (now if epoch is None else epoch) + (within_epoch if step is None else step) / self.num_steps_per_epoch
        return self.sample_batch(self.row_sampler(self.rows.all, epochs))

    def sample_batch(self, rows: Sequence[Any]) -> Batch:
        """Roll out and score ``rows_per_generation`` of these rows, ``group_size`` times each.

        With ``dynamic_sampling``, a group whose rewards have no variance is replaced by a group of another row.
        """
        if self.offline is not None:
            return self.offline.batch(rows)
        pool, is_of_stream = list(rows), rows is self.rows.last
        batch = self._rollouts(self.rows.choose(pool, self.rows_per_generation))
        for _ in range(self.config.max_resamples if self.config.dynamic_sampling else 0):
            flat = flat_groups(batch["rewards"], batch["groups"])
            if not flat:
                break
            good = batch.keep([i for i, group in enumerate(batch["groups"]) if group not in flat])
            n = len(flat)  # rows of the stream are replaced by its next rows, picked rows by others of the same pool
            spare = self.rows.take(n) if is_of_stream else self.rows.choose(pool, n, again=True)
            batch = good + self._rollouts(spare, first_group=max(batch["groups"]) + 1)
        batch.cursor = self.rows.cursor
        return batch

    def compute_rewards(
        self, completions: Sequence[Reply], prompts: Sequence[Any], epoch: int | None = None
    ) -> list[float]:
        """Score completions (their state is attached) with the environment's rubric; NaN where scoring failed.

        An override, with or without the parameter ``epoch``, is called for every batch. It returns one reward for each
        completion: None or NaN if the completion could not be scored.
        """
        states = [completion.state for completion in completions if completion.state is not None]
        if len(states) < len(completions):
            raise TypeError("compute_rewards needs the rollout state of each completion: pass a batch's completions")
        calls.run(lambda: score_states(self.env, states))
        return [math.nan if state.get("error") is not None else float(state["reward"]) for state in states]

    def train_step(self, batch: Any) -> dict[str, Any]:
        """One update from a batch; returns its figures (loss, kl, clip_fraction, grad_norm, …)."""
        rate = learning_rate(self.config, self.step, self.total_steps)
        with long_lived:  # no garbage collection: this allocates thousands of objects, none of them garbage
            batch = self._with_advantages(as_batch(batch))
            trained = self.sequences(batch)
        refused = refusals(batch, trained, self.accelerator)
        if isinstance(self.client, sampler.Sampler) and self.memory.releases_cache:
            self.client.engine.release_cache()
        figures = self.update.run(trained, rate)
        batch.ratios = self.update.ratios_of(self.config.log_rollouts)
        if self.config.sync_ref_model and (self.step + 1) % self.config.ref_model_sync_steps == 0:
            self.update.reference.follow(self.config.ref_model_mixup_alpha)  # type: ignore[union-attr]
        return {**figures, **refused, "learning_rate": rate}

    def on_epoch_begin(self, epoch: int) -> None:
        """Called before the first step of each epoch, counted from 0."""

    def evaluate(self) -> Results:
        """Roll out and score the evaluation rows with the current weights."""
        if self.env is None:
            raise ValueError("this trainer has no environment to evaluate on; pass env=")
        asked = sampling.overridden(self.sampling, self.config.eval_sampling_args)
        inputs = self.eval_rows if self.config.eval_examples < 0 else self.eval_rows[: self.config.eval_examples]
        each = self.config.eval_rollouts_per_example
        self._start_sampling(self.step, "eval", len(inputs) * each, is_disjoint=True)
        how = {"rollouts_per_example": each, "sampling_args": asked, "use_tqdm": False, "score": True}
        with sampler.nothing_remembered():
            results: Results = self.env.generate_sync(**self._generate_args(inputs, Tally()) | how)
        return results

    def generate(self, prompts: Sequence[Any]) -> list[Reply]:
        """One reply to each prompt (text or messages), sampled as in training."""
        is_chat = getattr(self.env, "message_type", "chat") == "chat"
        replies = sampler.ask(self.client, prompts, self.sampling, is_chat=is_chat)
        return [Reply(one.text, messages=[one.message] if is_chat else one.text) for one in replies]

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling arguments of rollouts: the configuration's, then the environment's, then the defaults."""
        return sampler.sampling_args(self.config, self.env)

    # --- sizes ----------------------------------------------------------------------------------------------------

    @property
    def rows_per_step(self) -> int:
        """Rows (groups of rollouts) of one step, in this process."""
        return max(1, self.config.rollouts_per_step // self.config.group_size)

    @property
    def rows_per_generation(self) -> int:
        """Rows that this process rolls out for one generation (see ``steps_per_generation``)."""
        return self.rows_per_step * self.config.updates_per_generation

    @property
    def can_evaluate(self) -> bool:
        return self.env is not None

    @property
    def eval_dataloader(self) -> Iterator[dict[str, list[Any]]]:
        """The evaluation rows in batches: ``{"prompts": […], "answers": […], …}``."""
        return setup.column_batches(self.eval_rows, self.config.batch_size)

    # --- rollouts -------------------------------------------------------------------------------------------------

    @property
    def _makes_whole_batches(self) -> bool:
        """Whether a batch can only be generated whole, not group by group."""
        is_overriding = any(is_overridden(self, GRPOTrainer, hook) for hook in ("get_batch", "sample_batch"))
        return is_overriding or bool(self.row_sampler or self.weight_schedule or self.offline)

    def _next_batch(self, generations: Generations, report: Report) -> Batch:
        """The batch of this step: a whole generation, or the next part of one that several updates share."""
        if not self._parts:
            count = self.rows_per_generation * self.config.group_size
            report.display.enter(f"sampling and scoring {count} rollouts")
            batch, n = generations.take(self.step), self.config.updates_per_generation
            self._parts.extend([batch] if n == 1 else self._with_advantages(batch).split(n, self.cursor))
        return self._parts.popleft()

    def _with_advantages(self, batch: Batch) -> Batch:
        batch.reward_weights = batch.reward_weights or reward_weights(self.env)
        return with_advantages(batch, self._estimator, gather=partial(processes.gather_lists, self.accelerator))

    def _generate_batch(self, step: int) -> Batch:
        """Sample and score the batch of a step in one go, by `get_batch`."""
        self._batch_step, self._batch_at = step, divmod(step, self.num_steps_per_epoch)
        self._started.clear()
        began = time.perf_counter()
        with scheduled_weights(self.env, self.weight_schedule, step / self.num_steps_per_epoch):
            batch = as_batch(call_fitting(self.get_batch, *self._batch_at))
            batch.reward_weights = reward_weights(self.env)
        batch.cursor = batch.cursor or self.rows.cursor
        batch.seconds["generation"] = time.perf_counter() - began
        return batch

    def _rollouts(self, rows: Sequence[Row], first_group: int = 0) -> Batch:
        """Groups of rollouts of these rows, scored by the rubric as they finish or by a custom `compute_rewards`."""
        size, taken = self.config.group_size, self.rows.taken
        self._started[taken] += 1  # rows that are not of the stream may be sampled several times for one batch
        what = taken if (times := self._started[taken]) == 1 else (taken, times)
        self._start_sampling(self._batch_step, what, len(rows) * size, is_disjoint=self.rows.is_disjoint)
        self.rows.is_disjoint = False
        tally, version = Tally() if self.report is None else self.report.display.counted(), self.weight_version
        results: Results = self.env.generate_sync(**self._generate_args(rows, tally))
        groups = [first_group + i for i in range(len(rows)) for _ in range(size)]
        return self._rewarded(self._batch_of(results, groups, version), self._batch_at[0])

    @property
    def weight_version(self) -> int:
        """The version of the weights that rollouts are sampled from: their number of updates, or a lower bound."""
        return self.step if self._remote is None else self._remote.version

    def _batch_of(self, results: Results, groups: Sequence[int], version: int) -> Batch:
        if self._remote is not None:
            note_versions(results.rollouts, version)
        return Batch.of_states(results.rollouts, groups)

    def _generate_args(self, rows: Sequence[Row], tally: Tally) -> dict[str, Any]:
        """Keywords of `Environment.generate` for groups of rollouts of these rows."""
        return {
            "inputs": list(rows),
            "client": self.client,
            "rollouts_per_example": self.config.group_size,
            "sampling_args": sampler.exact_sampling(self.sampling, self.client, self.env),
            "max_concurrent": self.config.max_concurrent,
            "use_tqdm": tally,
            "score": not self._scores_itself,
            "workers": self._workers or self.config.workers,
        }

    @property
    def _scores_itself(self) -> bool:
        return is_overridden(self, GRPOTrainer, "compute_rewards")

    def _rewarded(self, batch: Batch, epoch: int) -> Batch:
        if not self._scores_itself:
            return batch
        return batch.rewarded(call_fitting(self.compute_rewards, batch["completions"], batch["prompts"], epoch))

    def _start_sampling(self, step: int, what: object, count: int, *, is_disjoint: bool) -> None:
        """Seed the sampler for ``count`` rollouts that start together. If no two processes have the same row
        (``is_disjoint``), all use the same seed, so that a single process with all the rows samples the same."""
        parts = (self.config.seed, 0 if is_disjoint else self.accelerator.process_index, step, what)
        if isinstance(self.client, sampler.Sampler):
            self.client.start(sampler.seed_of(*parts), count if self.config.max_concurrent < 0 else 0)

    def sequences(self, batch: Batch) -> list[TrainSample]:
        """The token sequences of a batch's rollouts with their advantages (see `trained_sequences`)."""
        asked = sampling.read_distribution(sampling.default_args(self.config, self.env))
        default = sampling.Distribution(temperature=asked.temperature)
        known = getattr(self.client, "samples", None)
        longest = self._longest(None if self.offline is None else self.config.max_seq_length)
        return trained_sequences(batch, self.config, default, find_tokens=known, writer=self._writer, longest=longest)

    # --- around the loop ------------------------------------------------------------------------------------------

    @property
    def update(self) -> PolicyUpdate:
        """The policy update; created at the first step."""
        if self._update is None:
            self._update = PolicyUpdate(self)
        return self._update

    def _name_weights(self, version: int) -> None:
        """Label the tokens that are sampled from now on with this weight version."""
        if self.offline is None and isinstance(self.client, sampler.Sampler):
            self.client.engine.name_weights(version)

    @property
    def reference(self) -> Reference | None:
        """The reference model of the KL term if it is a copy; None with LoRA, which uses the model without adapters."""
        reference = self.update.reference if self.config.kl_coef > 0 else None
        return None if reference is None or reference.is_adapter else reference

    def _resume_from(self, state: Mapping[str, Any]) -> None:
        super()._resume_from(state)
        self._parts = deque(restored_parts(self, state.get("unlearned") or []))
        self.rows.cursor = self._parts[-1].cursor if self._parts else self.rows.cursor
        self._name_weights(self.step)
        if self._remote is not None:
            self._remote.begin(self.accelerator, self.step)

    def unlearned(self) -> list[Any] | None:
        return None if self.config.num_batches_ahead else saved_parts(self, self._parts)

    @contextmanager
    def _training(self, resume: bool | str | Path) -> Iterator[Report]:
        with ExitStack() as stack:
            if self._remote is not None:
                stack.callback(self._remote.close)
                if not resume:  # before the run directory is created: the sampler may refuse these weights
                    self._remote.begin(self.accelerator, self.step)
            if self.config.workers is not None:
                self._workers = stack.enter_context(as_workers(self.config.workers))
                stack.callback(setattr, self, "_workers", None)
            self._name_weights(self.step)
            report = stack.enter_context(super()._training(resume))
            try:
                yield report
            except RunInterruptedError:  # Ctrl-C while sampling: no update is under way, so the weights are consistent
                if not self.weights.is_sharded:  # sharded weights are saved by all processes together
                    report.checkpoint(self)
                raise
