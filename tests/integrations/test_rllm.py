"""Our environments in rLLM: its engine is our client, our rollouts are its episodes, its backends are both reached."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import verifiers as vf
from tests.integrations import fake_rllm
from tests.integrations.fake_rllm import ModelOutput, ToolCall
from verifiers.clients.protocol import Request
from verifiers.integrations.rllm.client import EngineClient
from verifiers.integrations.rllm.train import main, make_trainer, read_settings

SCRIPTS = Path(__file__).parents[2] / "examples" / "rllm"


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_rllm.install(monkeypatch)


class Engine:
    """One token a character; says the sum in the first message."""

    model_name = "tiny"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    async def get_model_response(self, messages: list[dict[str, Any]], **kwargs: Any) -> ModelOutput:
        self.calls.append(kwargs)
        found = re.search(r"What is (\d+)", messages[0]["content"])
        assert found is not None
        said = str(2 * int(found[1]))
        prompt = [ord(c) for message in messages for c in message["content"]]
        return ModelOutput(
            content=said,
            prompt_ids=prompt,
            completion_ids=[ord(c) for c in said],
            logprobs=[-0.5] * len(said),
            finish_reason="stop",
        )


class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        return [{"role": "user", "content": "again"}]


def correct(completion: vf.Messages, answer: str) -> float:
    return float(completion[-1]["content"] == answer)  # type: ignore[index, typeddict-item]


def make_env() -> vf.Environment:
    rows = [{"question": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(4)]
    return Twice(dataset=rows, rubric=vf.Rubric([correct]), max_turns=2)


def run(env: vf.Environment, engine: Any, task: dict[str, Any]) -> Any:
    from verifiers.integrations.rllm import VerifiersWorkflow

    workflow = VerifiersWorkflow(rollout_engine=engine, vf_env=env, sampling_args={"max_tokens": 4}, executor=None)
    return asyncio.run(workflow.run(task, "task:0"))


def test_a_task_becomes_an_episode_whose_steps_have_the_tokens_of_the_engine() -> None:
    env, engine = make_env(), Engine()
    task = {**env.get_dataset()[2], "prompt": np.array(env.get_dataset()[2]["prompt"], dtype=object)}
    episode = run(env, engine, task)
    assert (episode.id, episode.is_correct, episode.task["answer"]) == ("task:0", True, "4")
    assert episode.metrics == {"correct": 1.0, "num_turns": 2.0}
    (trajectory,) = episode.trajectories
    question = [ord(c) for c in "What is 2+2?"]
    assert [step.prompt_ids for step in trajectory.steps] == [question, [*question, ord("4"), *map(ord, "again")]]
    assert [(step.response_ids, step.logprobs) for step in trajectory.steps] == [([ord("4")], [-0.5])] * 2
    assert trajectory.reward == 1.0
    assert engine.calls[0] == {"application_id": "task:0", "tools": [], "max_tokens": 4}


def test_a_rollout_that_failed_raises_so_that_rllm_tries_again() -> None:
    def broken(completion: vf.Messages) -> float:
        raise ValueError("no judge")

    env = make_env()
    env.rubric = vf.Rubric([broken])
    with pytest.raises(vf.GraderError, match="no judge"):
        run(env, Engine(), env.get_dataset()[1])


def test_tool_calls_of_the_engine_become_openais() -> None:
    class Calling(Engine):
        async def get_model_response(self, messages: list[dict[str, Any]], **kwargs: Any) -> ModelOutput:
            return ModelOutput(content="", tool_calls=[ToolCall("add", {"a": 1}), {"name": "go", "arguments": "{}"}])

    request = Request(model="m", prompt=[{"role": "user", "content": "?"}], sampling={"logprobs": True})
    message = asyncio.run(EngineClient(Calling()).complete(request)).message
    assert [(call["id"], call["function"]) for call in message["tool_calls"]] == [
        ("call_0", {"name": "add", "arguments": '{"a": 1}'}),
        ("call_1", {"name": "go", "arguments": "{}"}),
    ]


@pytest.mark.parametrize(
    ("backend", "trainer"), [("verl", fake_rllm.AgentTrainer), ("tinker", fake_rllm.UnifiedTrainer)]
)
def test_each_backend_gets_the_trainer_that_takes_it_and_as_many_rows_as_were_asked_for(
    backend: str, trainer: type
) -> None:
    settings = read_settings(
        {
            "verifiers": {"env_id": "arithmetic", "env_args": {"seed": 1}, "max_samples": 2},
            "backend": backend,
        }
    )
    made = make_trainer("the configuration", settings)
    assert type(made) is trainer
    assert len(made.given["train_dataset"]) == len(made.given["val_dataset"]) == 2
    assert made.given["workflow_args"]["vf_env"].get_dataset()[0]["prompt"]
    assert made.given["config"] == "the configuration"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "verifiers.env_id is missing"),
        ({"verifiers": {"env_id": "x", "env_arg": {}}}, "unknown setting verifiers.env_arg"),
        ({"verifiers": {"env_id": "x"}, "backend": "jax"}, "backend must be .* not 'jax'"),
        ({"verifiers": {"env_id": "x", "max_samples": 0}}, "must be 1 or more"),
    ],
)
def test_settings_that_are_wrong_say_so_before_anything_is_loaded(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_settings(config)


@pytest.mark.parametrize("name", ["train_verifiers.sh", "train_verifiers_tinker.sh", "test_train.sh"])
def test_the_scripts_hand_over_settings_that_we_read(name: str) -> None:
    text = (SCRIPTS / name).read_text()
    own = set(re.findall(r"\+verifiers\.(\w+)=", text))
    assert own <= {"env_id", "env_args", "sampling_args", "max_samples"}
    assert "env_id" in own
    assert re.search(r"\+backend=(verl|tinker)", text)
    assert text.startswith("#!/bin/bash")
    if "tinker" in text:
        assert "temperature=1.0" in text


def test_without_hydra_the_command_line_ends_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hydra", None)
    with pytest.raises(SystemExit, match=r"needs Hydra: pip install 'verifiers\[rllm\]'"):
        main()
