"""``make demo``: without a GPU the CPU build of torch is asked for first, and no index has to have it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PYTHON = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
    *"import torch"*) exit 1;;
    *"-i https"*+cpu*) exit {own};;
    *+cpu*) exit {usual};;
esac
"""


def asked(tmp_path: Path, repo: Path, *, torch: str, usual: int, own: int) -> tuple[list[str], str]:
    """What pip was asked for, and what was said; the Python in the environment only notes its arguments."""
    if shutil.which("make") is None:
        pytest.skip("make is not here")
    venv, log = tmp_path / "venv", tmp_path / "log"
    (venv / "bin").mkdir(parents=True)
    (venv / ".core").touch()
    python = venv / "bin" / "python"
    python.write_text(PYTHON.format(log=log, usual=usual, own=own))
    python.chmod(0o755)
    words = ["make", "-o", str(venv / ".core"), f"VENV={venv}", f"TORCH={torch}", str(venv / ".torch")]
    done = subprocess.run(words, cwd=repo, capture_output=True, text=True, check=True)
    lines = log.read_text().splitlines() if log.exists() else []
    return [line for line in lines if "+cpu" in line], done.stdout


def test_the_cpu_build_comes_from_the_index_that_pip_is_set_up_for_where_it_has_one(tmp_path, repo):
    found, _ = asked(tmp_path, repo, torch="cpu", usual=0, own=1)
    assert len(found) == 1
    assert "torch==" in found[0]
    assert "-i http" not in found[0]


def test_else_from_pytorchs_own_and_an_index_that_is_away_costs_nothing_but_a_line(tmp_path, repo):
    found, said = asked(tmp_path, repo, torch="cpu", usual=1, own=0)
    assert len(found) == 2
    assert "found none" not in said


def test_where_no_index_has_it_the_usual_build_will_do(tmp_path, repo):
    found, said = asked(tmp_path, repo, torch="cpu", usual=1, own=1)
    assert len(found) == 2
    assert "found none; the usual build will do" in said


def test_where_there_is_a_gpu_pip_chooses(tmp_path, repo):
    assert asked(tmp_path, repo, torch="any", usual=0, own=0)[0] == []
