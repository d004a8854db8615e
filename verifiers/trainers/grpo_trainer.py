"""An environment and a model become a better model: rollouts in groups, scored, and learned from, step by step."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers import calls
from verifiers.chat import ChatWriter
from verifiers.clients import as_client
from verifiers.envs.evaluation import score_states
from verifiers.runner import RunInterruptedError
from verifiers.samples import NotSampledError
from verifiers.trainers import building, processes, sampling, stopping
from verifiers.trainers.advantages import flat_groups
from verifiers.trainers.ahead import Ahead
from verifiers.trainers.batch import Batch, Reply, as_batch, samples_of_reply, with_advantages
from verifiers.trainers.config import GRPOConfig
from verifiers.trainers.micro_batches import Trained
from verifiers.trainers.offline import read_offline
from verifiers.trainers.report import Report
from verifiers.trainers.row_stream import RowStream
from verifiers.trainers.sampler import Sampler
from verifiers.trainers.trainer import Trainer
from verifiers.trainers.update import PolicyUpdate
from verifiers.trainers.weights import Weights, learning_rate
from verifiers.types import Row, State

if TYPE_CHECKING:
    from verifiers.results import Results
    from verifiers.trainers.reference import Reference

RowSampler = Callable[[Sequence[Row], float], Sequence[Row]]
WeightSchedule = Callable[[float], Sequence[float]]


class GRPOTrainer(Trainer):
    """Trains a model on an environment, in this process, by comparing rollouts of the same prompt with one another.

    ``model`` is a name, a folder or a module; ``client`` answers in its place where it is served elsewhere.
    ``row_sampler`` chooses the rows to draw from: (all rows, epochs so far) → rows; ``weight_schedule`` the rubric's
    weights: epochs so far → weights. Each method below is a step of the loop and may be overridden.
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
    ) -> None:
        self.config = GRPOConfig.of(building.one_of("config", config, "args", args))
        tokenizer = building.one_of("tokenizer", tokenizer, "processing_class", processing_class)
        self.accelerator = processes.accelerator()
        self.config.check(self.accelerator.num_processes)
        self.env, self.offline = env, None if dataset is None else read_offline(dataset)
        if self.offline is None:
            building.check_env(env)
        self.model, self.tokenizer = building.model_and_tokenizer(
            model, tokenizer, self.config, self.accelerator.device, peft_config
        )
        building.check_template(self.tokenizer, env)
        building.check_reference(self.model, self.config)
        sampling.check(self.sampling, "this environment with this configuration")
        processes.same_weights(self.accelerator, self.model)
        self.weights = Weights(self.model, self.config)
        self.optimizer = self.weights.optimizer
        self._remote = building.remote_weights(client, weight_server, self.model, self.tokenizer)
        self.client = building.sampler(self.model, self.tokenizer, self.config, env) if client is None else client
        rows: Any = self.offline.groups() if self.offline is not None else building.rows_of(env, dataset)
        self.dropped_prompts = 0
        if self.offline is None:
            rows, self.dropped_prompts = building.short_enough(rows, self.tokenizer, self.config, env)
        shard = (self.accelerator.process_index, self.accelerator.num_processes)
        self.rows = RowStream(rows, seed=self.config.seed, shard=shard)
        self.eval_rows = building.eval_rows(env, eval_dataset)
        self.callbacks = list(callbacks)
        self.row_sampler, self.weight_schedule = row_sampler, weight_schedule
        self.step, self.epoch, self.cursor, self.should_stop = 0, 0, 0, False
        self.report: Report | None = None
        self._update: PolicyUpdate | None = None
        self._batch_at = (0, 0)  # the epoch that a batch is made for, and the step of it
        # Saved rollouts are texts: they are tokenized where their tokens were not saved. Rollouts of this policy never.
        self._writer = None if self.offline is None else ChatWriter(self.tokenizer)

    # --- the loop -------------------------------------------------------------------------------------------------

    def train(self, resume: bool | str | Path = False) -> Report:
        """Train for ``max_steps`` steps, or ``num_epochs`` times through the rows; the report says how it went."""
        with self._training(resume) as report, Ahead(self._next_batch, self.config.num_batches_ahead) as batches:
            while self.step < self.total_steps and not self.should_stop:
                if self.step % self.num_steps_per_epoch == 0:
                    self.epoch = self.step // self.num_steps_per_epoch
                    self.on_epoch_begin(self.epoch)
                began = time.perf_counter()
                batch = batches.take(self.step, self.total_steps)
                sampled = time.perf_counter()
                self._check_scored(report, batch)
                figures = self.train_step(batch) or {}
                self.step += 1
                report.step(self, batch, figures, waited_s=sampled - began, trained_s=time.perf_counter() - sampled)
                self.cursor = batch.cursor
                if self._remote is not None:
                    self._send_weights(self._remote)
                self._after_step(report, cursor=self.cursor)
                self.should_stop = any(processes.gathered(self.accelerator, self.should_stop))
        return report

    def get_batch(self, epoch: int | None = None, step: int | None = None) -> Any:
        """The batch of a step: rollouts of the next rows, or of those that ``row_sampler`` offers."""
        if self.row_sampler is None:
            return self.sample_batch(self.rows.take(self.rows_per_step))
        now, within = self._batch_at
        epochs = (now if epoch is None else epoch) + (within if step is None else step) / self.num_steps_per_epoch
        return self.sample_batch(self.row_sampler(self.rows.all, epochs))

    def sample_batch(self, rows: Sequence[Any]) -> Batch:
        """Roll out and score ``rows_per_step`` of these rows, ``group_size`` times each.

        With ``dynamic_sampling``, groups that all scored the same are replaced by those of other rows.
        """
        if self.offline is not None:
            return self.offline.batch(rows)
        pool = list(rows)
        chosen = self.rows.choose(pool, self.rows_per_step)
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
        batch = with_advantages(as_batch(batch), self.config.scale)  # type: ignore[arg-type]
        rate = learning_rate(self.config, self.step, self.total_steps)
        trained = self.sequences(batch)
        refused = building.refusals(batch, trained)
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
        )
        return results

    def generate(self, prompts: Sequence[Any]) -> list[Reply]:
        """One reply to each prompt (text or messages), sampled as in training."""

        async def ask_all() -> list[Any]:
            return await asyncio.gather(*(client.complete(request) for request in requests))

        client = as_client(self.client)
        is_chat = getattr(self.env, "message_type", "chat") == "chat"
        requests = [building.request(prompt, self.sampling, is_chat=is_chat) for prompt in prompts]
        replies = calls.run(ask_all)
        return [Reply(one.text, messages=[one.message] if is_chat else one.text) for one in replies]

    @property
    def sampling(self) -> dict[str, Any]:
        """What rollouts are asked for: the configuration's arguments, then the environment's, then the defaults."""
        return building.sampling_args(self.config, self.env)

    # --- sizes ----------------------------------------------------------------------------------------------------

    @property
    def rows_per_step(self) -> int:
        """Rows that one step of this process rolls out."""
        return max(1, self.config.rollouts_per_step // self.config.group_size)

    @property
    def can_evaluate(self) -> bool:
        return self.env is not None

    @property
    def eval_dataloader(self) -> Iterator[dict[str, list[Any]]]:
        """The evaluation rows in batches: ``{"prompts": […], "answers": […], …}``."""
        rows, size = self.eval_rows, self.config.batch_size
        for i in range(0, len(rows), size):
            part = [rows[j] for j in range(i, min(i + size, len(rows)))]
            yield {f"{name}s": [row.get(name) for row in part] for name in ("prompt", "answer", "task", "info")}

    # --- rollouts -------------------------------------------------------------------------------------------------

    def _next_batch(self, step: int) -> Batch:
        epoch, within = divmod(step, self.num_steps_per_epoch)
        self._batch_at = (epoch, within)
        began = time.perf_counter()
        with building.rubric_weights(self.env, self.weight_schedule, step / self.num_steps_per_epoch):
            batch = as_batch(building.fitting(self.get_batch, epoch, within))
            if self.weight_schedule is not None and self.env is not None:
                batch.weights = self.env.rubric.reward_shares()
        batch.cursor = batch.cursor or self.rows.cursor
        batch.seconds["generation"] = time.perf_counter() - began
        return batch

    def _rollouts(self, rows: Sequence[Row], first_group: int = 0) -> Batch:
        """Groups of rollouts of these rows, scored by the run as they finish, or by one's own `compute_rewards`."""
        size, scores_itself = self.config.group_size, type(self).compute_rewards is not GRPOTrainer.compute_rewards
        self._start_sampling(self.rows.taken, len(rows) * size, is_apart=self.rows.is_apart)
        self.rows.is_apart = False
        results: Results = self.env.generate_sync(
            inputs=list(rows),
            client=self.client,
            rollouts_per_example=size,
            sampling_args=building.exact_sampling(self.sampling, self.client, self.env),
            max_concurrent=self.config.max_concurrent,
            use_tqdm=False,
            score=not scores_itself,
        )
        groups = [first_group + i for i in range(len(rows)) for _ in range(size)]
        batch = Batch.of_states(results.rollouts, groups, cursor=self.rows.cursor)
        if not scores_itself:
            return batch
        rewards = building.fitting(self.compute_rewards, batch["completions"], batch["prompts"], self._batch_at[0])
        return batch.rewarded([float(reward) for reward in rewards])

    def _send_weights(self, remote: building.RemoteWeights) -> None:
        if self.accelerator.is_main_process:
            remote.send()
        self.accelerator.wait_for_everyone()

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
            engine.reseed(building.seed_of(self.config.seed, process, self.step, what))
            engine.gather(min(count, engine.rows) if self.config.max_concurrent < 0 else 0)

    def sequences(self, batch: Batch) -> list[Trained]:
        """The samples of a batch's rollouts with their advantages; one whose history was rewritten has several.

        A rollout of which the sampled tokens are not known is in none; ``batch.refused`` has the reason.
        """
        find = getattr(self.client, "samples", None)
        asked = sampling.read_distribution(building.usual_sampling(self.config, self.env))
        usual = sampling.Distribution(temperature=asked.temperature)
        trained: list[Trained] = []
        batch.refused.clear()
        columns = zip(batch["prompts"], batch["completions"], batch["advantages"], strict=True)
        for place, (prompt, reply, advantage) in enumerate(columns):
            state: State | Mapping[str, Any] = getattr(reply, "state", None) or {}
            if advantage is None or (self.config.mask_truncated_completions and state.get("is_truncated")):
                continue
            try:
                samples = samples_of_reply(prompt, reply, find, self._writer)
            except NotSampledError as error:
                batch.refused.append(str(error))
                continue
            for sample in samples:
                sample = sample if self.offline is None else sampling.saved(sample)
                drawn = sampling.distributions(sample, usual)
                sample = sampling.without_doubtful_logprobs(sample, drawn, self.config.num_batches_ahead)
                trained.append(Trained(sample=sample, advantage=advantage, drawn_from=drawn, rollout=place))
        return trained

    # --- around the loop ------------------------------------------------------------------------------------------

    @property
    def update(self) -> PolicyUpdate:
        """How the policy learns; made when it is first needed."""
        if self._update is None:
            self._update = building.update(self)
        return self._update

    @property
    def reference(self) -> Reference | None:
        """The model that the divergence is measured from, where it has weights of its own (with LoRA it has none)."""
        reference = self.update.reference if self.config.kl_coef > 0 else None
        return None if reference is None or reference.is_adapter else reference

    @contextmanager
    def _training(self, resume: bool | str | Path) -> Iterator[Report]:
        with ExitStack() as stack:
            self.report = report = stack.enter_context(Report(self, resume))
            if resume:
                state = report.resume(self)
                self.step, self.cursor = state["step"], state["cursor"]
                self.rows.cursor = self.cursor
            stack.enter_context(building.sensible_threads(self.model))
            building.tell(self, "on_train_begin")
            try:
                yield report
            except RunInterruptedError:  # Ctrl-C among rollouts: the weights are those of the last whole step
                report.checkpoint(self, cursor=self.cursor)
                raise
            building.tell(self, "on_train_end")
            report.finish()
