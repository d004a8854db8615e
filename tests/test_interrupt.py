"""Ctrl-C in a real terminal and a real process: once stops gently, twice at once; either way the run can be resumed."""

from __future__ import annotations

import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from tests.support.evaluation import Plan

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals and terminals of Unix")

SLOW_S = 0.4


@pytest.fixture(scope="module")
def server() -> Iterator[vf.FakeServer]:
    numbers = itertools.count()
    with vf.FakeServer(lambda messages: f"<answer>{next(numbers)}</answer>", latency_s=SLOW_S) as server:
        yield server


def records_of(path: Path) -> list[dict[str, Any]]:
    file = path / "results.jsonl"
    return [json.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []


def wait_for(has_come: Callable[[], Any], process: subprocess.Popen[str], *, limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not has_come():
        assert process.poll() is None, "the process ended too early"
        assert time.monotonic() < end, "what was waited for did not come"
        time.sleep(0.01)


def check_resumable(plan: Plan, saved: list[dict[str, Any]]) -> None:
    """Resuming completes the run, and what was saved is not generated again."""
    n = plan.rows * plan.repeats
    assert replace(plan, resume=True, max_concurrent=64).run() == {"rollouts": n, "failed": 0}
    records = records_of(Path(plan.path))
    assert len({(record["example_id"], record["rollout"]) for record in records}) == len(records) == n
    replies = {record["completion"][0]["content"] for record in records}
    assert {record["completion"][0]["content"] for record in saved} <= replies


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("rewards", ["alone", "slow", "group"])
def test_the_first_ctrl_c_finishes_and_saves_what_is_under_way(
    is_async: bool, rewards: str, server: vf.FakeServer, tmp_path: Path
) -> None:
    plan = Plan(
        url=server.url, path=str(tmp_path / "run"), rows=24, is_async=is_async, rewards=rewards, max_concurrent=8
    )
    asked_before = len(server.requests)
    with plan.started() as process:
        wait_for(lambda: len(records_of(tmp_path / "run")) >= 8, process)
        time.sleep(0.1)  # the next eight are under way, or more if this process was held up
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=30)
    asked = len(server.requests) - asked_before
    outcome = json.loads(said)
    saved = records_of(tmp_path / "run")
    assert outcome["rollouts"] == len(saved) == asked
    assert 16 <= asked < 48
    assert outcome["stopped"] == f"stopped after {asked} of 48 rollouts; resume it with resume={plan.path!r}"
    assert not any(record["error"] for record in saved)
    metadata = json.loads((tmp_path / "run/metadata.json").read_bytes())
    assert metadata["num_rollouts"] == asked
    check_resumable(plan, saved)


def test_a_gentle_stop_lets_the_groups_that_have_begun_be_completed(server: vf.FakeServer, tmp_path: Path) -> None:
    """What was generated is paid for: a rollout must not be thrown away because its group lacks another one."""
    plan = Plan(url=server.url, path=str(tmp_path / "run"), rows=8, repeats=3, rewards="group", max_concurrent=4)
    asked_before = len(server.requests)
    with plan.started() as process:
        wait_for(lambda: len(server.requests) - asked_before >= 8, process)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=30)
    saved = records_of(tmp_path / "run")
    assert json.loads(said)["rollouts"] == len(saved) == len(server.requests) - asked_before
    assert len(saved) < 24
    assert {record["longest"] for record in saved} == {3.0}
    check_resumable(plan, saved)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_second_ctrl_c_stops_at_once(is_async: bool, tmp_path: Path) -> None:
    with vf.FakeServer("<answer>4</answer>", latency_s=60.0) as stuck:
        plan = Plan(url=stuck.url, path=str(tmp_path / "run"), rows=6, is_async=is_async)
        with plan.started() as process:
            wait_for(lambda: len(stuck.requests) >= 12, process)
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            assert process.poll() is None
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=30)
            assert time.monotonic() - began < 5
    outcome = json.loads(said)
    assert outcome["rollouts"] == 0
    assert outcome["stopped"].startswith("stopped after 0 of 12 rollouts; resume it with")
    with vf.FakeServer("<answer>4</answer>") as quick:
        assert replace(plan, url=quick.url, resume=True).run() == {"rollouts": 12, "failed": 0}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_uncaught_it_ends_the_process_and_says_how_to_resume(
    is_async: bool, server: vf.FakeServer, tmp_path: Path
) -> None:
    plan = Plan(url=server.url, path=str(tmp_path / "run"), rows=16, is_async=is_async, is_caught=False)
    with plan.started() as process:
        wait_for(lambda: len(records_of(tmp_path / "run")) >= 4, process)
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=30)
    assert process.returncode not in (0, None)
    assert f"resume={plan.path!r}" in complaints.splitlines()[-1]
    check_resumable(plan, records_of(tmp_path / "run"))


