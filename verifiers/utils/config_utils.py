"""Classic import path (0.1.10): keys that an environment cannot do without."""

from verifiers.envs.keys import MissingKeyError, ensure_keys

__all__ = ["MissingKeyError", "ensure_keys"]
