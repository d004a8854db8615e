"""Every attack fails: at the full level and the reduced one, as root and as an unprivileged user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.sandbox import (  # noqa: F401 - each notes its attacks
    attacks_files,
    attacks_kernel,
    attacks_network,
    attacks_processes,
    attacks_replies,
    attacks_resources,
    attacks_shared,
    attacks_watch,
)
from tests.sandbox.arena import ATTACKS, LEVELS, ROOT, Arena, Skip, why_not
from verifiers.sandbox.inside.namespaces import NOBODY

EACH = [
    pytest.param(name, level, id=f"{name}-{level}")
    for name, (_, levels) in sorted(ATTACKS.items())
    for level in LEVELS
    if level in levels
]


@pytest.fixture(scope="module")
def arenas() -> Iterator[dict[str, Arena]]:
    arenas: dict[str, Arena] = {}
    yield arenas
    for arena in arenas.values():
        arena.close()


@pytest.mark.parametrize(("name", "level"), EACH)
def test_an_attack_fails(name: str, level: str, arenas: dict[str, Arena]) -> None:
    if reason := why_not(level):
        pytest.skip(reason)
    arena = arenas.get(level)
    if arena is None:
        arena = arenas[level] = Arena(level)
    try:
        ATTACKS[name][0](arena)
    except Skip as missing:
        pytest.skip(str(missing))


class Nobody:
    """A process of a user who may do nothing, which fights attacks on demand."""

    def __init__(self, python: str) -> None:
        self.process = subprocess.Popen(
            [python, "-m", "tests.sandbox.fighter"],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
        )

    def fight(self, name: str, level: str) -> dict[str, str]:
        """How it went: ``skipped`` or ``failed``, with the reason, or nothing."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, level]) + "\n")
        self.process.stdin.flush()
        return dict(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        self.process.communicate(timeout=60)


def python_for_everybody() -> str | None:
    """A Python that an unprivileged user can run; one in root's home is none."""
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            subprocess.run(
                [python, "-c", "import sys; assert sys.version_info >= (3, 11)"],
                check=True,
                capture_output=True,
                user=NOBODY,
                group=NOBODY,
                extra_groups=[],
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    return None


@pytest.fixture(scope="module")
def nobody() -> Iterator[Nobody]:
    if os.geteuid() != 0:
        pytest.skip("only root can become an unprivileged user; the other tests ran as one")
    python = python_for_everybody()
    if python is None:
        pytest.skip("there is no Python 3.11 that an unprivileged user can run")
    nobody = Nobody(python)
    yield nobody
    nobody.close()


@pytest.mark.parametrize(("name", "level"), EACH)
def test_an_attack_fails_without_privileges(name: str, level: str, nobody: Nobody) -> None:
    outcome = nobody.fight(name, level)
    if "skipped" in outcome:
        pytest.skip(outcome["skipped"])
    assert "failed" not in outcome, outcome["failed"]


def test_there_are_enough_attacks() -> None:
    assert len(ATTACKS) >= 60
