"""Classic import path: the trainer of 0.1.9."""

from verifiers.trainers import GRPOTrainer as RLTrainer

__all__ = ["RLTrainer"]
