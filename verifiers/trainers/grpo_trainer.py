"""An environment and a model become a better model: rollouts in groups, scored, and learned from, step by step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from verifiers.trainers.functions import call_fitting, is_overridden, own_function
from verifiers.trainers.generations import Generations, rows_learned
from verifiers.trainers.learning.micro_batches import Trained
from verifiers.trainers.learning.sequences import trained_sequences
from verifiers.trainers.losses import Loss
from verifiers.trainers.offline import read_offline
from verifiers.trainers.reference import Reference
from verifiers.trainers.reward_weights import reward_weights, scheduled_weights
from verifiers.trainers.staleness import note_versions, staleness_figures
from verifiers.trainers.stopping import nothing_scored
from verifiers.trainers.trainer import Trainer
from verifiers.trainers.update import PolicyUpdate
from verifiers.trainers.watch.report import Report
from verifiers.trainers.weights import learning_rate
from verifiers.types import Row

RowSampler = Callable[[Sequence[Row], float], Sequence[Row]]
WeightSchedule = Callable[[float], Sequence[float]]
Function = Callable[..., Any]


class GRPOTrainer(Trainer):
    """Trains a model on an environment, in this process, by comparing rollouts of the same prompt with one another.

    ``model`` is a name, a folder or a module; ``client`` answers in its place where it is served elsewhere.
    ``row_sampler`` chooses the rows to draw from: (all rows, epochs so far) → rows; ``weight_schedule`` the rubric's
    weights: epochs so far → weights. ``advantage`` and ``loss`` are names of the configuration, or functions (see
    `trainers.advantages` and `trainers.losses`). Each method below is a step of the loop and may be overridden.
    """

    config: GRPOConfig
    _update: PolicyUpdate | None = None
    _workers: Workers | None = None  # while training: one connection for all steps
    _batch_at = (0, 0)  # the epoch that a batch is made for, and the step of it

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
        whole: Whole = "sampled" if client is None or self.config.kl_coef else "sent"
        asked = {"adapters": peft_config, "samples": client is None, "is_read": whole == "sampled"}
        self._load(model, tokenizer, env=env, **asked)
        setup.check_template(self.tokenizer, env)
        setup.check_reference(self.model, self.config)
        sampling.check(self.sampling, "this environment with this configuration")
        self._make_weights(whole)
        self._remote = remote_weights(client, weight_server, self.model, self.tokenizer)
        if client is None:
            client = sampler.make_sampler(self.model, self.tokenizer, self.config, env, self.memory)
        self.client = client
        if self.offline is not None:
            rows, self.dropped_prompts = self.offline.groups(), 0
        else:
            found = setup.rows_of(env, dataset)
            rows, self.dropped_prompts = setup.short_enough(found, self.tokenizer, self.config, env)
        self._make_stream(rows)
        self.eval_rows = setup.eval_rows(env, eval_dataset)
        self.callbacks, self.row_sampler, self.weight_schedule = list(callbacks), row_sampler, weight_schedule
        self._parts: deque[Batch] = deque()  # of the last generation, not learned from yet
        # Saved rollouts are texts: they are tokenized where their tokens were not saved. Rollouts of this policy never.
        self._writer = None if self.offline is None else ChatWriter(self.tokenizer)

    def _check_config(self) -> None:
        super()._check_config()
        check_installed(self.config.workers)
        if self._own_advantage is not None and (self.config.advantage or self.config.scale_rewards is not None):
            raise TypeError("advantage= is a function, and the configuration names another estimator; pass one of them")
        Estimator(self._own_advantage or self.config.estimator)  # functions that cannot be called are found here
        Loss(self.config.objective, self._own_loss)

    # --- the loop -------------------------------------------------------------------------------------------------

    def train(self, resume: bool | str | Path = False) -> Report:
        """Train for ``max_steps`` steps, or ``num_epochs`` times through the rows; the report says how it went."""
        with self._training(resume) as report, Generations(self, whole=self._makes_whole_batches) as generations:
            while self.step < self.total_steps and not self.should_stop:
                if self.step % self.num_steps_per_epoch == 0:
                    self.epoch = self.step // self.num_steps_per_epoch
                    self.on_epoch_begin(self.epoch)
                began = time.perf_counter()
                if not self._parts:
                    count = self.rows_per_generation * self.config.group_size
                    report.display.enter(f"sampling and scoring {count} rollouts")
                batch = self._next_batch(generations)
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
                self.cursor, self.learned = rows_learned(self.rows, batch, self.accelerator)
                if self._remote is not None:
                    self._remote.send(self.accelerator, self.step)
                self._after_step(report, cursor=self.cursor)
                self.should_stop = any(processes.all_gather(self.accelerator, self.should_stop))
        return report

    def get_batch(self, epoch: int | None = None, step: int | None = None) -> Any:
        """The batch of a step: rollouts of the next rows, or of those that ``row_sampler`` offers."""
        if self.row_sampler is None:
            return self.sample_batch(self.rows.take(self.rows_per_generation))
        now, within = self._batch_at
        epochs = (now if epoch is None else epoch) + (within if step is None else step) / self.num_steps_per_epoch
        return self.sample_batch(self.row_sampler(self.rows.all, epochs))

    def sample_batch(self, rows: Sequence[Any]) -> Batch:
        """Roll out and score ``rows_per_generation`` of these rows, ``group_size`` times each.

        With ``dynamic_sampling``, groups that all scored the same are replaced by those of other rows.
        """
        if self.offline is not None:
            return self.offline.batch(rows)
        pool = list(rows)
        chosen = self.rows.choose(pool, self.rows_per_generation)
        batch = self._rollouts(chosen)
        for _ in range(self.config.max_resamples if self.config.dynamic_sampling else 0):
            flat = flat_groups(batch["rewards"], batch["groups"])
            if not flat:
                break
            good = batch.keep([i for i, group in enumerate(batch["groups"]) if group not in flat])
            spare = self.rows.choose(pool, len(flat)) if len(pool) > len(chosen) else self.rows.take(len(flat))
            batch = good + self._rollouts(spare, first_group=max(batch["groups"]) + 1)
        batch.cursor = self.rows.cursor
        return batch

    def compute_rewards(
        self, completions: Sequence[Reply], prompts: Sequence[Any], epoch: int | None = None
    ) -> list[float]:
        """Score completions, whose state is attached, with the environment's rubric: NaN where that failed.

        Overridden, with or without ``epoch``, this is asked for every batch; its values are the rewards (of those that
        could be scored: NaN is none).
        """
        states = [completion.state for completion in completions if completion.state is not None]
        if len(states) < len(completions):
            raise TypeError("compute_rewards scores completions of this trainer's rollouts: they carry their state")
        calls.run(lambda: score_states(self.env, states))
        return [math.nan if state.get("error") is not None else float(state["reward"]) for state in states]

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Learn from a batch: its figures (loss, kl, clip_fraction, grad_norm, …)."""
        rate = learning_rate(self.config, self.step, self.total_steps)
        with long_lived:  # thousands of new objects, all of them kept
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
        """Roll out the evaluation rows with the model as it is now."""
        if self.env is None:
            raise ValueError("this trainer has no environment to evaluate on; pass env=")
        asked = sampling.over(self.sampling, self.config.eval_sampling_args)
        inputs = self.eval_rows if self.config.eval_examples < 0 else self.eval_rows[: self.config.eval_examples]
        each = self.config.eval_rollouts_per_example
        self._start_sampling("eval", len(inputs) * each, is_apart=True)
        how = {"rollouts_per_example": each, "sampling_args": asked, "use_tqdm": False, "score": True}
        results: Results = self.env.generate_sync(**self._rollouts_of(inputs, Tally()) | how)
        return results

    def generate(self, prompts: Sequence[Any]) -> list[Reply]:
        """One reply to each prompt (text or messages), sampled as in training."""
        is_chat = getattr(self.env, "message_type", "chat") == "chat"
        replies = sampler.ask(self.client, prompts, self.sampling, is_chat=is_chat)
        return [Reply(one.text, messages=[one.message] if is_chat else one.text) for one in replies]

    @property
    def sampling(self) -> dict[str, Any]:
        """What rollouts are asked for: the configuration's arguments, then the environment's, then the defaults."""
        return sampler.sampling_args(self.config, self.env)

    # --- sizes ----------------------------------------------------------------------------------------------------

    @property
    def rows_per_step(self) -> int:
        """Rows that one step of this process rolls out."""
        return max(1, self.config.rollouts_per_step // self.config.group_size)

    @property
    def rows_per_generation(self) -> int:
        """Rows that this process rolls out in one go: those of ``steps_per_generation``."""
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
        """Is a batch made in one go, in a way that groups on their own cannot be?"""
        is_own = any(is_overridden(self, GRPOTrainer, hook) for hook in ("get_batch", "sample_batch"))
        return is_own or bool(self.row_sampler or self.weight_schedule or self.offline)

    def _next_batch(self, generations: Generations) -> Batch:
        """The batch of this step: of a generation for several updates, the next part."""
        if not self._parts:
            batch, n = generations.take(self.step), self.config.updates_per_generation
            self._parts.extend([batch] if n == 1 else self._with_advantages(batch).split(n, self.cursor))
        return self._parts.popleft()

    def _with_advantages(self, batch: Batch) -> Batch:
        def gather(values: list[Any]) -> list[Any]:
            return [one for part in processes.all_gather(self.accelerator, values) for one in part]

        batch.reward_weights = batch.reward_weights or reward_weights(self.env)
        return with_advantages(batch, Estimator(self._own_advantage or self.config.estimator), gather=gather)

    def _generate_batch(self, step: int) -> Batch:
        epoch, within = divmod(step, self.num_steps_per_epoch)
        self._batch_at = (epoch, within)
        began = time.perf_counter()
        with scheduled_weights(self.env, self.weight_schedule, step / self.num_steps_per_epoch):
            batch = as_batch(call_fitting(self.get_batch, epoch, within))
            batch.reward_weights = reward_weights(self.env)
        batch.cursor = batch.cursor or self.rows.cursor
        batch.seconds["generation"] = time.perf_counter() - began
        return batch

    def _rollouts(self, rows: Sequence[Row], first_group: int = 0) -> Batch:
        """Groups of rollouts of these rows, scored by the run as they finish, or by one's own `compute_rewards`."""
        size = self.config.group_size
        self._start_sampling(self.rows.taken, len(rows) * size, is_apart=self.rows.is_apart)
        self.rows.is_apart = False
        tally, version = Tally() if self.report is None else self.report.display.counted(), self.weight_version
        results: Results = self.env.generate_sync(**self._rollouts_of(rows, tally))
        groups = [first_group + i for i in range(len(rows)) for _ in range(size)]
        return self._rewarded(self._batch_of(results, groups, version, cursor=self.rows.cursor))

    @property
    def weight_version(self) -> int:
        """How many updates the weights that are sampled from have had, at least."""
        return self.step if self._remote is None else self._remote.version

    def _batch_of(self, results: Results, groups: Sequence[int], version: int, **more: Any) -> Batch:
        if self._remote is not None:
            note_versions(results.rollouts, version)
        return Batch.of_states(results.rollouts, groups, **more)

    def _rollouts_of(self, rows: Sequence[Row], tally: Tally) -> dict[str, Any]:
        """What is asked of the environment for groups of these rows."""
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

    def _rewarded(self, batch: Batch) -> Batch:
        if not self._scores_itself:
            return batch
        rewards = call_fitting(self.compute_rewards, batch["completions"], batch["prompts"], self._batch_at[0])
        return batch.rewarded(rewards)

    def _start_sampling(self, what: int | str, count: int, *, is_apart: bool) -> None:
        """Rollouts of a step begin together, with seeds of their own; those of rows that no other process has (they are
        apart) do not depend on which process it is: one that runs alone would draw the same."""
        process = 0 if is_apart else self.accelerator.process_index
        seed = sampler.seed_of(self.config.seed, process, self.step, what)
        sampler.start_sampling(self.client, seed, count if self.config.max_concurrent < 0 else 0)

    def sequences(self, batch: Batch) -> list[Trained]:
        """The samples of a batch's rollouts, each with its advantage (see `trained_sequences`)."""
        asked = sampling.read_distribution(sampler.usual_sampling(self.config, self.env))
        usual = sampling.Distribution(temperature=asked.temperature)
        known = getattr(self.client, "samples", None)
        return trained_sequences(batch, self.config, usual, find_tokens=known, writer=self._writer)

    # --- around the loop ------------------------------------------------------------------------------------------

    @property
    def update(self) -> PolicyUpdate:
        """How the policy learns; made when it is first needed."""
        if self._update is None:
            asked = sampling.flat(sampler.usual_sampling(self.config, self.env))
            self._update = PolicyUpdate(
                self.accelerator.unwrap_model(self.model),
                self.weights,
                self.config,
                self.memory,
                lock=sampler.weights_lock(self.client),
                pad_id=self.tokenizer.pad_token_id,
                max_new_tokens=int(asked["max_tokens"]),
                processes=self.accelerator,
                loss=self._own_loss,
                after_step=lambda: self._name_weights(self.step + 1),
            )
        return self._update

    def _name_weights(self, version: int) -> None:
        if self.offline is None:
            sampler.name_weights(self.client, version)

    @property
    def reference(self) -> Reference | None:
        """The model that the divergence is measured from, where it has weights of its own (with LoRA it has none)."""
        reference = self.update.reference if self.config.kl_coef > 0 else None
        return None if reference is None or reference.is_adapter else reference

    def _go_on(self, state: Mapping[str, Any]) -> None:
        super()._go_on(state)
        self._parts.clear()
        self._name_weights(self.step)
        if self._remote is not None:
            self._remote.begin(self.accelerator, self.step)

    @contextmanager
    def _training(self, resume: bool | str | Path) -> Iterator[Report]:
        with ExitStack() as stack:
            if self._remote is not None:
                stack.callback(self._remote.close)
                if not resume:  # before there is a run: a sampler that does not fit leaves none
                    self._remote.begin(self.accelerator, self.step)
            if self.config.workers is not None:
                self._workers = stack.enter_context(as_workers(self.config.workers))
                stack.callback(setattr, self, "_workers", None)
            self._name_weights(self.step)
            report = stack.enter_context(super()._training(resume))
            try:
                yield report
            except RunInterruptedError:  # Ctrl-C among rollouts: the weights are those of the last whole step
                if not self.weights.is_sharded:  # then others may be within a step, and none can save alone
                    report.checkpoint(self, cursor=self.cursor)
                raise
