"""The Makefile: which build of torch is asked for, and what the sanitizer's target loads before Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
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


def test_an_exception_of_torchs_does_not_end_what_is_run_with_the_sanitizer(tmp_path, repo):
    pytest.importorskip("torch")
    for program in ("make", "cc"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not here")
    found = subprocess.run(["cc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    if not Path(found.stdout.strip()).exists():
        pytest.skip("this compiler has no sanitizer")
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    raising = "import torch\ntry:\n torch.zeros(2).view(3)\nexcept RuntimeError:\n print('it was raised')"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{raising}"\n')
    python.chmod(0o755)
    stamp = python.parents[1] / ".dev"
    stamp.touch()
    words = ["make", "-o", str(stamp), f"VENV={python.parents[1]}", "sanitize"]
    done = subprocess.run(words, cwd=repo, capture_output=True, text=True, check=False)
    assert "it was raised" in done.stdout.splitlines(), done.stderr[-2000:]  # make says where it is, called by another
