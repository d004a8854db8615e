"""rLLM: an environment as its workflow, its rollout engine as our client, and a training script over both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verifiers.integrations.rllm.client import EngineClient

if TYPE_CHECKING:
    from verifiers.integrations.rllm.workflow import VerifiersWorkflow

__all__ = ["EngineClient", "VerifiersWorkflow"]


def __getattr__(name: str) -> Any:
    if name != "VerifiersWorkflow":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verifiers.integrations.rllm.workflow import VerifiersWorkflow  # a subclass of rLLM's own

    return VerifiersWorkflow
