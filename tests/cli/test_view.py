"""``vf view``: finds the runs it is pointed at, serves them until Ctrl-C, or writes them into one file."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from pathlib import Path

import pytest

from verifiers.store import RunDir


@pytest.fixture
def make_run(folder: Path):
    def make(model: str = "m", root: str = "outputs/evals") -> Path:
        run = RunDir.create(folder / root, env_id="sums", model=model, config={})
        with run.appender() as out:
            out.append(
                {"example_id": 0, "rollout": 0, "reward": 1.0, "prompt": "2+2?", "completion": "4", "error": None}
            )
        return run.path

    return make


def served(process) -> str:
    line = process.stderr.readline()
    found = re.search(r"the viewer is at (http://127\.0\.0\.1:\d+/\S*)", line)
    assert found, line + process.stderr.read()
    return found[1]


def stop(process) -> None:
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "stopped" in errors


def test_it_serves_the_runs_of_this_folder_until_ctrl_c(start, make_run):
    make_run()
    process = start("view", "--no-open")
    url = served(process)
    with urllib.request.urlopen(f"{url}api/runs", timeout=30) as reply:
        [run] = json.loads(reply.read())["runs"]
    assert run["env_id"] == "sums"
    with urllib.request.urlopen(url, timeout=30) as reply:
        assert b"static/app.js" in reply.read()
    stop(process)


def test_one_run_opens_its_page_and_two_open_side_by_side(start, make_run):
    a, b = make_run("a"), make_run("b")
    process = start("view", str(a), "--no-open")
    assert re.search(r"/#/run/\w{12}$", served(process))
    stop(process)
    process = start("view", str(a / "results.jsonl"), str(b), "--no-open")
    assert re.search(r"/#/compare/\w{12}/\w{12}$", served(process))
    stop(process)


def test_it_exports_one_file(run, make_run, folder):
    path = make_run()
    shown = run("view", str(path), "--export", "run.html").stdout
    assert re.fullmatch(r"run\.html \(\d\.\d MB\) opens in any browser, without a server\n", shown)
    assert "2+2?" in (folder / "run.html").read_text(encoding="utf-8")


def test_folders_of_runs_are_taken_at_either_level(run, make_run, folder):
    path = make_run(root="elsewhere")
    for given in (path, path.parent, path.parent.parent):
        run("view", str(given), "--export", "run.html")
        assert path.name in (folder / "run.html").read_text(encoding="utf-8")
    run("view", "--root", "elsewhere", "--export", "run.html")


def test_a_run_goes_by_last_or_the_start_of_its_id(run, make_run, folder):
    path = make_run()
    for given in ("last", path.name[:4]):
        run("view", given, "--export", "run.html")
        assert path.name in (folder / "run.html").read_text(encoding="utf-8")


def test_what_is_no_run_is_said(run):
    errors = run("view", "environments", code=2).stderr
    assert "environments is not a run directory and contains none; vf eval makes one" in errors
    assert "there is no run 'no/such/run'" in run("view", "no/such/run", code=2).stderr


def test_an_export_of_nothing_and_to_nowhere_are_said(run, make_run):
    assert "there is no run to export" in run("view", "--export", "x.html", code=1).stderr
    path = make_run()
    assert "no/x.html cannot be written" in run("view", str(path), "--export", "no/x.html", code=1).stderr


def test_a_port_that_is_taken_is_said(run, start, make_run):
    make_run()
    process = start("view", "--no-open")
    port = re.search(r":(\d+)/", served(process))[1]
    assert f"cannot listen on 127.0.0.1:{port}" in run("view", "--no-open", "--port", port, code=1).stderr
    stop(process)