def test_a_reward_that_hangs_is_left_behind_at_the_second_ctrl_c(server: vf.FakeServer, tmp_path: Path) -> None:
    """Whether it blocks a thread or, having been quick before, the event loop itself."""
    plan = Plan(url=server.url, path=str(tmp_path / "run"), rows=10, repeats=1, rewards="hanging", max_concurrent=2)
    with plan.started() as process:
        wait_for(lambda: len(records_of(tmp_path / "run")) >= 6, process)
        time.sleep(0.8)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        process.communicate(timeout=20)
    saved = records_of(tmp_path / "run")
    assert 6 <= len(saved) < 10
    check_resumable(replace(plan, rewards="mended"), saved)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("rewards", ["hanging", "holding", "stubborn"])
def test_a_second_ctrl_c_always_ends_the_process_within_seconds(
    rewards: str, is_async: bool, server: vf.FakeServer, tmp_path: Path
) -> None:
    """Even where a function holds the loop for ever, and catches whatever is raised in it."""
    plan = Plan(
        url=server.url,
        path=str(tmp_path / "run"),
        rows=10,
        repeats=1,
        rewards=rewards,
        max_concurrent=2,
        is_async=is_async,
    )
    with plan.started() as process:
        wait_for(lambda: len(records_of(tmp_path / "run")) >= 6, process)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        process.communicate(timeout=30)
        assert time.monotonic() - began < 20
    assert process.returncode == (130 if rewards == "stubborn" else process.returncode)
    saved = records_of(tmp_path / "run")
    assert 6 <= len(saved) < 10
    check_resumable(replace(plan, rewards="mended"), saved)


def test_rows_whose_rewards_leave_the_program_fail_and_the_run_ends_by_itself(
    server: vf.FakeServer, tmp_path: Path
) -> None:
    plan = Plan(url=server.url, path=str(tmp_path / "run"), rows=10, repeats=1, rewards="leaving")
    assert plan.run() == {"rollouts": 10, "failed": 4}


# --- what is seen -------------------------------------------------------------------------------------------------


