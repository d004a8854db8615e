"""``vf eval``: what it runs, what it prints, what it saves, how it ends."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import verifiers as vf

TOY = '''
"""A toy."""
import verifiers as vf

def load_environment(fails=0, text="{reply}", n=4):
    def exact(completion, answer, state):
        if state["example_id"] < fails:
            raise RuntimeError("the grader is down\\x1b[2J")
        return completion[-1]["content"] == answer

    rows = [{{"question": f"say {{i}}", "answer": str(i % 2)}} for i in range(n)]
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([exact]))
'''


@pytest.fixture
def toy(folder: Path) -> Path:
    """An environment of our own in a folder of its own."""
    home = folder / "mine" / "toy_env"
    home.mkdir(parents=True)
    (home / "toy_env.py").write_text(TOY.format(reply="x"))
    return home


def figures(result) -> dict:
    return json.loads(result.stdout)


# --- a first look -------------------------------------------------------------------------------------------------


def test_the_fake_model_says_that_it_is_fake_and_gives_a_report(run):
    result = run("eval", "arithmetic", "-m", "fake", "-n", "20")
    assert "arithmetic: 20 examples × 3 with fake (no model at all" in result.stderr
    for part in (
        "60 rollouts of 20 examples, 0 failed",
        "assistant: This is the fake model",
        "stopped by: max_turns_reached 60",
        "rewards: 0.020 × 60",
        "saved in outputs/evals/arithmetic--fake/",
    ):
        assert part in result.stdout


def test_typed_with_nothing_set_up_the_first_command_runs_at_once_and_says_that_no_model_answered(repo):
    """At a terminal; in a script, as below, nobody gets the figures of a fake by forgetting a key."""
    ours, theirs = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI")}
    done = subprocess.run(
        [sys.executable, "-m", "verifiers", "eval", "arithmetic", "-n", "2"],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        check=False,
        env={**clean, "PYTHONPATH": str(repo)},
    )
    os.close(theirs)
    said = " ".join(os.read(ours, 100_000).decode().split())
    os.close(ours)
    assert done.returncode == 0, said
    assert "with fake (no model was given" in said
    assert "-m smollm2" in said
    assert "saved in outputs/evals/arithmetic--fake/" in done.stdout


def test_without_a_model_and_a_key_one_sentence_says_what_to_do(run):
    shown = run("eval", "arithmetic", code=2).stderr
    assert "no model was given and OPENAI_API_KEY is not set" in shown
    assert "-m smollm2" in shown
    assert "-m fake" in shown


def test_a_dry_run_asks_no_model(run):
    with vf.FakeServer("4") as server:
        result = run("eval", "arithmetic", "-m", "m", "-b", server.url, "-n", "3", "-r", "2", "-T", "0.5", "--dry-run")
        assert not server.requests
    assert re.search(r"^rollouts +6$", result.stdout, re.MULTILINE)
    assert "{'temperature': 0.5}" in result.stdout
    assert "What is" in result.stdout
    plan = figures(run("eval", "arithmetic", "-m", "fake", "--dry-run", "--json"))
    assert plan["rollouts"] == 60


# --- flags --------------------------------------------------------------------------------------------------------


def test_flags_reach_the_environment_the_request_and_the_endpoint(run):
    with vf.FakeServer("x", api_key="sk-right") as server:
        result = run(
            *("eval", "arithmetic", "-b", server.url, "-m", "some/model", "-k", "MY_KEY", "--header", "X-Title: mine"),
            *("-n", "2", "-r", "1", "-t", "7", "-T", "0.25", "-S", '{"temperature": 0.5, "top_p": 0.9}', "--json"),
            *("-a", '{"difficulty": "easy"}', "-x", '{"max_seq_len": 9}', "-c", "1"),
            env={"MY_KEY": "sk-right"},
        )
        body = server.requests[0]
    shown = figures(result)
    assert shown["model"] == "some/model"
    assert shown["rollouts"] == 2
    assert shown["failed"] == 0
    assert shown["env_args"] == {"difficulty": "easy"}
    assert shown["sampling_args"] == {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9}
    assert "sk-right" not in result.stdout + result.stderr
    assert "0.5" in str(body)


def test_a_name_of_the_registry_is_its_model_at_its_server(run, folder):
    with vf.FakeServer("x") as server:
        (folder / "configs").mkdir()
        entry = f'[[endpoint]]\nendpoint_id = "mini"\nmodel = "big/name"\nurl = "{server.url}"\n'
        (folder / "configs" / "endpoints.toml").write_text(entry)
        shown = figures(run("eval", "arithmetic", "-m", "mini", "-n", "1", "-r", "1", "--json"))
        assert shown["base_url"] == server.url
    assert shown["model"] == "big/name"


def test_a_default_of_the_environment_gives_way_to_a_flag(run, toy):
    (toy / "pyproject.toml").write_text(
        '[project]\nname = "toy-env"\n[tool.verifiers.eval]\nnum_examples = 3\nrollouts_per_example = 2\n'
        'temperature = 0.5\ncolour = "red"\n'
    )
    result = run("eval", "toy-env", "-p", "mine", "-m", "fake", "--json")
    assert figures(result)["rollouts"] == 6
    assert figures(result)["sampling_args"] == {"temperature": 0.5}
    assert "unknown keys ['colour']" in result.stderr
    assert figures(run("eval", "toy-env", "-p", "mine", "-m", "fake", "-n", "-1", "-r", "1", "--json"))["rollouts"] == 4


def test_without_defaults_it_is_five_examples_three_times(run, toy):
    shown = figures(run("eval", "toy-env", "-p", "mine", "-m", "fake", "-a", '{"n": 9}', "--json"))
    assert (shown["examples"], shown["rollouts"]) == (5, 15)


def test_an_environment_has_one_id_by_whichever_name_it_was_called(run, toy):
    for named in (["mine/toy_env/"], ["toy_env", "-p", "mine"], ["toy-env", "-p", "mine"]):
        assert figures(run("eval", *named, "-m", "fake", "--json"))["env_id"] == "toy-env"
    assert [path.name for path in Path("outputs/evals").iterdir()] == ["toy-env--fake"]


def test_what_has_no_effect_is_said_in_one_line(run):
    shown = run("eval", "arithmetic", "-m", "fake", "-n", "1", "-r", "1", "-N", "-f", "10").stderr
    assert "warning: -N has no effect" in shown
    assert "warning: save_every has no effect" in shown
    assert ".py:" not in shown


# --- saving, failing, resuming ------------------------------------------------------------------------------------


def test_failures_are_counted_told_and_the_exit_code_and_a_run_goes_on_where_it_stopped(run, toy):
    command = ["eval", "toy-env", "-p", "mine", "-m", "fake", "-n", "4", "-r", "2", "-s", "--header", "X-Key: abc"]
    result = run(*command, "-x", '{"judge_api_key": "sk-1"}', "-a", '{"fails": 1}', code=1)
    assert "8 rollouts of 4 examples, 2 failed" in result.stdout
    assert "the grader is down\\x1b[2J" in result.stdout
    assert "25.0% of the rollouts failed, more than --max-failure-rate 0" in result.stderr
    (saved,) = Path("outputs/evals/toy-env--fake").iterdir()
    assert f"saved in {saved}" in result.stdout
    again = re.search(r"again with: (.*)", result.stdout)[1]
    assert again.endswith(f"--resume {saved}")
    assert "abc" not in again
    assert "sk-1" not in again
    assert " -s" not in again

    lines = len((saved / "results.jsonl").read_text().splitlines())
    assert lines == 8
    run(*shlex.split(again)[1:], code=1)
    run(*shlex.split(again)[1:], "--max-failure-rate", "0.3")


def test_a_run_made_differently_is_not_resumed(run, toy):
    run("eval", "toy-env", "-p", "mine", "-m", "fake", "-s")
    (saved,) = Path("outputs/evals/toy-env--fake").iterdir()
    shown = run("eval", "toy-env", "-p", "mine", "-m", "fake", "-r", "1", "--resume", str(saved), code=2).stderr
    assert "this run was made with" in shown
    assert "no run 'x'" in run("eval", "toy-env", "-p", "mine", "-m", "fake", "--resume", "x", code=2).stderr


@pytest.mark.parametrize("name", ["last", "the id", "the folder of its id"])
def test_a_run_is_resumed_by_its_id_or_as_the_last_one_like_everywhere_else(run, toy, name):
    words = ["eval", "toy-env", "-p", "mine", "-m", "fake"]
    run(*words)
    (saved,) = Path("outputs/evals/toy-env--fake").iterdir()
    found = {"last": "last", "the id": saved.name[:4], "the folder of its id": str(saved.parent)}[name]
    assert f"saved in {saved}" in run(*words, "--resume", found).stdout
    assert [*saved.parent.iterdir()] == [saved]


def test_state_columns_are_saved(run, toy):
    run("eval", "toy-env", "-p", "mine", "-m", "fake", "-n", "1", "-r", "1", "-s", "-C", "turn, trajectory_id")
    (saved,) = Path("outputs/evals/toy-env--fake").iterdir()
    assert {"turn", "trajectory_id"} <= json.loads((saved / "results.jsonl").read_text()).keys()


def test_an_endpoint_that_is_not_there_is_a_failure_and_not_a_zero(run):
    shown = run(
        *("eval", "arithmetic", "-m", "m", "-b", "http://127.0.0.1:9/v1", "--max-retries", "0", "-n", "1", "--json"),
        code=1,
    )
    assert figures(shown)["failed"] == 3
    assert figures(shown)["reward"]["mean"] is None


def test_ctrl_c_ends_with_130_and_the_command_to_go_on(start, folder):
    with vf.FakeServer("x", latency_s=0.2) as server:
        process = start(
            *("eval", "arithmetic", "-m", "m", "-b", server.url, "-n", "200", "-r", "1", "-c", "2", "-s"),
        )
        deadline = time.monotonic() + 60
        while len(server.requests) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "stopped by Ctrl-C" in stdout
    again = re.search(r"continue with: (.*)", stdout)[1]
    (saved,) = Path("outputs/evals/arithmetic--m").iterdir()
    assert shlex.split(again)[-2:] == ["--resume", str(saved)]
    assert (saved / "results.jsonl").read_text().count("\n") >= 4


# --- what is wrong is named ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["arithmetc"], "Did you mean arithmetic?"),
        (["../etc"], "../etc is not a folder; pass an environment's name or its folder"),
        (["environments/x/x.py"], "environments/x/x.py is not a folder"),
        (["json"], "'json' is not an environment: json is a module of Python"),
        (["arithmetic", "-a", '{"level": 1}'], "does not take ['level']; it takes difficulty"),
        (["arithmetic", "-a", "[1]"], "must be a JSON object"),
        (["arithmetic", "-a", ""], "this is not JSON: Expecting value at character 1"),
        (["arithmetic", "-n", "0"], "1 or more, or -1"),
        (["arithmetic", "-c", "-2"], "1 or more, or -1"),
        (["arithmetic", "-r", "0"], "'-r'"),
        (["arithmetic", "--header", "sk-secret"], "a header must have the form 'Name: Value'"),
        (["arithmetic", "-e", "nowhere.toml"], "-e nowhere.toml: no such file or folder"),
        (["arithmetic", "-k", "sk-secret"], "-k takes the name of an environment variable"),
    ],
)
def test_wrong_usage_is_explained_and_exits_with_2(run, args, message):
    shown = run("eval", *args, "-m", "fake", code=2).stderr
    assert message in shown
    assert "sk-secret" not in shown


def test_malformed_json_is_shown_with_a_mark_at_its_place(run):
    text = '{"difficulty": "hard" "seed": 1}'
    shown = run("eval", "arithmetic", "-m", "fake", "-a", text, code=2).stderr
    line, mark = shown.rstrip().splitlines()[-2:]
    assert line.strip() == text
    assert mark.index("^") == line.index('"seed"')


def test_an_environment_that_raises_is_named_with_the_place_and_v_shows_the_traceback(run, toy):
    (toy / "toy_env.py").write_text("def load_environment():\n    return 1 / 0\n")
    shown = run("eval", "toy-env", "-p", "mine", "-m", "fake", code=1).stderr
    assert "cannot be loaded: ZeroDivisionError: division by zero" in shown
    assert "toy_env.py:2; -v shows the traceback" in shown
    assert "Traceback" in run("eval", "toy-env", "-p", "mine", "-m", "fake", "-v", code=1).stderr


def test_rows_that_cannot_be_read_are_one_sentence(run, toy):
    (toy / "toy_env.py").write_text(
        "import verifiers as vf\ndef rows():\n    raise OSError('no disk')\n"
        "def load_environment():\n    return vf.SingleTurnEnv(eval_dataset=rows)\n"
    )
    shown = run("eval", "toy-env", "-p", "mine", "-m", "fake", code=1).stderr
    assert "the rows of 'toy-env' cannot be read: OSError: no disk" in shown


def test_what_a_model_writes_cannot_move_the_cursor(run, toy):
    with vf.FakeServer("\x1b[2J\x1b]0;owned\x07 ok\rgone") as server:
        shown = run("eval", "toy-env", "-p", "mine", "-m", "m", "-b", server.url, "-n", "1", "-r", "1").stdout
    assert "\\x1b[2J" in shown
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)


# --- limits of time, and an early end -----------------------------------------------------------------------------

STUCK = '''
"""Rewards and hooks that hang in one row."""
import asyncio, threading
import verifiers as vf

def load_environment(where="reward", n=6):
    def hang(place, state):
        if place == where and state["example_id"] == 2:
            threading.Event().wait()

    def reward(completion, state):
        hang("reward", state)
        return 1.0

    class Env(vf.SingleTurnEnv):
        def setup_state(self, state):
            hang("hook", state)
            return state

    return Env(eval_dataset=[{"question": str(i)} for i in range(n)], rubric=vf.Rubric([reward]))
'''


@pytest.mark.parametrize("where", ["reward", "hook"])
def test_a_function_that_hangs_fails_its_row_at_the_limit_that_was_given(run, folder, where):
    home = folder / "mine" / "stuck_env"
    home.mkdir(parents=True)
    (home / "stuck_env.py").write_text(STUCK)
    args = ("eval", "./mine/stuck_env", "-m", "fake", "-n", "6", "-r", "1", "--json")
    found = figures(run(*args, "-a", json.dumps({"where": where}), f"--{where}-timeout", "0.5", code=1))
    assert (found["rollouts"], found["failed"]) == (6, 1)
    assert "did not return within 0.5 s" in next(iter(found["causes"]))


def test_a_run_out_of_time_ends_with_3_and_the_command_to_go_on(run, toy):
    with vf.FakeServer("0", latency_s=60) as server:
        url = server.url
        args = ("eval", "./mine/toy_env", "-m", "m", "-b", url, "-n", "4", "-r", "1", "-s", "--deadline", "0.5")
        result = run(*args, code=3)
    assert "ended early: the run's deadline of 0.5 s" in result.stdout
    again = shlex.split(
        next(line for line in result.stdout.splitlines() if "continue with: " in line).split(": ", 1)[1]
    )
    assert "--resume" in again
    with vf.FakeServer("0") as quick:
        again[again.index(url)] = quick.url
        again[again.index("0.5")] = "60"
        assert "4 rollouts of 4 examples, 0 failed" in run(*again[1:]).stdout


def test_an_endpoint_that_is_down_ends_the_run_with_3_and_the_command_to_go_on(run, toy):
    with vf.FakeServer("0", chaos=vf.Chaos(rate=1.0, kinds=("server_error",))) as server:
        args = ("eval", "./mine/toy_env", "-m", "m", "-b", server.url, "-s", "--down-after", "0.5")
        result = run(*args, "--max-retries", "1000", code=3)
    assert "has refused everything for 0.5 s and counts as down" in result.stdout
    assert "continue with: vf eval" in result.stdout


def test_a_wrong_key_ends_the_run_with_3_after_a_handful_of_requests(run, toy):
    with vf.FakeServer("0", api_key="sk-right") as server:
        args = ("eval", "./mine/toy_env", "-m", "m", "-b", server.url, "-a", '{"n": 500}', "-n", "500", "--json")
        found = figures(run(*args, "-c", "64", code=3))
    assert found["failed"] == 1500
    assert "401" in found["ended_early"]


def test_how_many_bytes_of_a_reply_are_read_is_a_flag(run, toy):
    with vf.FakeServer("0" * 5000) as server:
        args = ("eval", "./mine/toy_env", "-m", "m", "-b", server.url, "-n", "1", "-r", "1", "--json")
        found = figures(run(*args, "--max-reply-bytes", "1000", code=1))
    assert "longer than max_reply_bytes=1,000" in next(iter(found["causes"]))


def test_limits_may_stand_in_a_file_of_evaluations(run, toy, folder):
    (folder / "nightly.toml").write_text('deadline = 60\nreward_timeout = 5\n[[eval]]\nenv_id = "./mine/toy_env"\n')
    run("eval", "nightly.toml", "-m", "fake", "-n", "1", "-r", "1")
    (folder / "nightly.toml").write_text('deadline = -1\n[[eval]]\nenv_id = "./mine/toy_env"\n')
    assert "deadline" in run("eval", "nightly.toml", "-m", "fake", code=2).stderr


LINGERING = '''
"""A reward that leaves a thread behind, which Python would wait for; and a teardown that hangs."""
import threading
import verifiers as vf

def load_environment(n=200):
    def reward(completion):
        threading.Thread(target=threading.Event().wait).start()
        return 1.0

    class Env(vf.SingleTurnEnv):
        @vf.teardown
        def put_away(self):
            threading.Event().wait()

    return Env(eval_dataset=[{"question": str(i)} for i in range(n)], rubric=vf.Rubric([reward]))
'''


def test_ctrl_c_ends_the_program_even_where_threads_and_a_teardown_never_end(start, folder):
    home = folder / "mine" / "lingering_env"
    home.mkdir(parents=True)
    (home / "lingering_env.py").write_text(LINGERING)
    with vf.FakeServer("x", latency_s=0.3) as server:
        args = ("eval", "./mine/lingering_env", "-m", "m", "-b", server.url, "-n", "200", "-r", "1", "-c", "2", "-s")
        process = start(*args)
        deadline = time.monotonic() + 40
        while len(server.requests) < 6 and time.monotonic() < deadline:
            time.sleep(0.05)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        process.communicate(timeout=30)
    assert process.returncode == 130


# --- until it is known --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half_width", ["±0.25", "0.25", "+-0.25", "+/-0.25"])
def test_a_run_stops_when_the_mean_is_known(run, half_width):
    shown = run("eval", "arithmetic", "-m", "fake", "-r", "1", "--until", half_width).stdout
    assert "the mean reward is known to ±0.25 after " in shown


def test_a_half_width_or_a_range_that_is_none_is_a_usage_error(run):
    assert "such as ±0.02" in run("eval", "arithmetic", "-m", "fake", "--until", "soon", code=2).stderr
    wrong = run("eval", "arithmetic", "-m", "fake", "--until", "0.1", "--reward-range", "1,0", code=2)
    assert "the smaller first" in wrong.stderr


def test_rewards_outside_the_range_end_with_1(run):
    args = ("eval", "arithmetic", "-m", "fake", "-r", "1", "--until", "0.2", "--reward-range", "5,9", "--json")
    found = json.loads(run(*args, code=1).stdout)
    assert "which were assumed to be 5 and 9" in found["until"]["fault"]
