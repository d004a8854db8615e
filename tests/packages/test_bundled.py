"""The environments of this library come inside its wheel, and nobody is sent to a stranger's package of their name."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import verifiers as vf
from verifiers.envs.bundled import bundled_names
from verifiers.packages import BundledError, install, list_environments

Vf = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def installed(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Vf:
    """``vf`` of the built wheel, unpacked as pip would, in an empty folder with an empty home."""
    folder = tmp_path_factory.mktemp("installed")
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(words, cwd=repo, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "site")
    (folder / "home").mkdir()
    (folder / "work").mkdir()

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "verifiers", *words],
            cwd=folder / "work",
            env={**os.environ, "PYTHONPATH": str(folder / "site"), "HOME": str(folder / "home")},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_the_first_advertised_command_works_from_a_wheel_in_an_empty_folder(installed: Vf) -> None:
    done = installed("eval", "arithmetic", "-m", "fake", "-n", "2", "-r", "1")
    assert done.returncode == 0, done.stderr
    assert "2 rollouts of 2 examples, 0 failed" in done.stdout


def test_the_wheel_holds_every_environment_of_the_repository_without_its_tests(installed: Vf, repo: Path) -> None:
    listed = installed("list").stdout
    own = {path.parent.name for path in (repo / "environments").glob("*/pyproject.toml")}
    assert set(bundled_names()) == own
    assert all(name.replace("_", "-") in listed for name in own)
    assert listed.count("comes with verifiers") == len(own)
    found = installed("-h")
    assert found.returncode == 0


def test_a_bundled_environment_has_the_defaults_of_its_own_pyproject(installed: Vf) -> None:
    done = installed("eval", "capitals", "-m", "fake", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "'max_tokens': 24" in done.stdout


def test_a_name_that_is_not_there_is_no_reason_to_install_a_strangers_package() -> None:
    with pytest.raises(ValueError, match="there is no environment 'arithmatic'") as raised:
        vf.load_environment("arithmatic")
    assert "Did you mean arithmetic" in str(raised.value)
    assert "pip install" not in str(raised.value)


def test_a_module_that_is_missing_is_no_reason_to_install_a_strangers_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy_env.py").write_text("import surely_no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="needs the module 'surely_no_such_module'") as raised:
        vf.load_environment("needy-env")
    assert "pip install" not in str(raised.value)


@pytest.mark.parametrize("name", ["arithmetic", "reverse-text@0.1.0", "reasoning-gym"])
def test_installing_what_comes_along_fetches_nothing(name: str, tmp_path: Path) -> None:
    with pytest.raises(BundledError, match="comes with verifiers"):
        install(name, environments_dir=tmp_path)


def test_a_local_environment_hides_the_bundled_one_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "capitals").mkdir()
    (tmp_path / "capitals" / "capitals.py").write_text('"""Mine."""\ndef load_environment(): ...\n')
    kinds = {listed.package.module: listed.kind for listed in list_environments(tmp_path)}
    assert kinds["capitals"] == "local"
    assert kinds["arithmetic"] in ("bundled", "installed")
