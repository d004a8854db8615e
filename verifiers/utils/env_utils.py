"""Classic import path: an id becomes an environment."""

from verifiers.envs.loading import load_environment

__all__ = ["load_environment"]
