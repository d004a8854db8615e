"""Sandboxes for the tests; and no test can start more than a few hundred processes, whatever gets loose."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from tests.sandbox.arena import guard_processes, why_not
from verifiers.sandbox import Sandbox


@pytest.fixture(scope="session", autouse=True)
def few_processes() -> Iterator[None]:
    before = guard_processes()
    yield
    resource.setrlimit(resource.RLIMIT_NPROC, before)


@pytest.fixture(scope="session")
def full_level() -> None:
    if reason := why_not("full"):
        pytest.skip(reason)


@pytest.fixture(scope="module")
def sandbox(full_level: None) -> Iterator[Sandbox]:
    with Sandbox(warm=0) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def shell(full_level: None) -> Iterator[Sandbox]:
    with Sandbox(language="bash", warm=0) as sandbox:
        yield sandbox
