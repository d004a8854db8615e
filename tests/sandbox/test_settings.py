"""What a sandbox is built with: limits on memory, time and output, and packages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from verifiers.errors import SandboxError
from verifiers.sandbox import Sandbox

pytestmark = pytest.mark.usefixtures("full_level")


def test_memory_is_limited_per_sandbox_and_per_call() -> None:
    code = "x = bytearray(100 << 20); 'fits'"
    with Sandbox(memory_mb=128) as sandbox:
        assert sandbox.run(code).status == "ok"
        assert sandbox.run(code, memory_mb=64).status == "memory"
        assert sandbox.run("x = bytearray(150 << 20); 'fits'", memory_mb=256).status == "ok"


def test_time_is_limited_per_sandbox_and_per_call() -> None:
    with Sandbox(timeout_s=0.2) as sandbox:
        assert sandbox.run("import time; time.sleep(60)").status == "timeout"
        assert sandbox.run("import time; time.sleep(0.5); 'slept'", timeout_s=30).value == "'slept'"


def test_output_is_limited_and_what_fits_is_kept() -> None:
    with Sandbox(output_kb=8) as sandbox:
        result = sandbox.run("print('x' * 100_000)")
        assert result.status == "output"
        assert set(result.stdout) == {"x"}
        assert 4096 <= len(result.stdout) <= 8192


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"language": "perl"}, "language must be 'python' or 'bash'; got 'perl'"),
        ({"memory_mb": 0}, "memory_mb must be a whole number of at least 1; got 0"),
        ({"output_kb": "64"}, "output_kb must be a whole number of at least 1; got '64'"),
        ({"timeout_s": -1}, "timeout_s must be a positive number of seconds; got -1"),
        ({"timeout_s": float("inf")}, "timeout_s must be a positive number"),
        ({"level": "some"}, "level must be 'full', 'reduced' or 'none'; got 'some'"),
        ({"level": "none"}, "pass allow_unsafe=True as well"),
        ({"warm": -1}, "warm must be a whole number of at least 0; got -1"),
        ({"files": {"a\0": "x"}}, "the name of a file must be a non-empty string without null characters"),
        ({"files": {"": "x"}}, "the name of a file must be a non-empty string"),
        ({"files": {"\ud800": "x"}}, "the name of a file must be text that can be encoded"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_nonsense_is_refused_when_the_sandbox_is_built(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sandbox(**settings)


def test_packages_is_a_list_and_not_a_name() -> None:
    with pytest.raises(TypeError, match="packages must be a list of names"):
        Sandbox(packages="numpy")


def test_packages_are_there_and_preloaded() -> None:
    pytest.importorskip("numpy")
    with Sandbox(packages=("numpy", "no_such_package"), timeout_s=60) as sandbox:
        result = sandbox.run(
            "import sys; loaded = 'numpy' in sys.modules\nimport numpy; loaded, int(numpy.arange(4).sum())"
        )
        assert result.value == "(True, 6)", result
        draws = {sandbox.run("import numpy; float(numpy.random.rand())").value for _ in range(3)}
        assert len(draws) == 3


@pytest.mark.parametrize(
    ("code", "why"),
    [("raise ValueError('no\\ndevice')", "ValueError: no device"), ("raise SystemExit(3)", "SystemExit: 3")],
)
def test_a_package_that_breaks_when_it_is_imported_is_named(
    code: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    name = f"broken_{len(code)}"
    (site / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(site))
    named = re.escape(f"the package {name!r} cannot be imported ({why})")
    with Sandbox(packages=(name,)) as sandbox, pytest.raises(SandboxError, match=named):
        sandbox.run("1")
