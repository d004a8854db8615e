"""Classic import path of the method decorators."""

from verifiers.rollout import cleanup, stop, teardown

__all__ = ["cleanup", "stop", "teardown"]
