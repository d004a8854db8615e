"""Agents of other frameworks in `vf.AgentEnv` (slow): the real packages, in an environment of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.venvs import python_with, run_contract

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def test_openai_agents_and_langgraph_are_played_as_they_are_with_sub_agents_streams_and_parallel_calls() -> None:
    python = python_with("agents", "openai-agents", "langgraph", "langchain-openai")
    said = run_contract(python, "agents_contract.py")
    assert "openai-agents done" in said
    assert "langgraph done" in said


def test_openai_agents_and_langgraph_on_a_model_that_samples_have_its_very_tokens_and_logprobs(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tests.engine.support.served import NAME, save_model, serving

    python = python_with("agents", "openai-agents", "langgraph", "langchain-openai")
    save_model(tmp_path / "model")
    with serving(tmp_path / "model", "--name", NAME, "--rows", "4", "--length", "2048") as server:
        said = run_contract(python, "agents_contract.py", server.url)
    steps = [json.loads(line) for line in said.splitlines()]
    assert len(steps) == 2 * 2 * 3
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    for step in steps:
        prompt, reply = step["prompt_ids"], step["completion_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(reply)[:, None])[:, 0]
        assert (logprobs - torch.tensor(step["completion_logprobs"])).abs().max() < 1e-4
