"""Classic import path (0.1.10): API keys that an environment requires."""

from verifiers.envs.keys import MissingKeyError, ensure_keys

__all__ = ["MissingKeyError", "ensure_keys"]
