"""Every knob of a training, under the names of both dialects of the documents; checked when the trainer is built."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from verifiers.trainers import sampling
from verifiers.trainers.choices import CLIP, LOSS_TYPES, SCHEDULES, STRATEGIES


@dataclass(init=False, repr=False)
class Knobs:
    """Fields with aliases: an unknown name is an error, a name without effect a warning, and any may be set later."""

    aliases: ClassVar[Mapping[str, str]] = {}
    without_effect: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **given: Any) -> None:
        object.__setattr__(self, "_set", set())
        object.__setattr__(self, "_unused", {})
        for one in fields(self):
            default = one.default_factory() if one.default_factory is not MISSING else one.default
            object.__setattr__(self, one.name, default)
        seen: dict[str, str] = {}
        for name, value in given.items():
            canonical = self.aliases.get(name, name)
            if canonical in seen:
                raise TypeError(f"{seen[canonical]} and {name} are the same thing; pass one of them")
            seen[canonical] = name
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.without_effect:
            warnings.warn(f"{name} has no effect here: {self.without_effect[name]}", stacklevel=3)
            self._unused[name] = value
            return
        canonical = self.aliases.get(name, name)
        names = [one.name for one in fields(self)]
        if canonical not in names:
            close = difflib.get_close_matches(name, [*names, *self.aliases], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{type(self).__name__} has no {name!r}{hint}")
        object.__setattr__(self, canonical, value)
        self._set.add(canonical)

    def __getattr__(self, name: str) -> Any:
        if name in type(self).without_effect:  # what was said, or None: others may want to read it
            return self.__dict__.get("_unused", {}).get(name)
        canonical = type(self).aliases.get(name)
        if canonical is None:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return getattr(self, canonical)

    def is_set(self, name: str) -> bool:
        """Was this field given a value, be it its default, or is it left at that?"""
        return name in self._set

    def __repr__(self) -> str:
        changed = {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.default_factory is not MISSING or getattr(self, one.name) != one.default
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items() if value)})"

    def to_dict(self) -> dict[str, Any]:
        """All fields by their own names, as plain data."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in plain.items()}

    @classmethod
    def of(cls, given: Any) -> Self:
        """A configuration from itself, a mapping, or nothing."""
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping):
            return cls(**given)
        raise TypeError(f"the configuration is a {cls.__name__} or a mapping, not a {type(given).__name__}")

    def _require(self, name: str, is_right: bool, wanted: str) -> None:
        if not is_right:
            raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")


