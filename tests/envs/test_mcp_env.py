"""MCPEnv against a real server of the official package, as a process of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("mcp")

import verifiers as vf
from tests.support.tool_calls import call, calling, tool_texts
from verifiers.envs.experimental.mcp_env import MCPServerConfig
from verifiers.tools.mcp_config import MAX_TRACEBACKS

SCRIPT = Path(__file__).parents[1] / "tools" / "mcp_script.py"
PAGES = SCRIPT.with_name("mcp_pages.py")
ODD = SCRIPT.with_name("mcp_odd.py")
SECRET = "tok-3d7f9a/Very+Secret"
ROW = {"question": "?", "answer": ""}


def server(name: str = "tiny", *args: str, **settings: Any) -> dict[str, Any]:
    return {"name": name, "command": sys.executable, "args": [str(SCRIPT), *args], **settings}


def odd(*args: str, **settings: Any) -> dict[str, Any]:
    given = {"name": "odd", "command": sys.executable, "args": [str(ODD), *args], "env": {"ODD_SETTING": SECRET}}
    return {**given, **settings}


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
    assert [tool["function"]["name"] for tool in client.requests[0].tools or ()] == [
        *("add", "fail", "wait", "end", "count", "authorization")
    ]
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
    with pytest.raises(vf.InfraError, match="'tiny' does not list its tools: the server sends the page '2' repeatedly"):
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
    assert "the MCP server 'tiny' ended" in str(state["error"])
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
    with pytest.raises(ValueError, match="at least one server in mcp_servers"):
        vf.MCPEnv(mcp_servers=[], dataset=[ROW])
    with pytest.raises(TypeError, match="name, command, args, env, description"):
        vf.MCPEnv(mcp_servers=[{"name": "x", "cmd": "y"}], dataset=[ROW])
    with pytest.raises(ValueError, match="two MCP servers are named 'x'"):
        vf.MCPEnv(mcp_servers=[{"name": "x", "command": "y"}] * 2, dataset=[ROW])
    with pytest.raises(TypeError, match="args of the MCP server 'x' must be a list"):
        vf.MCPEnv(mcp_servers=[{"name": "x", "command": "y", "args": "z"}], dataset=[ROW])
    with pytest.raises(TypeError, match="'x' needs either a command or a url, not both"):
        vf.MCPEnv(mcp_servers=[{"name": "x"}], dataset=[ROW])
    with pytest.raises(TypeError, match="'x' needs either a command or a url, not both"):
        vf.MCPEnv(mcp_servers=[{"name": "x", "command": "y", "url": "http://z"}], dataset=[ROW])
    with pytest.raises(TypeError, match="env has no effect on the MCP server 'x', which has a url"):
        vf.MCPEnv(mcp_servers=[{"name": "x", "url": "http://z", "env": {"A": "b"}}], dataset=[ROW])


def test_an_environment_that_is_copied_starts_servers_of_its_own() -> None:
    env = vf.MCPEnv(mcp_servers=[server()], dataset=[ROW])
    env.connect()
    copy = pickle.loads(pickle.dumps(env))
    env.close()
    assert tool_texts(roll_out(copy, calling(call("add", {"a": 1, "b": 1})), "2")) == ["2"]
    copy.close()
    assert not env.servers[0].is_running


# --- ends ---------------------------------------------------------------------------------------------------------


def test_one_call_that_kills_the_server_fails_its_own_rollout_and_the_other_nineteen_go_on() -> None:
    rows = [{"question": str(i), "answer": ""} for i in range(20)]

    def model(messages: Any) -> Any:
        if messages[-1]["role"] == "tool":
            return "done"
        return calling(call("die") if messages[-1]["content"] == "7" else call("count", {"seconds": 0.05}))

    env = vf.MCPEnv(mcp_servers=[odd()], dataset=rows)
    results = env.evaluate(vf.FakeClient(model), "fake", use_tqdm=False)
    env.close()
    errors = {state["input"]["example_id"]: repr(state["error"]) for state in results.failed}
    assert list(errors) == [7], errors
    assert isinstance(results.failed[0]["error"], vf.InfraError)
    assert "the MCP server 'odd' ended twice when 'die' was called" in errors[7]
    assert all(tool_texts(state)[0].startswith("count ") for state in results.scored)


def test_a_server_that_ends_while_it_lists_its_tools_is_asked_again_and_no_rollout_fails(tmp_path: Path) -> None:
    """A call of another rollout may have ended it."""
    env = vf.MCPEnv(mcp_servers=[odd("--ends-once", str(tmp_path / "ended"))], dataset=[ROW])
    state = roll_out(env, calling(call("count")), "")
    env.close()
    assert state["error"] is None
    assert tool_texts(state) == ["count 1"]


def test_a_server_that_ended_between_two_calls_is_started_again_and_no_rollout_fails() -> None:
    env = vf.MCPEnv(mcp_servers=[odd()], dataset=[ROW])
    pids = []
    for _ in range(3):
        pids += [int(said) for said in tool_texts(roll_out(env, calling(call("pid")), ""))]
        os.kill(pids[-1], signal.SIGKILL)
    env.close()
    assert len(set(pids)) == 3


# --- names and results --------------------------------------------------------------------------------------------


def test_tools_with_names_that_no_endpoint_takes_are_renamed_for_the_model_and_called_by_their_own() -> None:
    env = vf.MCPEnv(mcp_servers=[odd()], dataset=[ROW])
    env.connect()
    names = list(env.tool_map)
    assert len(set(names)) == len(names) == 13
    assert all(re.fullmatch("[A-Za-z0-9_-]{1,64}", name) for name in names)
    assert [tool["function"]["name"] for tool in env.oai_tools or ()] == names
    said = [tool_texts(roll_out(env, calling(call(name)), ""))[0].rsplit(" ", 1)[0] for name in names[:4]]
    env.close()
    assert said == ["bad.name/x", "bad name/x", "n" * 100, "n" * 99 + "m"]


def test_an_argument_named_self_reaches_the_server() -> None:
    env = vf.MCPEnv(mcp_servers=[odd()], dataset=[ROW])
    (said,) = tool_texts(roll_out(env, calling(call("count", {"self": "me", "function": "f"})), ""))
    env.close()
    assert said == "count 1"


def test_a_result_that_is_only_structured_arrives_as_json() -> None:
    env = vf.MCPEnv(mcp_servers=[odd()], dataset=[ROW])
    (said,) = tool_texts(roll_out(env, calling(call("structured")), ""))
    env.close()
    assert json.loads(said) == {"n": 1, "token": "[hidden]"}


# --- secrets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [["--broken"], []])
def test_the_values_of_a_servers_environment_are_nowhere(
    args: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    settings = [odd(*args)]
    turns = [
        calling(call(name, {"as_error": name == "tell"})) for name in ("tell", "raise", "noise", "structured", "die")
    ]
    env = vf.MCPEnv(
        mcp_servers=settings,
        dataset=[ROW],
        env_args={"mcp_servers": settings},
        parser=None if args else vf.XMLParser(["tool", "answer"]),
    )
    if not args:
        turns = [f'<tool>{{"name": "{name}"}}</tool>' for name in ("tell", "raise", "noise", "structured", "die")]
    results = env.evaluate(
        vf.FakeClient(turns),
        "fake",
        use_tqdm=False,
        results_path=tmp_path / "run",
        state_columns=["tool_log", "trajectory", "oai_tools"],
    )
    env.close()
    (state,) = results.failed
    written = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    shown = [
        repr(state),
        "".join(traceback.format_exception(state["error"])),
        repr(env.servers[0].config),
        str(results),
    ]
    for text in [*written, *shown, caplog.text, *capfd.readouterr()]:
        assert SECRET not in text
    assert "[hidden]" in "".join(written)


def test_a_secret_is_not_shown_in_part_where_the_servers_last_words_are_cut() -> None:
    env = vf.MCPEnv(mcp_servers=[odd("--broken-late")], dataset=[ROW])
    said = str(roll_out(env, "x")["error"])
    assert said.endswith("y" * 900)
    assert SECRET[-6:] not in said
    assert len(said) < 2000


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="it looks at the files that are open")
def test_a_server_that_never_stops_talking_fills_neither_a_disk_nor_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def in_files() -> int:
        found = [os.stat(path) for path in Path("/proc/self/fd").iterdir() if path.exists() or path.is_symlink()]
        return sum(file.st_size for file in found if stat.S_ISREG(file.st_mode))

    env = vf.MCPEnv(mcp_servers=[odd()], dataset=[ROW])
    before = in_files()
    state = roll_out(env, calling(call("spew")), calling(call("spew")), "Done.")
    held = in_files() - before
    env.close()
    assert tool_texts(state) == ["spew 1", "spew 2"]
    assert held < 1 << 20
    assert len([record for record in caplog.records if record.exc_info or record.exc_text]) <= MAX_TRACEBACKS


@pytest.mark.parametrize("args", [["--api-key", SECRET], [f"--token={SECRET}"]])
def test_a_key_among_the_arguments_is_hidden_too(args: list[str]) -> None:
    config = MCPServerConfig(name="x", command="y", args=["--root", "/tmp", *args])
    assert SECRET not in repr(config)
    assert "/tmp" in repr(config)
    assert config.hide(f"unknown key {SECRET}") == "unknown key [hidden]"


def test_a_path_that_a_server_is_given_is_no_secret(tmp_path: Path) -> None:
    env = vf.MCPEnv(mcp_servers=[{**odd(), "env": {"ODD_SETTING": str(tmp_path)}}], dataset=[ROW])
    assert tool_texts(roll_out(env, calling(call("tell")), "")) == [f"the token is {tmp_path}"]
    env.close()


# --- a server for each rollout ------------------------------------------------------------------------------------


def count_twice(messages: Any) -> Any:
    return "done" if len(messages) > 4 else calling(call("count"))


def test_a_shared_server_carries_state_from_rollout_to_rollout_and_one_for_each_does_not() -> None:
    for per_rollout in (False, True):
        env = vf.MCPEnv(mcp_servers=[odd()], dataset=[ROW], per_rollout=per_rollout)
        results = env.evaluate(vf.FakeClient(count_twice), "fake", rollouts_per_example=4, use_tqdm=False)
        counted = [tool_texts(state) for state in results.scored]
        env.close()
        assert not results.failed
        assert (counted == [["count 1", "count 2"]] * 4) is per_rollout
        assert len({said for pair in counted for said in pair}) == (2 if per_rollout else 8)


def test_the_server_of_a_rollout_ends_with_it() -> None:
    env = vf.MCPEnv(mcp_servers=[odd()], dataset=[ROW], per_rollout=True)
    (pid,) = tool_texts(roll_out(env, calling(call("pid")), ""))
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    env.close()


# --- over HTTP ----------------------------------------------------------------------------------------------------


@pytest.fixture
def far() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server over HTTP, and its address."""
    listening = [sys.executable, str(SCRIPT), "--http"]
    with subprocess.Popen(listening, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
        finally:
            process.kill()


@pytest.fixture
def url(far: tuple[subprocess.Popen[str], str]) -> str:
    return far[1]


def test_a_server_is_reached_over_http_with_headers_that_stay_hidden(url: str) -> None:
    headers = {"Authorization": f"Bearer {SECRET}"}
    env = vf.MCPEnv(mcp_servers=[{"name": "far", "url": url, "headers": headers}], dataset=[ROW])
    state = roll_out(env, calling(call("add", {"a": 1, "b": 2}), call("authorization")), "3")
    assert state["error"] is None
    assert tool_texts(state) == ["3", "[hidden]"]
    assert SECRET not in repr(env.servers[0].config)
    env.close()


def test_over_http_each_rollout_may_have_a_session_of_its_own(url: str) -> None:
    for per_rollout in (False, True):
        env = vf.MCPEnv(mcp_servers=[{"name": "far", "url": url}], dataset=[ROW], per_rollout=per_rollout)
        results = env.evaluate(vf.FakeClient(count_twice), "fake", rollouts_per_example=3, use_tqdm=False)
        env.close()
        assert [str(state["error"]) for state in results.failed] == []
        assert ([tool_texts(state) for state in results.scored] == [["1", "2"]] * 3) is per_rollout


def test_a_server_that_cannot_be_reached_fails_the_rollout_and_says_so() -> None:
    address = f"http://me:{quote(SECRET, safe='')}@127.0.0.1:9/mcp"
    env = vf.MCPEnv(mcp_servers=[{"name": "far", "url": address}], dataset=[ROW])
    state = roll_out(env, "x")
    env.close()
    assert isinstance(state["error"], vf.InfraError)
    assert "the MCP server 'far' (http://me:[hidden]@127.0.0.1:9/mcp) failed" in str(state["error"])
    shown = "".join(traceback.format_exception(state["error"]))
    assert SECRET not in shown
    assert quote(SECRET, safe="") not in shown


def test_a_server_over_http_that_goes_away_fails_the_rollout(far: tuple[subprocess.Popen[str], str]) -> None:
    process, url = far
    env = vf.MCPEnv(mcp_servers=[{"name": "far", "url": url}], dataset=[ROW])
    adding = calling(call("add", {"a": 1, "b": 2}))
    assert tool_texts(roll_out(env, adding, "3")) == ["3"]
    process.kill()
    process.wait()
    state = roll_out(env, adding, "3")
    env.close()
    assert isinstance(state["error"], vf.InfraError)


def test_calls_of_one_turn_to_a_sequential_server_run_in_order() -> None:
    waits = [call("count", {"seconds": 0.3 - 0.1 * i}) for i in range(3)]
    env = vf.MCPEnv(mcp_servers=[odd(sequential=True)], dataset=[ROW])
    assert tool_texts(roll_out(env, calling(*waits), "")) == ["count 1", "count 2", "count 3"]
    assert all(tool.sequential for tool in env.toolbox)
    env.close()
