"""rLLM: an environment as a workflow, rLLM's rollout engine as a client, and a training script for both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verifiers.integrations.rllm.client import EngineClient

if TYPE_CHECKING:
    from verifiers.integrations.rllm.workflow import VerifiersWorkflow

__all__ = ["EngineClient", "VerifiersWorkflow"]


def __getattr__(name: str) -> Any:
    if name != "VerifiersWorkflow":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verifiers.integrations.rllm.workflow import VerifiersWorkflow  # imports rLLM

    return VerifiersWorkflow
