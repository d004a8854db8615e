"""The configurations of the trainers, checked when a trainer is built."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from verifiers.envs.remote.workers import Workers, check_workers
from verifiers.trainers import sampling
from verifiers.trainers.advantages import ESTIMATORS, SCALES
from verifiers.trainers.base_config import TrainingConfig, is_count
from verifiers.trainers.losses import CORRECTIONS, METHODS, Objective

# Keys of 0.1.5 and 0.1.9, whose trainer drove the trainer of Transformers and a separate vLLM server.
_SAMPLED_HERE = "rollouts are sampled in this process; pass client= to sample them from a server"
_OF_CLASSIC = {
    "async_generation_timeout": "a request has its own time limit",
    "async_max_queue_size": "num_batches_ahead sets how much is sampled ahead",
    "ds3_gather_for_generation": _SAMPLED_HERE,
    "generation_timeout": "a request has its own time limit",
    "log_completions": "log_rollouts sets how many rollouts of each step are saved",
    "log_on_each_node": "one process writes the log",
    "mask_env_responses": "only what the model sampled is trained on",
    "max_data_workers": "data is not loaded in separate processes",
    "micro_batch_size": "micro-batches are sized by tokens; micro_batch_tokens sets how many",
    "num_completions_to_print": "log_rollouts sets how many rollouts of each step are saved",
    "remove_unused_columns": "rows keep their columns",
    "save_only_model": "a checkpoint holds what is needed to resume; save_model() writes the model alone",
    "shuffle_dataset": "rows are always shuffled, in an order that seed determines",
    "vllm_server_host": _SAMPLED_HERE,
    "vllm_server_port": _SAMPLED_HERE,
    "vllm_server_timeout": _SAMPLED_HERE,
    "wandb_log_unique_prompts": "rollouts are kept in the run directory",
    "zero_truncated_completions": "truncated replies are scored; mask_truncated_completions does not train on them",
}


@dataclass(init=False, repr=False)
class GRPOConfig(TrainingConfig):
    """The configuration of a `GRPOTrainer`.

    >>> config = GRPOConfig(per_device_train_batch_size=8, num_generations=4)
    >>> config.max_completion_length = 64
    >>> config.batch_size, config.group_size, config.max_new_tokens
    (8, 4, 64)
    """

    group_size: int = 8
    num_iterations: int = 1
    steps_per_generation: int | None = None

    # sampling
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 512
    max_prompt_length: int | None = None
    max_seq_length: int | None = None
    sampling_args: dict[str, Any] = field(default_factory=dict)
    max_concurrent: int = -1
    num_batches_ahead: int = 0
    max_staleness: int | None = None
    workers: str | Workers | None = None

    # the objective
    loss_type: str = "dr_grpo"
    advantage: str | None = None
    scale_rewards: str | bool | None = None
    importance_sampling_level: str | None = None
    epsilon: float | None = None
    epsilon_high: float | None = None
    delta: float | None = None
    importance_cap: float | None = 2.0
    importance_sampling_mode: str | None = None
    importance_sampling_clip_min: float | None = None
    importance_sampling_clip_max: float | None = 3.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    entropy_coef: float = 0.0
    top_entropy_quantile: float = 1.0
    kl_coef: float = 0.0
    sync_ref_model: bool = False
    ref_model_sync_steps: int = 64
    ref_model_mixup_alpha: float = 1.0
    mask_truncated_completions: bool = False
    disable_dropout: bool = True
    dynamic_sampling: bool = False
    max_resamples: int = 3

    # evaluation, and rollouts to keep
    eval_examples: int = -1
    eval_rollouts_per_example: int = 1
    eval_sampling_args: dict[str, Any] = field(default_factory=dict)
    log_rollouts: int = 16

    aliases: ClassVar[Mapping[str, str]] = {
        **TrainingConfig.aliases,
        "num_generations": "group_size",
        "rollouts_per_example": "group_size",
        "max_prompt_len": "max_prompt_length",
        "beta": "kl_coef",
        "loss": "loss_type",
        "vllm_importance_sampling_mode": "importance_sampling_mode",
        "vllm_importance_sampling_clip_min": "importance_sampling_clip_min",
        "vllm_importance_sampling_clip_max": "importance_sampling_clip_max",
        "max_completion_length": "max_new_tokens",
        "max_tokens": "max_new_tokens",
        "max_seq_len": "max_seq_length",
        "epsilon_low": "epsilon",
    }
    without_effect: ClassVar[Mapping[str, str]] = {
        "gamma": "a group-relative method scores whole rollouts and discounts nothing",
        "gae_lambda": "a group-relative method has no value function to estimate advantages with",
        **_OF_CLASSIC,
    }

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts of one update, in one process."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def rollouts_per_generation(self) -> int:
        """Rollouts that one process samples before the next updates."""
        return self.rollouts_per_step * self.updates_per_generation

    @property
    def updates_per_generation(self) -> int:
        """The number of updates that share the rollouts of one generation."""
        return (self.steps_per_generation or self.gradient_accumulation_steps) // self.gradient_accumulation_steps

    @property
    def max_generations_late(self) -> int:
        """``max_staleness`` in generations: between the one trained on when a rollout starts and the rollout's own."""
        most = self._least_staleness if self.max_staleness is None else self.max_staleness
        return (most - self.updates_per_generation + 1) // self.updates_per_generation

    @property
    def _least_staleness(self) -> int:
        """The staleness, in updates, that ``num_batches_ahead`` alone causes by the last use of a rollout."""
        return (self.num_batches_ahead + 1) * self.updates_per_generation - 1

    @property
    def estimator(self) -> str:
        """The name of the advantage estimator: as set, else as implied by ``scale_rewards``, else by ``loss_type``."""
        if self.advantage is not None:
            return self.advantage
        if self.scale_rewards is None:
            return METHODS[self.loss_type].advantage
        if isinstance(self.scale_rewards, bool):
            return SCALES["std" if self.scale_rewards else "none"]
        return SCALES[self.scale_rewards]

    @property
    def objective(self) -> Objective:
        """The settings of the loss: as set, else the defaults of ``loss_type``."""
        method = METHODS[self.loss_type]
        low, high = method.clip
        low = low if self.epsilon is None else self.epsilon
        if self.epsilon_high is not None:
            high = self.epsilon_high
        elif high is None or (self.epsilon is not None and self.loss_type == "gspo"):
            high = low
        return Objective(
            kind=self.loss_type,
            level=self.importance_sampling_level,  # type: ignore[arg-type]
            epsilon=low,
            epsilon_high=high,
            delta=self.delta,
            importance_cap=None if method.bounds_itself and not self.is_set("importance_cap") else self.importance_cap,
            kl_coef=self.kl_coef,
            sapo_temperature_pos=self.sapo_temperature_pos,
            sapo_temperature_neg=self.sapo_temperature_neg,
            correction=self._correction,
            correction_min=self.importance_sampling_clip_min,
            correction_max=self.importance_sampling_clip_max,
        )

    def warn_unused(self, *, has_own_loss: bool, is_offline: bool) -> None:
        """Warn about settings that were changed but have no effect in combination with the others."""
        known = {name for method in METHODS.values() for name in method.reads}
        unread = set() if has_own_loss else known - set(METHODS[self.loss_type].reads)
        unused = dict.fromkeys(unread, f"loss_type={self.loss_type!r} does not use it")
        bounds = ("importance_sampling_clip_min", "importance_sampling_clip_max")
        for switch, is_on, names in (
            ("importance_sampling_mode", self._correction, bounds),
            ("sync_ref_model", self.sync_ref_model, ("ref_model_sync_steps", "ref_model_mixup_alpha")),
            ("dynamic_sampling", self.dynamic_sampling, ("max_resamples",)),
        ):
            unused |= {} if is_on else dict.fromkeys(names, f"it is used only with {switch}")
        if is_offline:
            unused |= dict.fromkeys(("dynamic_sampling", "max_prompt_length"), "saved rollouts are taken as they are")
        for name in sorted(unused):
            if getattr(self, name) != getattr(type(self), name):
                warnings.warn(f"{name}={getattr(self, name)!r} has no effect: {unused[name]}", stacklevel=3)

    @property
    def _correction(self) -> str | None:
        """As set; by default, truncation for rollouts sampled ahead, as the clip alone would drop too many tokens."""
        if self.importance_sampling_mode is None:
            return "token_truncate" if self.num_batches_ahead else None
        return None if self.importance_sampling_mode == "off" else self.importance_sampling_mode

    def sampling(self, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Sampling arguments of rollouts, for an environment whose ``own`` arguments are given."""
        return sampling.merged(self, own)

    def check(self, processes: int = 1) -> None:
        for name, argument in (("loss_type", "loss"), ("advantage", "advantage")):
            if callable(getattr(self, name)):
                raise TypeError(f"{name} must be a name here; pass a function to GRPOTrainer({argument}=...)")
        super().check(processes)
        self._require("group_size", is_count(self.group_size) and self.group_size >= 2, "at least 2")
        for name in ("num_iterations", "max_new_tokens", "ref_model_sync_steps", "eval_rollouts_per_example"):
            self._require(name, is_count(getattr(self, name)), "at least 1")
        for name in ("num_batches_ahead", "max_resamples", "log_rollouts", "top_k"):
            self._require(name, getattr(self, name) >= 0, "0 or more")
        self._check_sizes(processes)
        self._check_staleness()
        check_workers(self.workers)
        self._require("temperature", self.temperature > 0, "above 0, because greedy rollouts cannot be trained on")
        self._require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._require("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        self._check_objective()
        if self.sync_ref_model and not self.kl_coef:
            raise ValueError("sync_ref_model needs kl_coef above 0: without it there is no reference model to update")
        self._require("ref_model_mixup_alpha", 0 < self.ref_model_mixup_alpha <= 1, "above 0 and at most 1")
        for name in ("max_prompt_length", "max_seq_length"):
            value = getattr(self, name)
            self._require(name, value is None or is_count(value), "at least 1, or None")
        sampling.check(self.sampling(), "the configuration")

    def _check_sizes(self, processes: int) -> None:
        """A step is made of whole groups, and a generation of whole steps."""
        rollouts = self.rollouts_per_step
        if rollouts % self.group_size:
            what = f"batch_size × gradient_accumulation_steps = {rollouts}"
            what += f" in each of {processes} processes" if processes > 1 else ""
            groups = rollouts // self.group_size
            near = [str(n * self.group_size) for n in (groups, groups + 1) if n]
            raise ValueError(
                f"{what} must be a multiple of group_size = {self.group_size}: a group is never split; "
                f"use {' or '.join(near)} rollouts per step"
            )
        steps, accumulated = self.steps_per_generation, self.gradient_accumulation_steps
        if steps is not None and not (is_count(steps) and steps % accumulated == 0):
            raise ValueError(
                f"steps_per_generation must be a multiple of gradient_accumulation_steps = {accumulated}, got "
                f"{steps!r}: it counts batches of batch_size, and each update uses gradient_accumulation_steps of them"
            )

    def _check_staleness(self) -> None:
        if self.max_staleness is None:
            return
        self._require("max_staleness", self.max_staleness >= 0, "0 or more")
        ahead, updates = self.num_batches_ahead, self.updates_per_generation
        if not ahead:
            raise ValueError("max_staleness limits rollouts that are sampled ahead: set num_batches_ahead, too")
        if self.max_staleness < (least := self._least_staleness):
            raise ValueError(
                f"max_staleness={self.max_staleness} updates is too low for num_batches_ahead={ahead}"
                + (f" and {updates} updates per generation" if updates > 1 else "")
                + f": rollouts get {least} updates old; set at least {least}, or sample fewer batches ahead"
            )

    def _check_objective(self) -> None:
        self._require_one_of("loss_type", METHODS)
        if self.advantage is not None:
            self._require_one_of("advantage", ESTIMATORS)
            if self.scale_rewards is not None:
                raise ValueError("advantage and scale_rewards both choose the estimator; pass one of them")
        scales = (None, True, False, *SCALES)
        self._require("scale_rewards", self.scale_rewards in scales, "one of none, std (or group), batch")
        if self.importance_sampling_level is not None:
            self._require_one_of("importance_sampling_level", ("token", "sequence"))
        if self.importance_sampling_mode is not None:
            self._require_one_of("importance_sampling_mode", (*CORRECTIONS, "off"))
        self._require("top_entropy_quantile", 0 <= self.top_entropy_quantile <= 1, "between 0 and 1")
        self._require("kl_coef", self.kl_coef >= 0, "0 or more")
        bounds = ("importance_sampling_clip_min", "importance_sampling_clip_max")
        for name in ("epsilon", "epsilon_high", "delta", "importance_cap", *bounds):
            value = getattr(self, name)
            self._require(name, value is None or value > 0, "above 0, or None")
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            self._require(name, getattr(self, name) > 0, "above 0")
        low, high = (getattr(self, name) for name in bounds)
        if low is not None and high is not None and low >= high:
            raise ValueError(f"importance_sampling_clip_min={low} must be below importance_sampling_clip_max={high}")


@dataclass(init=False, repr=False)
class SFTConfig(TrainingConfig):
    """The configuration of an `SFTTrainer`."""

    max_seq_length: int | None = None
    min_reward: float | None = None

    aliases: ClassVar[Mapping[str, str]] = {
        **TrainingConfig.aliases,
        "max_seq_len": "max_seq_length",
        "max_length": "max_seq_length",
    }


def grpo_defaults(run_name: str | None = None, **settings: Any) -> GRPOConfig:
    """A configuration to start from; pass the settings that should differ, or assign them afterwards.

    >>> grpo_defaults(run_name="first", max_steps=50).max_steps
    50
    """
    config = GRPOConfig(
        run_name=run_name, learning_rate=1e-6, num_generations=16, warmup_steps=10, lr_scheduler_type="constant"
    )
    for name, value in settings.items():
        setattr(config, name, value)
    return config
