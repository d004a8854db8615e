"""An environment and a model become a better model: rollouts in groups, scored, and learned from, step by step."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verifiers import calls
from verifiers.chat import ChatWriter
from verifiers.clients import as_client
from verifiers.clients.protocol import Request
from verifiers.envs.evaluation import score_states
from verifiers.envs.remote.workers import Workers, as_workers
from verifiers.messages import as_messages
from verifiers.progress import Tally
from verifiers.runner import RunInterruptedError
from verifiers.trainers import processes, sampling, setup, stopping
from verifiers.trainers.advantages import Estimator, flat_groups
from verifiers.trainers.batch import Batch, Reply, as_batch, refusals, with_advantages
from verifiers.trainers.config import GRPOConfig
from verifiers.trainers.functions import call_callbacks, call_fitting, own_function
from verifiers.trainers.generations import Generations, rows_learned
from verifiers.trainers.losses import Loss
from verifiers.trainers.micro_batches import Trained
from verifiers.trainers.offline import read_offline
from verifiers.trainers.planning import Job
from verifiers.trainers.remote_weights import remote_weights
from verifiers.trainers.reward_weights import reward_weights, scheduled_weights
from verifiers.trainers.row_stream import RowStream
from verifiers.trainers.sampler import (
    Sampler,
    exact_sampling,
    make_sampler,
    sampling_args,
    seed_of,
    usual_sampling,
)
from verifiers.trainers.samplers import Samplers
from verifiers.trainers.sequences import trained_sequences
from verifiers.trainers.sharding import Whole, make_weights
from verifiers.trainers.staleness import staleness_figures
from verifiers.trainers.threads import sensible_threads
from verifiers.trainers.trainer import Trainer
from verifiers.trainers.update import PolicyUpdate
from verifiers.trainers.watch.report import Report
from verifiers.trainers.watch.tracking import check_report_to
from verifiers.trainers.weights import learning_rate
from verifiers.types import Row

if TYPE_CHECKING:
    from verifiers.results import Results
    from verifiers.trainers.reference import Reference

RowSampler = Callable[[Sequence[Row], float], Sequence[Row]]
WeightSchedule = Callable[[float], Sequence[float]]
Function = Callable[..., Any]


class GRPOTrainer(Trainer):
    """Trains a model on an environment, in this process, by comparing rollouts of the same prompt with one another.

    ``model`` is a name, a folder or a module; ``client`` answers in its place where it is served elsewhere.
    ``row_sampler`` chooses the rows to draw from: (all rows, epochs so far) → rows; ``weight_schedule`` the rubric's
    weights: epochs so far → weights. ``advantage`` and ``loss`` are names of the configuration, or functions (see
    `verifiers.trainers.advantages` and `verifiers.trainers.losses`). Each method below is a step of the loop and may be
    overridden.
    """

    config: GRPOConfig

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
        self._own_loss = own_function(self.config, "loss", "loss_type", loss)
        self._own_advantage = own_function(self.config, "advantage", "advantage", advantage)
        tokenizer = setup.one_of("tokenizer", tokenizer, "processing_class", processing_class)
        self.accelerator, kind = processes.accelerator(), processes.sharding()
        self.config.check(self.accelerator.num_processes)
        if self._own_advantage is not None and (self.config.advantage or self.config.scale_rewards is not None):
            raise TypeError("advantage= is a function, and the configuration names another estimator; pass one of them")
        Estimator(self._own_advantage or self.config.estimator)  # functions that cannot be called are found before
        Loss(self.config.objective, self._own_loss)  # anything is loaded
        check_report_to(self.config.report_to)
        self.env, self.offline = env, None if dataset is None else read_offline(dataset)
        if self.offline is None:
            setup.check_env(env)
        job = Job(
            config=self.config,
            device=self.accelerator.device,
            env=env,
            adapters=peft_config,
            samples=client is None,
            processes=self.accelerator.num_processes,
            sharding=processes.held_apart(self.accelerator, kind),
        )
        self.model, self.tokenizer, self.memory = setup.model_and_tokenizer(model, tokenizer, job)
        setup.check_template(self.tokenizer, env)
        setup.check_reference(self.model, self.config)
        sampling.check(self.sampling, "this environment with this configuration")
        whole: Whole = "sampled" if client is None or self.config.kl_coef else "sent"
        self.weights = make_weights(self.model, self.config, self.accelerator, kind, whole=whole, plan=self.memory)
        self.optimizer = self.weights.optimizer
        self._remote = remote_weights(client, weight_server, self.model, self.tokenizer)
        self.client = (
            make_sampler(self.model, self.tokenizer, self.config, env, self.memory) if client is None else client
        )
        rows: Any = self.offline.groups() if self.offline is not None else setup.rows_of(env, dataset)
        self.dropped_prompts = 0
        if self.offline is None:
            rows, self.dropped_prompts = setup.short_enough(rows, self.tokenizer, self.config, env)
        shard = (self.accelerator.process_index, self.accelerator.num_processes)
        self.rows = RowStream(rows, seed=self.config.seed, shard=shard)
        self.eval_rows = setup.eval_rows(env, eval_dataset)
        self.callbacks = list(callbacks)
        self.row_sampler, self.weight_schedule = row_sampler, weight_schedule
        self.step, self.epoch, self.cursor, self.should_stop = 0, 0, 0, False
        self.learned: list[int] = []  # places of rows beyond the cursor, where they are not learned from in order
        self.report: Report | None = None
        self._update: PolicyUpdate | None = None
        self._workers: Workers | None = None  # while training: one connection for all steps
        self._parts: deque[Batch] = deque()  # of the last generation, not learned from yet
        self._batch_at = (0, 0)  # the epoch that a batch is made for, and the step of it
        # Saved rollouts are texts: they are tokenized where their tokens were not saved. Rollouts of this policy never.
        self._writer = None if self.offline is None else ChatWriter(self.tokenizer)

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
                    report.enter(f"sampling and scoring {count} rollouts")
                batch = self._next_batch(generations)
                sampled = time.perf_counter()
                self._check_scored(report, batch)
                report.enter(f"learning from {len(batch['rewards'])} rollouts")
                figures = self.train_step(batch) or {}
                figures |= staleness_figures(batch, self.step) if self._may_be_stale else {}
                self.step += 1
                report.step(self, batch, figures, waited_s=sampled - began, trained_s=time.perf_counter() - sampled)
                self.cursor, self.learned = rows_learned(self.rows, batch, self.accelerator)
                if self._remote is not None:
                    self._remote.send(self.accelerator, self.step)
                self._after_step(report, cursor=self.cursor)
                self.should_stop = any(processes.gathered(self.accelerator, self.should_stop))
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
        batch = self._with_advantages(as_batch(batch))
        rate = learning_rate(self.config, self.step, self.total_steps)
        trained = self.sequences(batch)
        refused = refusals(batch, trained, self.accelerator)
        if isinstance(self.client, Sampler) and self.memory.releases_cache:
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
        self._start_sampling("eval", len(inputs) * self.config.eval_rollouts_per_example, is_apart=True)
        results: Results = self.env.generate_sync(
            inputs=inputs,
            client=self.client,
            rollouts_per_example=self.config.eval_rollouts_per_example,
            sampling_args=asked,
            max_concurrent=self.config.max_concurrent,
            use_tqdm=False,
            workers=self._workers or self.config.workers,
        )
        return results

    def generate(self, prompts: Sequence[Any]) -> list[Reply]:
        """One reply to each prompt (text or messages), sampled as in training."""

        async def ask_all() -> list[Any]:
            return await asyncio.gather(*(client.complete(request) for request in requests))

        client = as_client(self.client)
        is_chat = getattr(self.env, "message_type", "chat") == "chat"
        asked = [as_messages(prompt) if is_chat else prompt for prompt in prompts]
        kind: Literal["chat", "completion"] = "chat" if is_chat else "completion"
        requests = [Request(model="", prompt=one, sampling=self.sampling, message_type=kind) for one in asked]
        replies = calls.run(ask_all)
        return [Reply(one.text, messages=[one.message] if is_chat else one.text) for one in replies]

    @property
    def sampling(self) -> dict[str, Any]:
        """What rollouts are asked for: the configuration's arguments, then the environment's, then the defaults."""
        return sampling_args(self.config, self.env)

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
        hooks = ("get_batch", "sample_batch")
        is_own = any(
            getattr(type(self), hook) is not getattr(GRPOTrainer, hook) or hook in vars(self) for hook in hooks
        )
        return is_own or bool(self.row_sampler or self.weight_schedule or self.offline)

    @property
    def _may_be_stale(self) -> bool:
        return bool(self.config.num_batches_ahead) or self._remote is not None

    def _next_batch(self, generations: Generations) -> Batch:
        """The batch of this step: of a generation for several updates, the next part."""
        if not self._parts:
            batch, n = generations.take(self.step), self.config.updates_per_generation
            self._parts.extend([batch] if n == 1 else self._with_advantages(batch).split(n, self.cursor))
        return self._parts.popleft()

    def _with_advantages(self, batch: Batch) -> Batch:
        def gather(values: list[Any]) -> list[Any]:
            return [one for part in processes.gathered(self.accelerator, values) for one in part]

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
        tally = Tally() if self.report is None else self.report.counted()
        results: Results = self.env.generate_sync(**self._rollouts_of(rows, tally))
        groups = [first_group + i for i in range(len(rows)) for _ in range(size)]
        return self._rewarded(Batch.of_states(results.rollouts, groups, cursor=self.rows.cursor))

    def _rollouts_of(self, rows: Sequence[Row], tally: Tally) -> dict[str, Any]:
        """What is asked of the environment for groups of these rows."""
        return {
            "inputs": list(rows),
            "client": self.client,
            "rollouts_per_example": self.config.group_size,
            "sampling_args": exact_sampling(self.sampling, self.client, self.env),
            "max_concurrent": self.config.max_concurrent,
            "use_tqdm": tally,
            "score": not self._scores_itself,
            "workers": self._workers or self.config.workers,
        }

    @property
    def _scores_itself(self) -> bool:
        return type(self).compute_rewards is not GRPOTrainer.compute_rewards

    def _rewarded(self, batch: Batch) -> Batch:
        if not self._scores_itself:
            return batch
        rewards = call_fitting(self.compute_rewards, batch["completions"], batch["prompts"], self._batch_at[0])
        return batch.rewarded([float(reward) for reward in rewards])

    def _check_scored(self, report: Report, batch: Batch) -> None:
        try:
            stopping.check_scored(batch, self.accelerator)
        except stopping.TrainingStoppedError:
            report.keep_rollouts(self.step + 1, batch)
            raise

    def _start_sampling(self, what: int | str, count: int, *, is_apart: bool) -> None:
        """Rollouts of a step get seeds of their own, made of the run's; the sampler begins them together.

        The seeds of rows that no other process has do not depend on which process that is: one that runs alone would
        draw the same.
        """
        if isinstance(self.client, Sampler):
            engine, process = self.client.engine, 0 if is_apart else self.accelerator.process_index
            engine.reseed(seed_of(self.config.seed, process, self.step, what))
            engine.gather(min(count, engine.rows) if self.config.max_concurrent < 0 else 0)

    def sequences(self, batch: Batch) -> list[Trained]:
        """The samples of a batch's rollouts with their advantages; one whose history was rewritten has several.

        A rollout of which the sampled tokens are not known is in none; ``batch.refused`` has the reason.
        """
        asked = sampling.read_distribution(usual_sampling(self.config, self.env))
        return trained_sequences(
            batch,
            self.config,
            sampling.Distribution(temperature=asked.temperature),
            find_tokens=getattr(self.client, "samples", None),
            writer=self._writer,
        )

    # --- around the loop ------------------------------------------------------------------------------------------

    @property
    def update(self) -> PolicyUpdate:
        """How the policy learns; made when it is first needed."""
        if self._update is None:
            asked = sampling.flat(usual_sampling(self.config, self.env))
            self._update = PolicyUpdate(
                self.accelerator.unwrap_model(self.model),
                self.weights,
                self.config,
                self.memory,
                lock=self._weights_lock,
                pad_id=self.tokenizer.pad_token_id,
                max_new_tokens=int(asked["max_tokens"]),
                processes=self.accelerator,
                loss=self._own_loss,
                after_step=lambda: self._name_weights(self.step + 1),
            )
        return self._update

    @property
    def _weights_lock(self) -> AbstractContextManager[Any]:
        """Held by whoever changes the weights, or reads them beside the trainer's own thread."""
        if isinstance(self.client, Samplers):
            return self.client.lock
        return self.client.engine.lock if isinstance(self.client, Sampler) else nullcontext()

    def _name_weights(self, version: int) -> None:
        """Tokens that are sampled in this process from here on are of the weights after so many updates."""
        if isinstance(self.client, Sampler) and self.offline is None:
            self.client.engine.name_weights(version)

    @property
    def reference(self) -> Reference | None:
        """The model that the divergence is measured from, where it has weights of its own (with LoRA it has none)."""
        reference = self.update.reference if self.config.kl_coef > 0 else None
        return None if reference is None or reference.is_adapter else reference

    @contextmanager
    def _training(self, resume: bool | str | Path) -> Iterator[Report]:
        with ExitStack() as stack:
            if self._remote is not None:
                stack.callback(self._remote.close)
                if not resume:  # before there is a run: a sampler that does not fit leaves none
                    self._remote.begin(self.accelerator, self.step)
            self.report = report = stack.enter_context(Report(self, resume))
            if resume:
                state = report.resume(self)
                self.step, self.cursor = state["step"], state["cursor"]
                self.learned = list(state.get("learned", ()))
                self.rows.go_on(self.cursor, self.learned)
                self._parts.clear()
                if self._remote is not None:
                    self._remote.begin(self.accelerator, self.step)
            self._name_weights(self.step)
            stack.enter_context(sensible_threads(self.model))
            if self.config.workers is not None:
                self._workers = stack.enter_context(as_workers(self.config.workers))
                stack.callback(setattr, self, "_workers", None)
            call_callbacks(self, "on_train_begin")
            try:
                yield report
            except RunInterruptedError:  # Ctrl-C among rollouts: the weights are those of the last whole step
                if not self.weights.is_sharded:  # then others may be within a step, and none can save alone
                    report.checkpoint(self, cursor=self.cursor)
                raise
            self.weights.finish()
            call_callbacks(self, "on_train_end")
            report.finish()
