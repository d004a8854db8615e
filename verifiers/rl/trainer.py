"""Classic import path: ``RLTrainer`` and ``RLConfig`` of 0.1.9 are `GRPOTrainer` and `GRPOConfig` here."""

from verifiers.trainers import GRPOConfig, GRPOTrainer, grpo_defaults, lora_defaults

RLConfig = GRPOConfig
RLTrainer = GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "RLConfig", "RLTrainer", "grpo_defaults", "lora_defaults"]
