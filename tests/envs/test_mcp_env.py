"""MCPEnv against a real server of the official package, as a process of its own."""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

import verifiers as vf
from tests.support.tool_calls import call, calling, tool_texts
from verifiers.envs.experimental.mcp_env import MCPServerConfig

SCRIPT = Path(__file__).parents[1] / "tools" / "mcp_script.py"
PAGES = SCRIPT.with_name("mcp_pages.py")
ROW = {"question": "?", "answer": ""}


def server(name: str = "tiny", *args: str, **settings: Any) -> dict[str, Any]:
    return {"name": name, "command": sys.executable, "args": [str(SCRIPT), *args], **settings}


@pytest.fixture
def env() -> Iterator[vf.MCPEnv]:
    made = vf.MCPEnv(mcp_servers=[server()], dataset=[ROW])
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mcp-")]


def roll_out(env: vf.MCPEnv, *replies: Any) -> vf.State:
    state: vf.State = env.rollout(ROW, vf.FakeClient(list(replies)), "fake")
    return state


def test_the_servers_tools_are_offered_and_called(env: vf.MCPEnv) -> None:
    assert env.tools == []  # nothing is started before the first rollout
    client = vf.FakeClient(
        [calling(call("add", {"a": 2, "b": "3"}), call("add", {"a": 1}), call("fail", {"why": "x"})), "5"]
    )
    state = env.rollout(ROW, client, "fake")
    assert [tool["function"]["name"] for tool in client.requests[0].tools or ()] == ["add", "fail", "wait", "end"]
    good, missing, failed = tool_texts(state)
    assert good == "5"
    assert missing == "Error: add needs the argument 'b'; it takes a, b"
    assert failed.startswith("Error: ")
    assert "fail" in failed
    assert [noted["fault"] for noted in state["tool_log"]] == [None, "missing_argument", "exception"]


def test_tools_that_are_listed_page_by_page_are_all_there() -> None:
    env = vf.MCPEnv(mcp_servers=[{**server(), "args": [str(PAGES)]}], dataset=[ROW])
    env.connect()
    assert list(env.tool_map) == ["first", "second", "third"]
    env.close()


def test_a_server_that_lists_one_page_for_ever_is_refused() -> None:
    env = vf.MCPEnv(mcp_servers=[{**server(), "args": [str(PAGES), "--endless"]}], dataset=[ROW])
    with pytest.raises(vf.InfraError, match="'tiny' does not list its tools: it sends the page '2' over and over"):
        env.connect()
    env.close()


def test_rollouts_share_the_server_from_any_loop(env: vf.MCPEnv) -> None:
    client = vf.FakeClient(
        lambda messages: "ok" if messages[-1]["role"] == "tool" else calling(call("add", {"a": 1, "b": 1}))
    )
    for _ in range(2):
        results = env.evaluate(client, "fake", rollouts_per_example=8, use_tqdm=False)
        assert not results.failed
        assert all(tool_texts(state) == ["2"] for state in results.scored)

    async def once() -> Any:
        return await env.rollout(ROW, client, "fake")

    assert tool_texts(asyncio.run(once())) == ["2"]


def test_a_server_that_ends_fails_its_rollout_and_the_next_one_starts_it_again(env: vf.MCPEnv) -> None:
    state = roll_out(env, calling(call("end")))
    assert isinstance(state["error"], vf.InfraError)
    assert "the MCP server 'tiny' has ended" in str(state["error"])
    assert tool_texts(roll_out(env, calling(call("add", {"a": 1, "b": 1})), "2")) == ["2"]


def test_a_tool_that_takes_too_long_is_given_up() -> None:
    env = vf.MCPEnv(mcp_servers=[MCPServerConfig(**server(timeout_s=0.2))], dataset=[ROW])
    assert tool_texts(roll_out(env, calling(call("wait", {"seconds": 3})), "")) == [
        "Error: wait took longer than 0.2 seconds"
    ]
    env.close()


def test_tools_of_the_same_name_get_their_servers_in_front_and_tags_tell_of_them() -> None:
    env = vf.MCPEnv(
        mcp_servers=[server("one"), server("two")],
        dataset=[ROW],
        parser=vf.XMLParser(["reasoning", ("tool", "answer")]),
    )
    said = ['<tool>{"name": "two_add", "arguments": {"a": 1, "b": 2}}</tool>', "<answer>3</answer>"]
    state = roll_out(env, *said)
    env.close()
    assert state["completion"][1]["content"] == "<result>\n3\n</result>"
    assert "one_add: Add two numbers." in state["prompt"][0]["content"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (server("tiny", "--broken"), "it cannot start"),
        ({"name": "none", "command": "no-such-program"}, "No such file"),
    ],
)
def test_a_server_that_does_not_start_fails_the_rollout_and_says_why(config: Any, message: str) -> None:
    env = vf.MCPEnv(mcp_servers=[config], dataset=[ROW])
    state = roll_out(env, "x")
    assert isinstance(state["error"], vf.InfraError)
    assert message in str(state["error"])


def test_servers_are_checked_when_the_environment_is_made() -> None:
    with pytest.raises(ValueError, match="at least one of mcp_servers"):
        vf.MCPEnv(mcp_servers=[], dataset=[ROW])
    with pytest.raises(TypeError, match="name, command, args, env, description"):
        vf.MCPEnv(mcp_servers=[{"name": "x", "cmd": "y"}], dataset=[ROW])
    with pytest.raises(ValueError, match="two MCP servers are named 'x'"):
        vf.MCPEnv(mcp_servers=[{"name": "x", "command": "y"}] * 2, dataset=[ROW])
    with pytest.raises(TypeError, match="args of the MCP server 'x' must be a list"):
        vf.MCPEnv(mcp_servers=[{"name": "x", "command": "y", "args": "z"}], dataset=[ROW])


def test_an_environment_that_is_copied_starts_servers_of_its_own() -> None:
    env = vf.MCPEnv(mcp_servers=[server()], dataset=[ROW])
    env.connect()
    copy = pickle.loads(pickle.dumps(env))
    env.close()
    assert tool_texts(roll_out(copy, calling(call("add", {"a": 1, "b": 1})), "2")) == ["2"]
    copy.close()
    assert not env.servers[0].is_running
