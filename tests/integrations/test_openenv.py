"""Environments of OpenEnv: their actions as tools, against a stand-in of the protocol, and (slow) the real package."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

import verifiers as vf
from tests.integrations.fake_openenv import ADD, GUESS, GuessServer
from tests.support.venvs import python_with, run_contract


def called(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def guesser(messages: Any) -> Any:
    """Counts upwards from 0 until it is told that it is right."""
    tries = sum(message["role"] == "tool" for message in messages)
    return called("guess", number=tries)


def play(env: vf.Environment, reply: Any = guesser, **kwargs: Any) -> Any:
    return env.evaluate(client=vf.FakeClient(reply, tokens=True), model="m", use_tqdm=False, **kwargs)


def test_a_row_is_an_episode_its_actions_are_tools_and_its_rewards_the_score() -> None:
    with GuessServer() as server:
        results = play(vf.OpenEnv(server.url, num_episodes=3))
    assert results["rewards"] == [1.0, 1.0, 1.0]
    state = results.rollouts[2]
    assert state["prompt"][-1] == {"role": "user", "content": "Guess a number."}
    (tool,) = state["oai_tools"]
    assert tool["function"]["name"] == "guess"
    assert tool["function"]["description"] == "Guess the number."
    assert list(tool["function"]["parameters"]["properties"]) == ["number"]
    answers = [message["content"] for message in state["completion"] if message["role"] == "tool"]
    assert answers == ["more", "more", "right"]
    assert state["env_rewards"] == [0.0, 0.0, 1.0]
    assert state["stop_condition"] == "episode_done"
    assert server.open == 0


def test_rows_of_ones_own_say_how_an_episode_begins() -> None:
    rows = [{"question": "Play well.", "info": {"reset": {"seed": 1}}}]
    with GuessServer() as server:
        (state,) = play(vf.OpenEnv(server.url, rows, system_prompt=None)).rollouts
    assert [message["content"] for message in state["prompt"]] == ["Play well.", "Guess a number."]
    assert state["reward"] == 1.0


def test_the_tools_of_an_mcp_environment_are_tools_here() -> None:
    def reply(messages: Any) -> Any:
        return called("add", a=2, b=3) if messages[-1]["role"] == "user" else "It is 5."

    with GuessServer(is_mcp=True) as server:
        (state,) = play(vf.OpenEnv(server.url, num_episodes=1), reply).rollouts
    assert state["completion"][1]["content"] == "5"
    assert state["reward"] == 0.5
    assert state["stop_condition"] == "no_tools_called"


def test_an_action_that_the_server_refuses_is_told_to_the_model() -> None:
    def reply(messages: Any) -> Any:
        tries = sum(message["role"] == "tool" for message in messages)
        return (called("guess", number="x"), called("guess", number=13), called("guess", number=0))[tries]

    with GuessServer() as server:
        (state,) = play(vf.OpenEnv(server.url, num_episodes=1), reply).rollouts
    answers = [message["content"] for message in state["completion"] if message["role"] == "tool"]
    assert "number" in answers[0]
    assert "13 is bad luck" in answers[1]
    assert state["reward"] == 1.0


def test_rollouts_wait_for_a_server_that_takes_few_sessions() -> None:
    with GuessServer(sessions=1) as server:
        results = play(vf.OpenEnv(server.url, num_episodes=4))
        assert results["rewards"] == [1.0] * 4
        assert server.most_open == 1
        assert server.refused > 0
        with pytest.raises(ValueError, match="wait_s"):
            vf.OpenEnv(server.url, wait_s=-1)


def test_a_server_that_is_not_there_or_gives_no_reward_fails_the_rollout() -> None:
    (state,) = play(vf.OpenEnv("http://127.0.0.1:9", num_episodes=1)).rollouts
    assert isinstance(state["error"], vf.InfraError)
    assert "http://127.0.0.1:9" in str(state["error"])
    with GuessServer(has_rewards=False) as server:
        (state,) = play(vf.OpenEnv(server.url, num_episodes=1)).rollouts
    assert isinstance(state["error"], vf.GraderError)
    assert "gave no reward" in str(state["error"])


def test_a_server_that_dies_or_talks_nonsense_in_an_episode_fails_the_rollout() -> None:
    for answer, kind, said in (
        (None, vf.InfraError, "closed the session"),
        ("{not json", vf.InfraError, "not a message of its protocol"),
        ("[1]", vf.InfraError, "not a message of its protocol"),
        ('{"type": "observation", "data": [1]}', vf.InfraError, "not a message of its protocol"),
        ('{"type": "observation", "data": "x"}', vf.InfraError, "not a message of its protocol"),
        ('{"type": "observation"}', vf.GraderError, "gave no reward"),
    ):
        with GuessServer(answer=answer) as server:
            (state,) = play(vf.OpenEnv(server.url, num_episodes=1)).rollouts
        assert isinstance(state["error"], kind), state["error"]
        assert said in str(state["error"])
        assert state["reward"] is None


@pytest.mark.parametrize("code", ["EXECUTION_ERROR", "VALIDATION_ERROR"])
def test_an_episode_that_the_server_cannot_begin_is_its_failure_and_no_zero(code: str) -> None:
    refused = {"type": "error", "data": {"message": "no such level", "code": code}}
    with GuessServer(begins=refused) as server:
        (state,) = play(vf.OpenEnv(server.url, num_episodes=1)).rollouts
    assert isinstance(state["error"], vf.InfraError)
    assert "could not start an episode: no such level" in str(state["error"])
    assert state["reward"] is None


@pytest.mark.parametrize(("reward", "done"), [('"1.0"', "true"), ("[1]", "true"), ("1.0", '"false"'), ("1.0", "1")])
def test_a_reward_that_is_no_number_and_an_end_that_is_neither_yes_nor_no_fail_the_rollout(
    reward: str, done: str
) -> None:
    answer = f'{{"type": "observation", "data": {{"observation": null, "reward": {reward}, "done": {done}}}}}'
    with GuessServer(answer=answer) as server:
        (state,) = play(vf.OpenEnv(server.url, num_episodes=1)).rollouts
    assert isinstance(state["error"], vf.InfraError)
    assert "these must be a number and a boolean" in str(state["error"])


@pytest.mark.parametrize(
    "odd",
    [
        {"action": {"properties": [1]}},
        {"action": {"properties": {"number": 5}}},
        {"action": {"oneOf": [5]}},
        {"action": {"oneOf": [GUESS, GUESS]}},
        {"is_mcp": True, "listed": [{}]},
        {"is_mcp": True, "listed": [ADD, ADD]},
        {"is_mcp": True, "listed": [{"name": "add", "input_schema": "x"}]},
    ],
)
def test_actions_that_are_no_tools_fail_every_rollout_and_none_is_played_with_a_part_of_them(odd: Any) -> None:
    with GuessServer(**odd) as server:
        env = vf.OpenEnv(server.url, num_episodes=2)
        for state in play(env).rollouts:
            assert isinstance(state["error"], vf.InfraError)
            assert "cannot be made into tools" in str(state["error"])
        assert not list(env.toolbox)


def test_a_package_that_is_not_installed_is_one_sentence() -> None:
    (state,) = play(vf.OpenEnv("no_such_openenv_package", num_episodes=1)).rollouts
    assert "pip install 'verifiers[openenv]'" in str(state["error"])


def test_an_openenv_environment_travels_to_other_processes() -> None:
    with GuessServer() as server:
        env = pickle.loads(pickle.dumps(vf.OpenEnv(server.url, num_episodes=1)))
        assert [play(env)["rewards"] for _ in range(2)] == [[1.0], [1.0]]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_real_package_serves_environments_that_are_played_here() -> None:
    python = python_with("openenv", "openenv>=0.10")
    assert "openenv done" in run_contract(python, "openenv_contract.py")
