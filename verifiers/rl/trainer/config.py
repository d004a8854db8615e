"""Classic import path: the configuration of the trainer of 0.1.9."""

from verifiers.trainers import GRPOConfig as RLConfig

__all__ = ["RLConfig"]
