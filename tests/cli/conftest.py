"""Commands run as a person would run them: in an empty folder, with the repository's environments at hand."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from verifiers.cli.main import vf


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "environments").symlink_to(repo / "environments")
    return tmp_path


@pytest.fixture
def run() -> Callable[..., Result]:
    """``run("eval", "arithmetic", …)`` in this process; ``code=`` is the exit code it must end with, None for any."""

    def call(*args: str, code: int | None = 0, env: dict[str, str] | None = None) -> Result:
        result = CliRunner().invoke(vf, list(args), prog_name="vf", env=env)
        shown = f"{result.stdout}\n{result.stderr}"
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert code in (None, result.exit_code), shown
        return result

    return call


@pytest.fixture
def in_terminal(repo: Path) -> Callable[..., list[str]]:
    """``in_terminal(80, "runs")``: the lines that a terminal of 80 columns shows, without colours."""

    def call(columns: int, *args: str) -> list[str]:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        command = [sys.executable, "-m", "verifiers", *args]
        environment = {**os.environ, "PYTHONPATH": str(repo), "COLUMNS": str(columns)}
        shown = b""
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
            os.close(theirs)
            with contextlib.suppress(OSError):  # a terminal whose other end is closed cannot be read
                while part := os.read(ours, 1 << 16):
                    shown += part
            assert process.wait() == 0, shown
        os.close(ours)
        return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()

    return call


@pytest.fixture
def start(repo: Path) -> Callable[..., subprocess.Popen[str]]:
    """``start("eval", …)`` as a process of its own."""

    def begin(*args: str, env: dict[str, str] | None = None, stdout: Any = subprocess.PIPE) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "verifiers", *args],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(repo), **(env or {})},
        )

    return begin
