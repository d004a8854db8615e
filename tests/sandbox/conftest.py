"""No test here can start more than a few hundred processes, whatever gets loose."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from tests.sandbox.arena import guard_processes


@pytest.fixture(scope="session", autouse=True)
def few_processes() -> Iterator[None]:
    before = guard_processes()
    yield
    resource.setrlimit(resource.RLIMIT_NPROC, before)
