"""A run directory in a temporary folder, and records to put into it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verifiers.store import RunDir

CONFIG = {"env_id": "sums", "sampling_args": {"temperature": 0.7}, "rollouts_per_example": 2}


@pytest.fixture
def config() -> dict[str, Any]:
    return dict(CONFIG)


@pytest.fixture
def run(tmp_path: Path, config: dict[str, Any]) -> RunDir:
    return RunDir.create(tmp_path, env_id="sums", model="org/model", config=config)


@pytest.fixture
def make_record() -> Callable[..., dict[str, Any]]:
    return _record


def _record(example_id: int | str = 0, rollout: int = 0, *, fails: bool = False, **columns: Any) -> dict[str, Any]:
    error = {"type": "JudgeError", "blame": "grader", "message": "down"} if fails else None
    return {
        "example_id": example_id,
        "rollout": rollout,
        "task": "sums",
        "prompt": [{"role": "user", "content": "2+2?"}],
        "completion": [{"role": "assistant", "content": "4"}],
        "answer": "4",
        "info": {},
        "reward": None if fails else 1.0,
        "error": error,
        "metrics": {},
        **columns,
    }
