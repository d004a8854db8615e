"""A stand-in of rLLM 0.3: the interfaces that our workflow and script touch. rLLM itself is not on the index."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest


@dataclass
class ModelOutput:
    text: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    logprobs: list[float] | None = None
    prompt_length: int = 0
    completion_length: int = 0
    finish_reason: str | None = None


@dataclass
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass
class Step:
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    reward: float
    chat_completions: list[dict[str, Any]] = field(default_factory=list)
    model_response: str = ""


@dataclass
class Trajectory:
    steps: list[Step]
    reward: float
    name: str


@dataclass
class Episode:
    trajectories: list[Trajectory]
    is_correct: bool
    id: str = ""
    task: Any = None
    metrics: dict[str, float] = field(default_factory=dict)


class Workflow:
    def __init__(self, rollout_engine: Any, executor: Any = None, timeout: float = 1e6, **kwargs: Any) -> None:
        self.rollout_engine, self.executor = rollout_engine, executor

    def reset(self, task: Any = None, uid: str | None = None) -> None:
        self.task, self.uid = task, uid


class Registry:
    """Rows by name and split, as the registry on disk gives them back."""

    kept: dict[tuple[str, str], list[dict[str, Any]]] = {}

    @classmethod
    def register_dataset(cls, name: str, data: list[dict[str, Any]], split: str = "default") -> list[dict[str, Any]]:
        assert all(isinstance(row, dict) for row in data)
        return cls.kept.setdefault((name, split), data)


class AgentTrainer:
    """The one of ``rllm.trainer.agent_trainer`` takes "verl" only, at the newest commit."""

    backends = ("verl",)

    def __init__(self, **kwargs: Any) -> None:
        assert kwargs["backend"] in self.backends, f"Unsupported backend: {kwargs['backend']}"
        self.given = kwargs


class UnifiedTrainer(AgentTrainer):
    backends = ("verl", "tinker", "fireworks")


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the modules where our code imports them from."""
    contents: dict[str, dict[str, Any]] = {
        "rllm": {},
        "rllm.agents": {},
        "rllm.agents.agent": {"Episode": Episode, "Step": Step, "Trajectory": Trajectory},
        "rllm.workflows": {},
        "rllm.workflows.workflow": {"Workflow": Workflow},
        "rllm.data": {},
        "rllm.data.dataset": {"DatasetRegistry": Registry},
        "rllm.trainer": {"AgentTrainer": UnifiedTrainer},
        "rllm.trainer.agent_trainer": {"AgentTrainer": AgentTrainer},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("workflow", "train"):
        monkeypatch.delitem(sys.modules, f"verifiers.integrations.rllm.{name}", raising=False)
