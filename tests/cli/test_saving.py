"""What becomes of an evaluation: it is saved, it says when it is not finished, and a failed push loses nothing."""

from __future__ import annotations

import json
import re
import shlex
import signal
import time
from pathlib import Path

import pytest

import verifiers as vf
from verifiers.store import RunDir, list_runs
from verifiers.trainers.watch.tracking import check_report_to

SMALL = ("-n", "2", "-r", "2")


def only_run() -> RunDir:
    (run,) = list_runs()
    return run


def test_an_evaluation_is_saved_unless_one_says_otherwise(run):
    shown = run("eval", "arithmetic", "-m", "fake", *SMALL).stdout
    assert f"saved in {only_run().path}" in shown
    assert only_run().metadata["finished"] is True
    run("eval", "arithmetic", "-m", "fake", *SMALL, "-s")
    assert len(list_runs()) == 2


def test_no_save_keeps_nothing(run):
    assert "not saved (--no-save)" in run("eval", "arithmetic", "-m", "fake", *SMALL, "--no-save").stdout
    assert not Path("outputs").exists()


def test_an_interrupted_run_is_not_finished_and_does_not_look_so(start, run):
    with vf.FakeServer("x", latency_s=0.2) as server:
        process = start("eval", "arithmetic", "-m", "m", "-b", server.url, "-n", "200", "-r", "1", "-c", "2")
        deadline = time.monotonic() + 60
        while len(server.requests) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert re.search(r"not finished: stopped by Ctrl-C after \d+ of 200 rollouts", stdout)
    saved = only_run().metadata
    assert saved["finished"] is False
    assert saved["interrupted"] == "Ctrl-C"
    assert "interrupted" in run("runs").stdout
    assert json.loads(run("runs", "list", "--json").stdout)[0]["status"] == "interrupted"


def test_ctrl_c_among_several_models_names_those_that_were_not_begun(start, run):
    with vf.FakeServer("x", latency_s=0.2) as server:
        asked = ("eval", "arithmetic", "-m", "m", "-m", "other", "-b", server.url, "-n", "200", "-r", "1", "-c", "2")
        process = start(*asked)
        deadline = time.monotonic() + 60
        while len(server.requests) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stdout.splitlines()[-1] == "not started: arithmetic with other"


def test_a_list_of_runs_has_tags_and_notes_on_a_line_of_their_own_and_says_what_failed(run, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    run("eval", "arithmetic", "-m", "fake", *SMALL)
    before = run("runs").stdout.splitlines()
    run("runs", "tag", "last", "baseline")
    run("runs", "note", "last", "before " + "the new " * 20 + "prompt")
    after = run("runs").stdout.splitlines()
    assert after[:2] == before[:2]
    assert after[2].startswith("  #baseline before the new")
    assert max(map(len, after)) <= 80
    only_run().update_metadata({"num_failed": 3})
    assert "  3 failed  " in run("runs").stdout


def test_a_run_that_goes_on_to_its_end_is_finished(run, folder):
    run("eval", "arithmetic", "-m", "fake", *SMALL)
    only_run().update_metadata({"finished": False, "interrupted": "Ctrl-C"})
    run("eval", "arithmetic", "-m", "fake", *SMALL, "--resume", str(only_run().path))
    assert only_run().metadata["finished"] is True
    assert only_run().metadata["interrupted"] is None


def test_a_push_that_fails_loses_nothing_and_names_the_command_that_pushes_again(run, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def refuse(self, name, **_):
        raise ConnectionError("the hub is away")

    monkeypatch.setattr(datasets.Dataset, "push_to_hub", refuse)
    result = run("eval", "arithmetic", "-m", "fake", *SMALL, "-H", "-D", "me/mine", code=1)
    told = "the data set 'me/mine' was not pushed: the hub cannot be reached (ConnectionError: the hub is away)"
    assert told in result.stderr
    assert "4 rollouts of 2 examples, 0 failed" in result.stdout
    assert len(only_run().load_index()) == 4
    again = re.search(r"push them again with: (.*)", result.stderr)[1]
    pushed = []
    monkeypatch.setattr(datasets.Dataset, "push_to_hub", lambda self, name, **_: pushed.append((name, len(self))))
    run(*shlex.split(again)[1:])
    assert pushed == [("me/mine", 4)]


def test_a_push_of_what_is_not_saved_is_refused_before_anything_is_paid_for(run):
    shown = run("eval", "arithmetic", "-m", "fake", *SMALL, "-H", "--no-save", code=2).stderr
    assert "a failed push would lose unsaved rollouts" in shown


def test_a_tracker_that_is_not_known_or_not_installed_is_told_before_there_is_a_folder(run, monkeypatch):
    with pytest.raises(ValueError, match="report_to='wandbb' is not known"):
        check_report_to("wandbb")
    result = run("train", "reverse-text", "-m", "smollm2", "--report-to", "wandbb", code=2)
    assert "report_to='wandbb' is not known" in result.stderr
    assert not Path("outputs").exists()


def test_the_embedded_model_is_called_by_its_name_and_never_by_a_path(monkeypatch, tmp_path):
    pytest.importorskip("torch")
    from verifiers.engine.files.smollm2 import default_folder
    from verifiers.engine.ready_model import name_of

    assert vf.LocalModel("local").model == vf.LocalModel("smollm2").model == "smollm2"
    assert name_of(default_folder()) == name_of(str(default_folder())) == "smollm2"
    assert name_of("./other") == "./other"
