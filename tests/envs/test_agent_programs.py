"""Agents that are command lines: what reaches them, what they print, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.envs.agent_programs import MARK, Program

ROWS = [{"question": "What is 2+2? Say 'four'; $HOME", "answer": "4", "info": {"level": 1}}]
CURL = r"""
set -e
body=$(python3 -c 'import json, sys
print(json.dumps({"model": "gpt-4o", "messages": [{"role": "user", "content": sys.stdin.read()}]}))')
curl --silent --fail --noproxy '*' "$OPENAI_BASE_URL/chat/completions" \
    --header "Authorization: Bearer $OPENAI_API_KEY" --header 'Content-Type: application/json' --data "$body" |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["message"]["content"])'
"""

ASK = """
import json, os, urllib.request
def ask(text):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
"""


def correct(completion: Any, answer: str) -> float:
    return float(bool(completion) and answer in completion[-1]["content"])


def make_env(run: Any, **kwargs: Any) -> vf.AgentEnv:
    return vf.AgentEnv(run=run, **{"dataset": ROWS, "rubric": vf.Rubric([correct]), **kwargs})


def play(env: vf.AgentEnv, reply: Any = "4", **kwargs: Any) -> vf.State:
    client = vf.FakeClient(reply, tokens=True)
    (state,) = env.evaluate(client=client, model="policy", use_tqdm=False, **kwargs).rollouts
    assert isinstance(state, vf.State)
    return state


def wait_until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def started_by(test: str) -> list[str]:
    """Processes that an agent of this test started, by what is in their environment."""
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = place.read_bytes()
            if MARK.encode() in variables and test.encode() in variables:
                found.append(place.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_shell_script_with_curl_is_an_agent(tmp_path: Path) -> None:
    script = tmp_path / "agent.sh"
    script.write_text(CURL)
    state = play(make_env(["bash", str(script)]))
    assert state["error"] is None
    assert state["reward"] == 1.0
    assert state["completion"] == [{"role": "assistant", "content": "4"}]
    assert state["trajectory"][0]["prompt"] == [{"role": "user", "content": ROWS[0]["question"]}]
    assert state["trajectory"][0]["tokens"]["completion_ids"]


def test_a_program_of_the_sdks_finds_its_endpoint_in_its_environment() -> None:
    code = """
import anthropic, openai, sys
asked = [{"role": "user", "content": sys.argv[1]}]
print(openai.OpenAI().chat.completions.create(model=sys.argv[2], messages=asked).choices[0].message.content)
print(anthropic.Anthropic().messages.create(model="claude", max_tokens=9, messages=asked).content[0].text)
"""
    state = play(make_env([sys.executable, "-c", code, "{prompt}", "{model}"]))
    assert state["completion"] == [{"role": "assistant", "content": "4\n4"}]
    assert [step["prompt"] for step in state["trajectory"]] == [[{"role": "user", "content": ROWS[0]["question"]}]] * 2


def test_placeholders_and_variables_say_what_the_row_is_and_no_shell_reads_them(monkeypatch: Any) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-somebodys-own")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "somebodys-own")
    code = "import os, sys; print(sys.argv[1:], os.environ['EXTRA'], os.environ['OPENAI_API_KEY'][:3], os.getcwd())"
    command = [sys.executable, "-c", code, "{prompt}", "{answer}", "{info}", "{{prompt}}", "${prompt}", '{"a": 1}']
    state = play(make_env(command, environment={"EXTRA": "more"}, cwd="/"))
    words = [ROWS[0]["question"], "4", '{"level":1}', "{prompt}", "${prompt}", '{"a": 1}']
    assert state["completion"][0]["content"] == f"{words} more vf- /"


def test_an_unknown_placeholder_is_refused_when_the_environment_is_made() -> None:
    with pytest.raises(ValueError, match=r"the unknown placeholder \{promt\}; it may have base_url"):
        make_env("agent --task {promt}")
    with pytest.raises(ValueError, match="is empty"):
        make_env("")


def test_the_prompt_is_on_the_standard_input_and_a_command_line_is_split_like_a_shell_would() -> None:
    state = play(make_env("sh -c 'tr a-z A-Z'"))
    assert state["completion"][0]["content"] == ROWS[0]["question"].upper()


def test_a_program_that_prints_nothing_gives_the_conversation() -> None:
    assert play(make_env([sys.executable, "-c", f"{ASK}\nask('hello')"]))["completion"] == [
        {"role": "assistant", "content": "4"}
    ]


def test_a_program_that_fails_or_cannot_be_started_is_a_failure_with_what_it_said() -> None:
    state = play(make_env("sh -c 'echo 4; echo not today >&2; exit 3'"))
    assert isinstance(state["error"], vf.HookError)
    assert "exit code 3: not today" in str(state["error"])
    assert state["reward"] is None
    assert state["agent_output"] == {"stdout": "4\n", "stderr": "not today\n", "exit_code": 3}
    assert "could not be started" in str(play(make_env("/no/such/agent"))["error"])
    assert "SIGKILL" in str(play(make_env("sh -c 'kill -9 $$'"))["error"])


def test_a_program_that_ends_for_a_refused_call_is_scored() -> None:
    code = f"{ASK}\nfor turn in range(9): ask(str(turn))"
    state = play(make_env([sys.executable, "-c", code], max_turns=2))
    assert state["error"] is None
    assert state["stop_condition"] == "max_turns_reached"
    assert state["reward"] == 1.0


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc here")


@needs_proc
def test_what_a_program_left_in_the_background_ends_with_it_even_in_a_session_of_its_own() -> None:
    state = play(make_env("sh -c 'sleep 600 & setsid sleep 600 & echo 4'", environment={"TEST": "background-73"}))
    assert state["reward"] == 1.0
    wait_until(lambda: not started_by("background-73"))


@needs_proc
def test_at_the_deadline_everything_that_the_program_started_is_killed() -> None:
    state = play(
        make_env(
            "sh -c 'sleep 600 & setsid sleep 600 & sleep 600'", agent_timeout_s=0.5, environment={"TEST": "deadline-73"}
        )
    )
    assert "within 0.5 s" in str(state["error"])
    assert state["reward"] is None
    wait_until(lambda: not started_by("deadline-73"))


@needs_proc
def test_a_cancelled_run_leaves_no_process() -> None:
    async def main() -> None:
        env = make_env("sh -c 'sleep 600 & sleep 600'", environment={"TEST": "cancelled-73"})
        task = asyncio.ensure_future(env.evaluate(client=vf.FakeClient("4"), model="m", use_tqdm=False))
        while not started_by("cancelled-73"):
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    wait_until(lambda: not started_by("cancelled-73"))


def test_words_of_a_command_line_keep_what_is_no_placeholder() -> None:
    program = Program(["a", "{prompt}{answer}", "x{prompt}}"], names=("prompt", "answer"))
    assert program.words({"prompt": "p", "answer": "{prompt}"}) == ["a", "p{prompt}", "xp}"]