def in_terminal(plan: Plan, *, ctrl_c_after: int | None = None) -> str:
    """All that the process wrote to a terminal of its own."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    written = b""
    end = time.monotonic() + 60
    with plan.started(stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        has_ended = False
        while not has_ended and time.monotonic() < end:
            has_ended = process.poll() is not None
            if ctrl_c_after is not None and len(records_of(Path(plan.path))) >= ctrl_c_after:
                process.send_signal(signal.SIGINT)
                ctrl_c_after = None
            time.sleep(0.02)
            written += read_all(ours)
    os.close(ours)
    return written.decode()


def read_all(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 20)
    except OSError:  # nothing there at the moment, or the other end is closed
        return b""


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_terminal_shows_a_live_bar(server: vf.FakeServer, tmp_path: Path) -> None:
    plan = Plan(url=server.url, path=str(tmp_path / "run"), rows=8, max_concurrent=4, show=True)
    shown = in_terminal(plan)
    assert shown.count("\r") > 4
    assert "16/16 rollouts, reward 1.000" in plain(shown)
    assert "━" in shown


def test_a_terminal_says_that_the_run_is_stopping(server: vf.FakeServer, tmp_path: Path) -> None:
    plan = Plan(url=server.url, path=str(tmp_path / "run"), rows=16, max_concurrent=4, show=True)
    shown = plain(in_terminal(plan, ctrl_c_after=4))
    assert "stopping: rollouts in progress are finished and saved; press Ctrl-C again to stop at once" in shown
    assert "stopped after" in shown
    assert "Traceback" not in shown


def test_a_pipe_gets_plain_lines(server: vf.FakeServer, tmp_path: Path) -> None:
    with Plan(url=server.url, path=str(tmp_path / "run"), rows=8, show=True).started() as process:
        _, shown = process.communicate(timeout=30)
    assert "\x1b" not in shown
    assert "\r" not in shown
    assert re.fullmatch(r"16/16 rollouts, reward 1\.000, [\d,]+ tokens/s\n", shown)


def test_nothing_is_said_on_request(server: vf.FakeServer, tmp_path: Path) -> None:
    with Plan(url=server.url, path=str(tmp_path / "run"), rows=8, show=False).started() as process:
        _, shown = process.communicate(timeout=30)
    assert shown == ""
    assert json.loads(in_terminal(Plan(url=server.url, path=str(tmp_path / "other"), rows=2)))["rollouts"] == 4


# --- SIGTERM, SIGHUP, and readers that leave --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_sigterm_and_sighup_end_a_run_as_gently_as_ctrl_c(
    number: signal.Signals, server: vf.FakeServer, tmp_path: Path
) -> None:
    plan = Plan(url=server.url, path=str(tmp_path / "run"), rows=16, max_concurrent=8)
    with plan.started() as process:
        wait_for(lambda: len(records_of(tmp_path / "run")) >= 8, process)
        process.send_signal(number)
        if number == signal.SIGHUP:  # a terminal that closes may say so twice, and it is still gentle
            process.send_signal(number)
        said, _ = process.communicate(timeout=60)
    saved = records_of(tmp_path / "run")
    assert json.loads(said)["rollouts"] == len(saved) < 32
    assert json.loads(said)["stopped"].startswith("stopped after ")
    assert not any(record["error"] for record in saved)
    check_resumable(plan, saved)


def test_a_run_under_nohup_does_not_hear_that_its_terminal_closed(server: vf.FakeServer, tmp_path: Path) -> None:
    plan = Plan(url=server.url, path=str(tmp_path / "run"), rows=4, repeats=2, max_concurrent=4)
    with plan.started(preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as process:
        wait_for(lambda: len(records_of(tmp_path / "run")) >= 4, process)
        process.send_signal(signal.SIGHUP)
        said, _ = process.communicate(timeout=60)
    assert json.loads(said) == {"rollouts": 8, "failed": 0}


def test_a_handler_of_ones_own_for_sigterm_is_left_alone() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))

    def reply(messages: Any) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "4"

    env = vf.SingleTurnEnv(dataset=[{"question": "2+2?", "answer": "4"}], rubric=vf.Rubric([lambda: 1.0]))
    try:
        results = env.evaluate(client=vf.FakeClient(reply), model="m", use_tqdm=False)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert results["reward"] == [1.0]
    assert heard == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=lambda one: str(one)
)
def test_the_exit_code_of_vf_eval_names_the_signal(
    number: signal.Signals, code: int, server: vf.FakeServer, tmp_path: Path
) -> None:
    root = Path(__file__).resolve().parent.parent
    words = ["eval", "arithmetic", "-p", str(root / "environments"), "-m", "m", "-b", server.url, "-s", "-n", "40"]
    command = [sys.executable, "-m", "verifiers", *words, "-r", "2", "-c", "4", "-k", "VF_TEST_KEY"]
    environment = {**os.environ, "PYTHONPATH": str(root), "VF_TEST_KEY": "sk-test"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            wait_for(lambda: any(path.stat().st_size for path in tmp_path.glob("**/results.jsonl")), process)
            process.send_signal(number)
            said, complaints = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code, complaints
    assert f"stopped by {'Ctrl-C' if number == signal.SIGINT else number.name}" in said
    assert "continue with: vf eval arithmetic" in said


@pytest.mark.parametrize("program", ["a script", "vf eval"])
def test_a_reader_of_stderr_that_goes_away_does_not_end_the_run(
    program: str, server: vf.FakeServer, tmp_path: Path
) -> None:
    read_end, write_end = os.pipe()
    root = Path(__file__).resolve().parent.parent
    if program == "a script":
        plan = Plan(url=server.url, path=str(tmp_path / "run"), rows=4, repeats=1, show=True)
        command = [sys.executable, str(root / "tests/support/evaluation.py"), json.dumps(asdict(plan))]
    else:
        command = [sys.executable, "-m", "verifiers", "eval", "arithmetic", "-m", "fake", "-n", "4", "-r", "1", "-s"]
        command += ["-p", str(root / "environments"), "--json"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=write_end,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONUNBUFFERED": ""},  # what is not written stays in a buffer
    ) as process:
        os.close(write_end)
        os.close(read_end)  # before a word was said
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert json.loads(said)["rollouts"] == 4


def test_a_clock_that_is_set_back_gives_no_negative_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from verifiers.cli.report import report

    hours = itertools.count()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600 * next(hours))  # an hour back at each look
    rows = [{"question": f"{i}+{i}?", "answer": str(2 * i)} for i in range(3)]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([lambda state: state["example_id"] / 2]))
    results = env.evaluate(client=vf.FakeClient("4"), model="m", results_path=tmp_path / "run", use_tqdm=False)
    records = records_of(tmp_path / "run")
    assert all(record[name] >= 0 for record in records for name in ("generation_ms", "scoring_ms", "total_ms"))
    assert results.metadata["time_ms"] >= 0
    for state in results.rollouts:
        state["timing"]["total_ms"] = -3_600_000.0  # as runs of before may have saved it
    assert any("worst: " in line for line in report(results))
