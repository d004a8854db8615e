"""TRL: an environment as a ``rollout_func`` of TRL's GRPO trainer, or its tools as an ``environment_factory``."""

from __future__ import annotations

from verifiers.integrations.trl.rollouts import Rollouts
from verifiers.integrations.trl.tools import ToolEnvironments

__all__ = ["Rollouts", "ToolEnvironments"]
