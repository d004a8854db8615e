"""Engines and servers that tests ask are closed after them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.support.served import NAME, Served, save_model, serving
from tests.engine.support.started import start as start  # a fixture


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`vf serve` over a tiny model, for all tests that only ask it things."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("served") / "tiny-model"
    save_model(folder)
    with serving(folder, "--name", NAME, "--rows", "8", "--length", "2048") as server:
        yield server
