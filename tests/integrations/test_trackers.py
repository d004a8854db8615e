"""Figures to wandb (offline), Trackio and TensorBoard (slow): the real packages; Trackio's pins do not fit ours."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig

import pytest

from tests.support.venvs import ROOT, python_with


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_tracker_has_the_figures_and_none_is_skipped() -> None:
    python = python_with("trackio", "trackio==0.43.0")
    command = [str(python), "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/trainers/test_tracking.py"]
    path = os.pathsep.join([str(ROOT), sysconfig.get_paths()["purelib"]])
    env = {**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""}  # whose options would change the summary
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(r"^\d+ passed in", done.stdout, re.MULTILINE), f"some were skipped:\n{done.stdout[-3000:]}"
