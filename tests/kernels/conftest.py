"""What tests of kernels share with those of the engine that runs them."""

from __future__ import annotations

from tests.engine.support.started import start as start  # a fixture
