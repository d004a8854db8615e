"""Rollouts and scoring on the workers of a Ray cluster: ``env.evaluate(…, workers="ray")``."""

from verifiers.integrations.ray.workers import RayWorkers

__all__ = ["RayWorkers"]
