"""Engines that a test starts are closed after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Start an engine over a model: a few rows, and enough room for a short conversation."""
    from verifiers.engine.engine import Engine

    made: list[Engine] = []

    def start(model: Any, **settings: Any) -> Engine:
        made.append(Engine(model, **{"rows": 4, "length": 160, **settings}))
        return made[-1]

    yield start
    for engine in made:
        engine.close()
