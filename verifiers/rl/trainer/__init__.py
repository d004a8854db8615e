"""Classic import path: ``RLTrainer`` and ``RLConfig`` of 0.1.9 are `GRPOTrainer` and `GRPOConfig` here."""

from verifiers.engine import get_model, get_model_and_tokenizer
from verifiers.rl.trainer.config import RLConfig
from verifiers.rl.trainer.trainer import RLTrainer
from verifiers.trainers import GRPOConfig, GRPOTrainer, grpo_defaults, lora_defaults

__all__ = [
    "GRPOConfig",
    "GRPOTrainer",
    "RLConfig",
    "RLTrainer",
    "get_model",
    "get_model_and_tokenizer",
    "grpo_defaults",
    "lora_defaults",
]