@dataclass(init=False, repr=False)
class LearningKnobs(Knobs):
    """What every trainer here has: steps, rates, precision, what is logged and kept."""

    # learning
    learning_rate: float = 1e-5
    batch_size: int = 32
    gradient_accumulation_steps: int = 1
    num_epochs: float = 1.0
    max_steps: int | None = None
    warmup_ratio: float = 0.0
    warmup_steps: int = 0
    lr_scheduler_type: str = "constant"
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    seed: int = 0

    # memory and precision
    fp16: bool = False
    bf16: bool = False
    gradient_checkpointing: bool = False
    micro_batch_tokens: int | None = None

    # what is told and kept
    output_dir: str | Path | None = None
    run_name: str | None = None
    logging_steps: int = 1
    report_to: str | Sequence[str] | None = None
    eval_strategy: str | None = None
    eval_steps: int | None = None
    save_strategy: str | None = None
    save_steps: int | None = None
    save_total_limit: int | None = None
    show_progress: bool = True

    aliases: ClassVar[Mapping[str, str]] = {
        "per_device_train_batch_size": "batch_size",
        "num_train_epochs": "num_epochs",
        "evaluation_strategy": "eval_strategy",
        "lr_scheduler": "lr_scheduler_type",
        "adam_eps": "adam_epsilon",
        "gradient_clip": "max_grad_norm",
    }

    @property
    def evaluates_every(self) -> int | None:
        """Steps between evaluations; None: at the ends of epochs, or never (see `eval_strategy`)."""
        return self.eval_steps if self.strategy("eval") == "steps" else None

    @property
    def saves_every(self) -> int | None:
        return self.save_steps if self.strategy("save") == "steps" else None

    def strategy(self, what: str) -> str:
        """When to evaluate or save: as said, or every so many steps where only that was given."""
        said, steps = getattr(self, f"{what}_strategy"), getattr(self, f"{what}_steps")
        return str(said) if said is not None else "steps" if steps else "no"

    def check(self) -> None:
        """Raise ValueError for what cannot be, in one sentence."""
        for name in ("batch_size", "gradient_accumulation_steps", "logging_steps"):
            self._require(name, _is_count(getattr(self, name)), "at least 1")
        for name in ("max_steps", "micro_batch_tokens", "eval_steps", "save_steps", "save_total_limit"):
            value = getattr(self, name)
            if name == "max_steps" and value == -1:
                self.max_steps = value = None
            self._require(name, value is None or _is_count(value), "at least 1, or None")
        self._require("learning_rate", _is_finite(self.learning_rate) and self.learning_rate >= 0, "0 or more")
        self._require("num_epochs", _is_finite(self.num_epochs) and self.num_epochs > 0, "above 0")
        self._require("warmup_ratio", 0 <= self.warmup_ratio <= 1, "between 0 and 1")
        self._require("warmup_steps", self.warmup_steps >= 0, "0 or more")
        self._require("lr_scheduler_type", self.lr_scheduler_type in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
        self._require("max_grad_norm", self.max_grad_norm is None or self.max_grad_norm > 0, "above 0, or None")
        for name in ("eval", "save"):
            said = getattr(self, f"{name}_strategy")
            self._require(f"{name}_strategy", said is None or said in STRATEGIES, f"one of {', '.join(STRATEGIES)}")
            if self.strategy(name) == "steps" and getattr(self, f"{name}_steps") is None:
                raise ValueError(f"{name}_strategy='steps' needs {name}_steps")
        if self.fp16 and self.bf16:
            raise ValueError("fp16 and bf16 are two precisions; choose one")


@dataclass(init=False, repr=False)
class GRPOConfig(LearningKnobs):
    """The configuration of a `GRPOTrainer`.

    >>> config = GRPOConfig(per_device_train_batch_size=8, num_generations=4)
    >>> config.max_completion_length = 64
    >>> config.batch_size, config.group_size, config.max_new_tokens
    (8, 4, 64)
    """

    group_size: int = 8
    num_iterations: int = 1

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

    # the objective
    loss_type: str = "dr_grpo"
    scale_rewards: str | bool | None = None
    epsilon: float | None = None
    epsilon_high: float | None = None
    delta: float | None = None
    importance_cap: float | None = 2.0
    kl_coef: float = 0.0
    sync_ref_model: bool = False
    ref_model_sync_steps: int = 64
    ref_model_mixup_alpha: float = 1.0
    mask_truncated_completions: bool = False
    disable_dropout: bool = True
    dynamic_sampling: bool = False
    max_resamples: int = 3

    # evaluation and what is kept of it
    eval_examples: int = -1
    eval_rollouts_per_example: int = 1
    eval_sampling_args: dict[str, Any] = field(default_factory=dict)
    log_rollouts: int = 16

    aliases: ClassVar[Mapping[str, str]] = {
        **LearningKnobs.aliases,
        "num_generations": "group_size",
        "beta": "kl_coef",
        "max_completion_length": "max_new_tokens",
        "max_tokens": "max_new_tokens",
        "max_seq_len": "max_seq_length",
        "epsilon_low": "epsilon",
    }
    without_effect: ClassVar[Mapping[str, str]] = {
        "gamma": "a group-relative method scores whole rollouts and discounts nothing",
        "gae_lambda": "a group-relative method has no value function to estimate advantages with",
    }

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts of one process that one update learns from."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def clip(self) -> tuple[float, float]:
        """How far below and above 1 the ratio may be: as given, or the method's own."""
        low, high = CLIP.get(self.loss_type, (0.2, None))
        low = low if self.epsilon is None else self.epsilon
        if self.epsilon_high is not None:
            return low, self.epsilon_high
        return low, low if high is None or (self.epsilon is not None and self.loss_type == "gspo") else high

    @property
    def scale(self) -> str:
        """Whether advantages are divided by their group's standard deviation: "std" or "none"."""
        if self.scale_rewards is None:
            return "none" if self.loss_type == "dr_grpo" else "std"
        if isinstance(self.scale_rewards, bool):
            return "std" if self.scale_rewards else "none"
        return {"group": "std"}.get(self.scale_rewards, self.scale_rewards)

    @property
    def cap(self) -> float | None:
        """The most that a token may weigh: ``importance_cap``, but CISPO has a bound of its own, `clip`."""
        return None if self.loss_type == "cispo" and not self.is_set("importance_cap") else self.importance_cap

    def sampling(self, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What is asked of the model in training, for an environment with sampling arguments of its ``own``."""
        return sampling.merged(self, own)

    def check(self, processes: int = 1) -> None:
        super().check()
        self._require("group_size", _is_count(self.group_size) and self.group_size >= 2, "at least 2")
        for name in ("num_iterations", "max_new_tokens", "ref_model_sync_steps", "eval_rollouts_per_example"):
            self._require(name, _is_count(getattr(self, name)), "at least 1")
        for name in ("num_batches_ahead", "max_resamples", "log_rollouts", "top_k"):
            self._require(name, isinstance(getattr(self, name), int) and getattr(self, name) >= 0, "0 or more")
        rollouts = self.rollouts_per_step
        if rollouts % self.group_size:
            what = f"batch_size × gradient_accumulation_steps = {rollouts}"
            what += f" of each of {processes} processes" if processes > 1 else ""
            near = [
                n
                for n in (
                    rollouts // self.group_size * self.group_size,
                    -(-rollouts // self.group_size) * self.group_size,
                )
                if n
            ]
            raise ValueError(
                f"{what} must be a multiple of group_size = {self.group_size}: a group is never split; "
                f"take {' or '.join(map(str, dict.fromkeys(near)))} rollouts a step"
            )
        self._require("temperature", _is_finite(self.temperature) and self.temperature > 0, "above 0: training samples")
        self._require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._require("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        self._require("loss_type", self.loss_type in LOSS_TYPES, f"one of {', '.join(LOSS_TYPES)}")
        self._require("scale_rewards", self.scale in ("none", "std"), "'none' or 'std'")
        self._require("kl_coef", _is_finite(self.kl_coef) and self.kl_coef >= 0, "0 or more")
        for name in ("epsilon", "epsilon_high", "delta", "importance_cap"):
            value = getattr(self, name)
            self._require(name, value is None or (_is_finite(value) and value > 0), "above 0, or None")
        if self.sync_ref_model and not self.kl_coef:
            raise ValueError("sync_ref_model needs kl_coef above 0: without it there is no reference to follow")
        self._require("ref_model_mixup_alpha", 0 < self.ref_model_mixup_alpha <= 1, "above 0 and at most 1")
        for name in ("max_prompt_length", "max_seq_length"):
            value = getattr(self, name)
            self._require(name, value is None or _is_count(value), "at least 1, or None")
        sampling.check(self.sampling(), "the configuration")


@dataclass(init=False, repr=False)
class SFTConfig(LearningKnobs):
    """The configuration of an `SFTTrainer`."""

    max_seq_length: int | None = None
    min_reward: float | None = None

    aliases: ClassVar[Mapping[str, str]] = {
        **LearningKnobs.aliases,
        "max_seq_len": "max_seq_length",
        "max_length": "max_seq_length",
    }


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def grpo_defaults(run_name: str | None = None) -> GRPOConfig:
    """A configuration to start from; assign what should be different.

    >>> grpo_defaults(run_name="first").run_name
    'first'
    """
    return GRPOConfig(
        run_name=run_name, learning_rate=1e-6, num_generations=16, warmup_steps=10, lr_scheduler_type="constant"
    )
