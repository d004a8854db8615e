"""Engines that a test starts are closed after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.support.served import NAME, Served, save_model, serving


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Start an engine over a model: a few rows, and enough room for a short conversation."""
    from verifiers.engine.engine import Engine

    made: list[Engine] = []

    def start(model: Any) -> Engine:
        made.append(Engine(model, rows=4, length=160))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`vf serve` over a tiny model, for all tests that only ask it things."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("served") / "tiny-model"
    save_model(folder)
    with serving(folder, "--name", NAME, "--rows", "8", "--length", "2048") as server:
        yield server
