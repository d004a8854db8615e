"""Classic import path (0.1.8) of the marks on methods."""

from verifiers.rollout import cleanup, stop, teardown

__all__ = ["cleanup", "stop", "teardown"]
