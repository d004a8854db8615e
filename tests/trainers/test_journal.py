"""What a training writes down as it goes: whole lines at once, numbers that never clash, and a past that can be cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from verifiers.store import RunDir, RunInUseError
from verifiers.trainers.watch.journal import Journal, record_of
from verifiers.types import State

FIGURES = {"epoch": 0.5, "reward": 0.42, "reward_low": 0.36, "reward_high": 0.48, "metrics": {"correct": 0.4}}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, env_id="sums", model="org/tiny", config={"seed": 1})


def state(example_id: int = 0, reward: float | None = 1.0, **more: object) -> State:
    row = {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4", "example_id": example_id, "task": "sums"}
    said = [{"role": "assistant", "content": "4"}]
    return State(input=row, completion=said, reward=reward, metrics={"correct": reward}, **more)


def test_steps_evaluations_and_notices_are_one_line_each_and_are_there_at_once(run: RunDir) -> None:
    journal = Journal(run)
    journal.write_step({"step": 1, **FIGURES})
    journal.write_eval(1, {"reward": 0.5, "low": 0.45, "high": 0.55, "n": 200})
    journal.write_notice(1, "every reply\nis cut off")
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]  # not closed yet
    assert [sorted(line.keys() & {"reward", "eval", "notice"}) for line in lines] == [["reward"], ["eval"], ["notice"]]
    assert all(line["step"] == 1 and line["time"] > 1e9 for line in lines)
    assert [line["reward"] for line in journal.steps()] == [0.42]
    assert [line["eval"]["n"] for line in journal.evals()] == [200]
    assert [line["notice"] for line in journal.notices()] == ["every reply\nis cut off"]
    journal.close()
    journal.close()


def test_a_number_that_is_none_is_null(run: RunDir) -> None:
    with Journal(run) as journal:
        journal.write_step({"step": 1, "kl": float("nan"), "ratio_max": float("inf"), "metrics": {"x": float("nan")}})
    (line,) = journal.steps()
    assert (line["kl"], line["ratio_max"], line["metrics"]) == (None, None, {"x": None})


@pytest.mark.parametrize("step", [None, "3", True, 1.5], ids=repr)
def test_figures_without_the_number_of_their_step_are_refused(run: RunDir, step: object) -> None:
    with pytest.raises(ValueError, match="need its number, got step="):
        Journal(run).write_step({"step": step, "reward": 1.0})
    assert not (run.path / "metrics.jsonl").exists()


def test_sampled_rollouts_carry_their_step_and_advantage_and_never_share_a_number(run: RunDir) -> None:
    with Journal(run) as journal:
        journal.write_records(
            [record_of(1, state(0), 0.5), record_of(1, state(0, 0.0), -0.5), record_of(1, state(7), None)]
        )
        journal.write_records([record_of(2, state(0), 0.25)])
    with Journal(RunDir.open(run.path)) as resumed:  # another process, later
        resumed.write_records([record_of(3, state(0), 0.0), record_of(3, state(7), 0.0)])
    records = list(run.records())
    assert [(r["example_id"], r["rollout"], r["step"]) for r in records] == [
        (0, 0, 1),
        (0, 1, 1),
        (7, 0, 1),
        (0, 2, 2),
        (0, 3, 3),
        (7, 1, 3),
    ]
    assert [r["advantage"] for r in records] == [0.5, -0.5, None, 0.25, 0.0, 0.0]
    assert records[0]["correct"] == 1.0
    assert records[0]["completion"][0]["content"] == "4"


def test_a_state_or_metric_called_step_does_not_hide_the_step_of_the_training(run: RunDir) -> None:
    odd = state(0, step=99)
    odd["metrics"] = {"advantage": 3.0, "step": 4.0}
    with Journal(run) as journal:
        journal.write_records([record_of(5, odd, 0.5)])
    (record,) = run.records()
    assert (record["step"], record["advantage"], odd["step"]) == (5, 0.5, 99)


def test_rewinding_forgets_what_came_after_a_step_in_both_files(run: RunDir) -> None:
    with Journal(run) as journal:
        for step in range(1, 6):
            journal.write_step({"step": step, "reward": step / 10})
            journal.write_records([record_of(step, state(0), 0.1)])
            journal.write_notice(step, f"seen at {step}")
        journal.write_eval(5, {"reward": 0.5})
        journal.rewind(3)
        with pytest.raises(RunInUseError):  # it still has the folder
            RunDir.open(run.path).appender()
        journal.write_step({"step": 4, "reward": 0.9})
        journal.write_records([record_of(4, state(0), 0.2)])
    assert [(line["step"], line["reward"]) for line in journal.steps()] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.9)]
    assert [line["notice"] for line in journal.notices()] == ["seen at 1", "seen at 2", "seen at 3"]
    assert list(journal.evals()) == []
    assert [(r["step"], r["rollout"]) for r in run.records()] == [(1, 0), (2, 1), (3, 2), (4, 3)]


def test_rewinding_a_run_that_has_written_nothing_does_nothing(run: RunDir) -> None:
    journal = Journal(run)
    journal.rewind(0)
    assert list(journal.steps()) == []
    assert not (run.path / "metrics.jsonl").exists()


def test_a_torn_or_damaged_line_costs_itself_only_and_is_kept_aside(run: RunDir) -> None:
    with Journal(run) as journal:
        journal.write_step({"step": 1, "reward": 0.1})
    path = run.path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b'{"step": 0, "rew\xff\n' + whole + b'{"step": 2, "rewa')
    assert [line["step"] for line in Journal(run).steps()] == [1]
    journal.rewind(1)
    assert path.read_bytes() == whole
    assert len(run.damaged_path.read_bytes().splitlines()) == 2


def test_nobody_else_writes_where_a_training_does(run: RunDir) -> None:
    with Journal(run), pytest.raises(RunInUseError, match="is being written by"):
        Journal(RunDir.open(run.path)).open()


KILLED = """
import os, signal, sys
from verifiers.store import RunDir
from verifiers.trainers.watch.journal import Journal, record_of

journal = Journal(RunDir.open(sys.argv[1]))
for step in range(1, 4):
    journal.write_step({"step": step, "reward": 0.5})
    journal.write_records([record_of(step, {"example_id": 0, "completion": "4", "reward": 1.0}, 0.5)])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_journal_that_cannot_be_opened_leaves_the_run_to_others(run: RunDir) -> None:
    metrics = run.path / "metrics.jsonl"
    metrics.mkdir()
    journal = Journal(run)
    with pytest.raises(OSError):
        journal.open()
    with run.appender() as other:
        other.append({"example_id": 1, "rollout": 0})
    metrics.rmdir()
    with journal:
        journal.write_step({"step": 1})


def test_what_was_written_survives_a_kill_and_the_next_process_goes_on(run: RunDir) -> None:
    died = subprocess.run(
        [sys.executable, "-c", KILLED, str(run.path)],
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    assert died.returncode == -signal.SIGKILL
    with Journal(run) as journal:
        journal.rewind(2)
        journal.write_records([record_of(3, state(0), 0.5)])
    assert [line["step"] for line in journal.steps()] == [1, 2]
    assert [(r["step"], r["rollout"]) for r in run.records()] == [(1, 0), (2, 1), (3, 2)]
