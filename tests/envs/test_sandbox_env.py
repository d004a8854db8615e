"""SandboxEnv, PythonEnv and CodeMathEnv: code runs in the sandbox, its state lasts as long as the rollout."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import verifiers as vf
from tests.support.tool_calls import call, calling, tool_texts

LEVEL = vf.sandbox.level().name
needs_bash = pytest.mark.skipif(LEVEL != "full", reason=f"bash needs the full level of the sandbox, here is {LEVEL}")
pytestmark = pytest.mark.skipif(LEVEL == "none", reason="this machine can isolate nothing")

ROW = {"question": "Work.", "answer": "4"}


def run(command: str) -> dict[str, Any]:
    return calling(call("bash", {"command": command}))


def cell(code: str) -> dict[str, Any]:
    return calling(call("python", {"code": code}))


def roll_out(env: vf.Environment, *replies: Any, **row: Any) -> vf.State:
    state: vf.State = env.rollout({**ROW, **row}, vf.FakeClient(list(replies)), "fake")
    env.close()
    return state


@needs_bash
def test_a_shell_keeps_its_folder_and_files_go_in_and_out() -> None:
    env = vf.SandboxEnv(dataset=[ROW], files={"in.txt": "one\ntwo\n"}, collect=["out.txt", "missing.txt"])
    state = roll_out(
        env,
        run("wc -l < in.txt; mkdir -p d; x=7"),
        run("cd d; echo $x > ../out.txt; pwd | tail -c 3"),
        run("exit 3"),
        "done",
    )
    assert state["error"] is None
    first, second, third = tool_texts(state)
    assert first.strip() == "2"
    assert second.strip().endswith("d")
    assert "3" in third
    assert state["files"] == {"out.txt": "7\n"}


@needs_bash
def test_a_row_brings_files_of_its_own_and_rewards_read_what_was_collected() -> None:
    def kept(state: vf.State) -> float:
        return float(state["files"]["sum.txt"])

    env = vf.SandboxEnv(dataset=[ROW], files={"a": "1"}, collect=["sum.txt"], rubric=vf.Rubric([kept]))
    rows = [{"question": "?", "info": {"files": {"b": str(i)}}} for i in (2, 3)]
    client = vf.FakeClient(
        lambda messages: "ok" if messages[-1]["role"] == "tool" else run("echo $(($(cat a)+$(cat b))) > sum.txt")
    )
    results = env.generate(rows, client, "fake", use_tqdm=False)
    env.close()
    assert results["rewards"] == [3.0, 4.0]
    assert results.scored[0]["metrics"]["bash_calls"] == 1.0


def test_python_keeps_its_variables_through_the_rollout_and_no_longer() -> None:
    env = vf.PythonEnv(dataset=[ROW], packages=[])
    replies = [cell("x = 20"), cell("print('hi'); x + 1"), cell("1 / 0"), "done"]
    for _ in range(2):
        state = env.rollout(ROW, vf.FakeClient(list(replies)), "fake")
        first, second, third = tool_texts(state)
        assert (first, second) == ("(no output)", "hi\n21")
        assert "ZeroDivisionError" in third
    fresh = env.rollout(ROW, vf.FakeClient([cell("x"), "done"]), "fake")
    assert "NameError" in tool_texts(fresh)[0]
    assert env.sessions._open == {}
    env.close()
    assert (state["metrics"], state["cells"]) == (None, ["ok", "ok", "error"])


def test_python_is_called_with_the_rollout_by_position_or_with_the_id_of_its_sandbox() -> None:
    class Reading(vf.PythonEnv):
        async def post_rollout(self, state: vf.State) -> None:
            state["read"] = [await self.python("x", state), await self.python("x", state["sandbox_id"])]

    state = roll_out(Reading(dataset=[ROW]), cell("x = 6 * 7"), "done")
    assert state["error"] is None
    assert state["read"] == ["42", "42"]


def test_post_rollout_may_be_written_for_the_messages_and_the_state_as_in_0_1_7() -> None:
    class Reading(vf.PythonEnv):
        async def post_rollout(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> None:  # type: ignore[override]
            state["read"] = [message["role"] for message in messages], await self.python("x", state)

    state = roll_out(Reading(dataset=[ROW]), cell("x = 6 * 7"), "done")
    assert state["error"] is None
    assert state["read"] == (["user", "assistant", "tool", "assistant"], "42")


@needs_bash
def test_bash_is_called_with_the_rollout_by_position_or_with_the_id_of_its_sandbox() -> None:
    class Reading(vf.SandboxEnv):
        async def post_rollout(self, state: vf.State) -> None:
            state["read"] = [await self.bash("echo $x", state), await self.bash("echo $x", state["sandbox_id"])]

    state = roll_out(Reading(dataset=[ROW]), run("x=42"), "done")
    assert state["error"] is None
    assert [one.strip() for one in state["read"]] == ["42", "42"]


def test_the_tools_schema_shows_the_code_and_nothing_else() -> None:
    env = vf.PythonEnv(dataset=[ROW])
    assert env.oai_tools is not None
    (tool,) = env.oai_tools
    assert tool["function"]["name"] == "python"
    assert list(tool["function"]["parameters"]["properties"]) == ["code"]


def test_a_cell_that_runs_too_long_is_told_and_the_loss_of_state_too() -> None:
    env = vf.PythonEnv(dataset=[ROW], packages=[], timeout_s=0.5)
    endless = "import signal, os\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nx = 2\nwhile True: pass"
    state = roll_out(env, cell("x = 1"), cell(endless), cell("print(2)"), "done")
    assert state["error"] is None
    _, late, after = tool_texts(state)
    assert "timeout" in late
    assert after.endswith("2")
    results = vf.PythonEnv(dataset=[ROW], packages=[]).evaluate(vf.FakeClient([cell("1/0"), "x"]), "m", use_tqdm=False)
    assert results.scored[0]["metrics"]["failed_cells"] == 1.0


def test_two_cells_of_one_turn_run_in_order_in_the_same_session() -> None:
    env = vf.PythonEnv(dataset=[ROW], packages=[])
    twice = calling(call("python", {"code": "x = 1"}), call("python", {"code": "x + 1"}))
    assert tool_texts(roll_out(env, twice, "done")) == ["(no output)", "2"]


def test_further_tools_stand_beside_python_and_the_environment_travels() -> None:
    def double(x: int) -> int:
        return 2 * x

    env = vf.PythonEnv(tools=[vf.tools.calculator], dataset=[ROW], packages=[])
    env.add_tool(double)
    assert list(env.tool_map) == ["calculator", "python", "double"]
    env.remove_tool(double)
    copy = pickle.loads(pickle.dumps(env))
    assert tool_texts(roll_out(copy, cell("6 * 7"), "done")) == ["42"]


def test_python_may_be_called_in_tags() -> None:
    env = vf.PythonEnv(dataset=[ROW], packages=[], parser=vf.XMLParser(["reasoning", ("tool", "answer")]))
    state = roll_out(env, '<tool>{"name": "python", "arguments": {"code": "2 + 2"}}</tool>', "<answer>4</answer>")
    assert state["completion"][1]["content"] == "<result>\n4\n</result>"


def test_settings_of_rented_sandboxes_are_accepted_with_one_warning() -> None:
    with pytest.warns(UserWarning, match="cpu_cores, docker_image: no effect"):
        env = vf.SandboxEnv(dataset=[ROW], docker_image="python:3.11", cpu_cores=2, memory_gb=1)
    assert env.sessions._settings["memory_mb"] == 1024
    with pytest.raises(TypeError, match="collect must be a list"):
        vf.SandboxEnv(dataset=[ROW], collect="out.txt")


def test_files_that_are_none_are_the_rows_fault_and_not_the_models() -> None:
    env = vf.PythonEnv(dataset=[ROW], packages=[])
    for files in (["a"], {"a": 1}):
        state = roll_out(env, cell("1"), info={"files": files})
        assert isinstance(state["error"], vf.HookError)
        assert "info['files'] must map names to texts" in str(state["error"])
    state = roll_out(env, cell("open('a').read()"), "done", info={"files": {"a": "hej"}})
    assert tool_texts(state) == ["'hej'"]


# --- CodeMathEnv --------------------------------------------------------------------------------------------------


def test_code_in_tags_is_run_and_the_answer_is_compared_as_mathematics() -> None:
    env = vf.CodeMathEnv(dataset=[{"question": "1/2 + 1/4?", "answer": "3/4"}], packages=[])
    client = vf.FakeClient(["<code>\nx = 0.5\n</code>", "Hm.", "<code>print(x + 0.25)</code>", "<answer>0.75</answer>"])
    results = env.evaluate(client, "fake", use_tqdm=False)
    env.close()
    assert results["rewards"] == [1.0]
    shown = [message["content"] for message in results["completion"][0] if message["role"] == "user"]
    assert shown[0] == "<output>\n(no output)\n</output>"
    assert "neither a <code> nor an <answer>" in shown[1]
    assert shown[2] == "<output>\n0.75\n</output>"
    assert results.scored[0]["metrics"]["cells"] == 2.0
    assert results["stop_conditions"] == ["answer_given"]


def test_a_parser_without_a_code_field_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a code field"):
        vf.CodeMathEnv(dataset=[ROW], parser=vf.XMLParser(["answer"]))
