"""Classic import path: an id → an environment."""

from verifiers.envs.loading import load_environment

__all__ = ["load_environment"]
