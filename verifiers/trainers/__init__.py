"""Reinforcement learning on an environment, `GRPOTrainer`, and supervised fine-tuning as a warm-up, `SFTTrainer`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiers.trainers.config import GRPOConfig as GRPOConfig
    from verifiers.trainers.config import SFTConfig as SFTConfig
    from verifiers.trainers.config import grpo_defaults as grpo_defaults
    from verifiers.trainers.distributed.samplers import Samplers as Samplers
    from verifiers.trainers.grpo_trainer import GRPOTrainer as GRPOTrainer
    from verifiers.trainers.setup import lora_defaults as lora_defaults
    from verifiers.trainers.sft_trainer import SFTTrainer as SFTTrainer
    from verifiers.trainers.tiny import tiny_model as tiny_model

_HOME = {
    "GRPOConfig": "config",
    "GRPOTrainer": "grpo_trainer",
    "SFTConfig": "config",
    "SFTTrainer": "sft_trainer",
    "Samplers": "distributed.samplers",
    "grpo_defaults": "config",
    "lora_defaults": "setup",
    "tiny_model": "tiny",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"verifiers.trainers.{_HOME[name]}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "verifiers":
            raise
        raise ImportError(f"vf.{name} needs {error.name}: pip install 'verifiers[train]'") from error
    value = getattr(module, name)
    globals()[name] = value
    return value
