"""Classic import path (0.1.8): the method decorators."""

from verifiers.rollout import cleanup, stop, teardown

__all__ = ["cleanup", "stop", "teardown"]
