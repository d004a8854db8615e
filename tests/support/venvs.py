"""Virtual environments for packages whose pins do not fit ours: made once, kept, and used by tests marked slow."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOME = Path(os.environ.get("VERIFIERS_TEST_VENVS") or Path.home() / ".cache" / "verifiers" / "test-venvs")
OURS = ("aiohttp>=3.10", "click>=8.1.7", "msgspec>=0.19", "rich>=13.7", "openai>=1.60", "datasets>=3.0")


def python_with(name: str, *requirements: str) -> Path:
    """The interpreter of an environment with these packages and our own dependencies; a skip where none can be made."""
    wanted = sorted([*requirements, *OURS])
    folder = HOME / f"{name}-{hashlib.sha256(chr(10).join(wanted).encode()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        made = subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", *wanted], capture_output=True, text=True, check=False
        )
        if made.returncode:
            pytest.skip(f"{name} cannot be installed here: {made.stderr.strip()[-300:]}")
        (folder / "complete").touch()
    return python


def run_contract(python: Path, script: str, *args: str, timeout_s: float = 1500.0) -> str:
    """Run a script of ``tests/integrations/contracts`` with our package as it is here; its output if it succeeds."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_raylet_start_wait_time_s": "90",
    }
    path = ROOT / "tests" / "integrations" / "contracts" / script
    done = subprocess.run(
        [str(python), str(path), *args], capture_output=True, text=True, env=environment, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{script} failed:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout
