"""The base of all configurations: fields with aliases, checks, and the settings that every trainer has."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from verifiers.trainers.memory.optimizers import ALIASES, OPTIMIZERS

SCHEDULES = ("constant", "linear", "cosine")
STRATEGIES = ("no", "steps", "epoch")
_KINDS: dict[str, tuple[str, Any]] = {  # annotation of a field → what it must be, in words and as a class
    "bool": ("True or False", bool),
    "int": ("a whole number", int),
    "float": ("a finite number", (int, float)),
    "str": ("a string", str),
    "Path": ("a path", Path),
    "Sequence[str]": ("a list of strings", (list, tuple)),
    "dict[str, Any]": ("a mapping", (Mapping, type(None))),
    "None": ("None", type(None)),
}


@dataclass(init=False, repr=False)
class Config:
    """Fields with aliases. An unknown name is an error, a name without effect a warning. Fields may be set later."""

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
        if name in type(self).without_effect:  # user code may read it: return the value that was set, or None
            return self.__dict__.get("_unused", {}).get(name)
        canonical = type(self).aliases.get(name)
        if canonical is None:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return getattr(self, canonical)

    def is_set(self, name: str) -> bool:
        """Whether this field was set explicitly, even to its default value."""
        return name in self._set

    def __repr__(self) -> str:
        changed = {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.default_factory is not MISSING or getattr(self, one.name) != one.default
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items() if value)})"

    def to_dict(self) -> dict[str, Any]:
        """All fields under their own names, as plain data."""
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
        raise TypeError(f"the configuration must be a {cls.__name__} or a mapping, not a {type(given).__name__}")

    def _require(self, name: str, is_right: bool, wanted: str) -> None:
        if not is_right:
            raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

    def _require_kinds(self) -> None:
        ours = [base for base in type(self).__mro__ if base.__module__.startswith("verifiers.") and is_dataclass(base)]
        known = {one.name for base in ours for one in fields(base)}
        for one in fields(self):
            names = str(one.type).split(" | ")
            if one.name not in known or not _KINDS.keys() >= set(names):  # a user's subclass checks its own fields
                continue
            value, kinds = getattr(self, one.name), [_KINDS[name] for name in names]
            is_right = any(
                isinstance(value, kind) and isinstance(value, bool) == (kind is bool) for _, kind in kinds
            )  # a bool is an int in Python, but not a valid number here
            is_right &= not isinstance(value, float) or math.isfinite(value)
            self._require(one.name, is_right, " or ".join(words for words, _ in kinds))

    def _require_one_of(self, name: str, names: Collection[str]) -> None:
        self._require(name, getattr(self, name) in names, f"one of {', '.join(names)}")


@dataclass(init=False, repr=False)
class TrainingConfig(Config):
    """Settings of every trainer: optimization, precision and memory, logging, evaluation and checkpoints."""

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
    gradient_checkpointing: bool | None = None
    optim: str = "adamw"
    load_in_4bit: bool = False
    micro_batch_tokens: int | None = None

    # reporting, evaluation, checkpoints
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

    def strategy(self, what: str) -> str:
        """When to evaluate or save: the strategy that was set, else "steps" if the number of steps was, else "no"."""
        said, steps = getattr(self, f"{what}_strategy"), getattr(self, f"{what}_steps")
        return str(said) if said is not None else "steps" if steps else "no"

    def check(self, processes: int = 1) -> None:
        """Raise ValueError for settings that are invalid, also for this number of processes."""
        if self.max_grad_norm == math.inf:  # no clipping; the norm is measured in any case
            self.max_grad_norm = None
        self._require_kinds()
        for name in ("batch_size", "gradient_accumulation_steps", "logging_steps"):
            self._require(name, is_count(getattr(self, name)), "at least 1")
        for name in ("max_steps", "micro_batch_tokens", "eval_steps", "save_steps", "save_total_limit"):
            value = getattr(self, name)
            if name == "max_steps" and value == -1:
                self.max_steps = value = None
            self._require(name, value is None or is_count(value), "at least 1, or None")
        self._require("weight_decay", self.weight_decay >= 0, "0 or more")
        self._require("learning_rate", self.learning_rate >= 0, "0 or more")
        self._require("num_epochs", self.num_epochs > 0, "above 0")
        self._require("warmup_ratio", 0 <= self.warmup_ratio <= 1, "between 0 and 1")
        self._require("warmup_steps", self.warmup_steps >= 0, "0 or more")
        for name in ("adam_beta1", "adam_beta2"):
            self._require(name, 0 <= getattr(self, name) < 1, "0 or more, and below 1")
        self._require("adam_epsilon", self.adam_epsilon >= 0, "0 or more")
        if self.lr_scheduler_type == "constant_with_warmup":  # the name in Transformers; every schedule here warms up
            self.lr_scheduler_type = "constant"
        self._require_one_of("lr_scheduler_type", SCHEDULES)
        self._require("max_grad_norm", self.max_grad_norm is None or self.max_grad_norm > 0, "above 0, or None")
        for name in ("eval", "save"):
            said = getattr(self, f"{name}_strategy")
            self._require(f"{name}_strategy", said is None or said in STRATEGIES, f"one of {', '.join(STRATEGIES)}")
            if self.strategy(name) == "steps" and getattr(self, f"{name}_steps") is None:
                raise ValueError(f"{name}_strategy='steps' needs {name}_steps")
        if self.optim in ALIASES:
            self.optim = ALIASES[self.optim]
        self._require_one_of("optim", OPTIMIZERS)
        if self.fp16 and self.bf16:
            raise ValueError("fp16 and bf16 are both set; choose one precision")


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
