"""Classic import path of the marks on methods."""

from verifiers.rollout import cleanup, stop, teardown

__all__ = ["cleanup", "stop", "teardown"]
