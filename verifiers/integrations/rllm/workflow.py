"""An environment → rLLM's workflow: a task → a scored episode with exact tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllm.agents.agent import Episode, Step, Trajectory
from rllm.workflows.workflow import Workflow

from verifiers.envs import Environment
from verifiers.integrations.rllm.client import EngineClient
from verifiers.types import State

ROW_FIELDS = ("prompt", "answer", "info", "task", "example_id")


class VerifiersWorkflow(Workflow):  # type: ignore[misc, unused-ignore]
    """Plays ``task``, a row of the environment, with the trainer's rollout engine as the model.

    A failed rollout raises; rLLM logs the error and retries up to its ``retry_limit``.
    """

    def __init__(
        self,
        rollout_engine: Any,
        vf_env: Environment,
        sampling_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(rollout_engine=rollout_engine, **kwargs)
        self.vf_env = vf_env
        self.sampling_args = dict(sampling_args or {})

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Any:
        self.reset(task, uid)
        client = EngineClient(self.rollout_engine, application_id=uid)
        state = await self.vf_env.run_rollout(
            as_row(task), client, model_of(self.rollout_engine), gen_sampling_args=self.sampling_args, score=True
        )
        return as_episode(state, task=task, uid=uid)


def as_row(task: Mapping[str, Any]) -> dict[str, Any]:
    """A task of an rLLM data set (with ``messages`` and numpy arrays) → a row of the environment.

    >>> as_row({"messages": [{"role": "user", "content": "2+2?"}], "answer": "4", "uid": 7})
    {'answer': '4', 'prompt': [{'role': 'user', 'content': '2+2?'}], 'example_id': 0}
    """
    row = {name: task[name] for name in ROW_FIELDS if task.get(name) is not None}
    row.setdefault("prompt", task.get("messages", []))
    row.setdefault("example_id", 0)
    return row


def model_of(engine: Any) -> str:
    """The model name of an engine, which is in ``model`` or ``model_name``."""
    return str(getattr(engine, "model", None) or getattr(engine, "model_name", None) or "policy")


def as_episode(state: State, *, task: Mapping[str, Any], uid: str) -> Any:
    """A scored rollout as an episode: one step per reply, with its prompt ids and sampled ids."""
    steps = [_as_step(turn) for turn in state["trajectory"]]
    trajectory = Trajectory(steps=steps, reward=float(state["reward"]), name="verifiers")
    episode = Episode(id=uid, task=dict(task), trajectories=[trajectory], is_correct=state["reward"] > 0)
    episode.metrics = dict(state["metrics"] or {})
    return episode


def _as_step(turn: Mapping[str, Any]) -> Any:
    tokens = turn.get("tokens") or {}
    return Step(
        prompt_ids=list(tokens.get("prompt_ids", ())),
        response_ids=list(tokens.get("completion_ids", ())),
        logprobs=list(tokens.get("completion_logprobs", ())),
        chat_completions=[*turn["prompt"], *turn["completion"]],
        model_response=str(turn["completion"][-1].get("content") or ""),
        reward=float(turn.get("reward") or 0.0),
    )
