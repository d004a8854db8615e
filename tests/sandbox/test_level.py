"""The level is what the machine can give, found out by trying: other tests skip where it is too low, not this one."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from verifiers.sandbox import level


def can_unshare() -> bool:
    """Does the system's own tool get the namespaces that the full level needs?"""
    tool = shutil.which("unshare")
    if tool is None:
        return False
    command = [tool, "--user", "--map-root-user", "--net", "--ipc", "--pid", "--fork", "--mount-proc", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_machine_that_has_namespaces_gives_the_full_level() -> None:
    if not can_unshare():
        pytest.skip("namespaces cannot be made here, not even by the system's own tool")
    found = level()
    assert found.name == "full", found
