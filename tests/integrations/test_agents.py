"""Agents of other frameworks in `vf.AgentEnv` (slow): the real packages, in an environment of their own."""

from __future__ import annotations

import pytest

from tests.support.venvs import python_with, run_contract

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def test_openai_agents_and_langgraph_are_played_as_they_are_with_sub_agents_streams_and_parallel_calls() -> None:
    python = python_with("agents", "openai-agents", "langgraph", "langchain-openai")
    said = run_contract(python, "agents_contract.py")
    assert "openai-agents done" in said
    assert "langgraph done" in said
