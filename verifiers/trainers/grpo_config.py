"""Classic import path (0.1.5) of the configuration."""

from verifiers.trainers.config import GRPOConfig

__all__ = ["GRPOConfig"]
