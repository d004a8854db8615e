"""The repository itself: nothing of one person's machine in it, one version, one lock file that locks everything."""

from __future__ import annotations

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import verifiers

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# Spelt with a character class, so that this file does not match itself.
FOREIGN = re.compile(
    r"(?<![\w.~-])/(?:[w]ork/|[r]oot/|[o]pt/(?:pypi|wheels))"  # folders of the machine it was written on
    r"|/[t]mp/bash_jobs"
    r"|[p]ypi\.org|[p]ythonhosted\.org|[n]pmjs\.(?:org|com)"  # registries belong to the reader's own configuration
    r"|--(?:extra-)?[i]ndex-url|--[f]ind-links"
)


def text_files() -> list[Path]:
    """What is in the repository, or would be with the next commit."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode or not listing.stdout:
        pytest.skip("not a git checkout")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_folder_or_a_registry_of_the_machine_it_was_written_on() -> None:
    found = []
    for path in text_files():
        blob = path.read_bytes()
        if b"\0" in blob[:8192]:
            continue
        for number, line in enumerate(blob.decode("utf-8", errors="replace").splitlines(), 1):
            if match := FOREIGN.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert not found, "\n".join(found)


def test_the_version_is_written_the_same_in_both_places() -> None:
    assert verifiers.__version__ == PROJECT["version"]


def test_no_environment_puts_a_file_of_a_common_name_into_site_packages() -> None:
    for path in ROOT.glob("environments/*/pyproject.toml"):
        wheel = tomllib.loads(path.read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
        module = path.parent.name
        assert wheel["include"] == [f"{module}.py"], path
        assert wheel["force-include"] == {"pyproject.toml": f"{module}.pyproject.toml"}, path


def test_the_lock_file_holds_exact_pins_only() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[\w.+]+", pin)] == []


def test_every_direct_dependency_is_locked() -> None:
    def canonical(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    lock = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    locked = {canonical(name) for name in re.findall(r"^([\w.-]+)==", lock, flags=re.MULTILINE)}
    extras = [need for needs in PROJECT["optional-dependencies"].values() for need in needs]
    wanted = {canonical(re.match(r"[\w.-]+", need)[0]) for need in PROJECT["dependencies"] + extras}
    assert wanted - locked == {"verifiers"}


@pytest.mark.parametrize("host", ["example.com", "192.0.2.1"])
def test_tests_reach_this_machine_only(host: str) -> None:
    with pytest.raises(OSError, match="tests reach this machine only"):
        socket.create_connection((host, 80), timeout=5)


def test_the_readmes_first_screen_has_two_commands_and_two_pictures() -> None:
    first = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:16]
    commands = [line for line in first if line.startswith(("pip install", "vf ", "make "))]
    assert len(commands) == 2
    assert re.findall(r"\((docs/images/[\w.-]+)\)", "\n".join(first)) == [
        "docs/images/viewer-run.png",
        "docs/images/learning-curve.svg",
    ]
    assert "<title>reverse-text" in (ROOT / "docs/images/learning-curve.svg").read_text(encoding="utf-8")


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def test_no_variable_of_a_comprehension_hides_an_import() -> None:
    """On Python 3.12.0 and 3.12.1 the import is then gone from the rest of the function."""
    found = []
    for path in sorted((ROOT / "verifiers").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}
        comprehensions = [node for node in ast.walk(tree) if isinstance(node, COMPREHENSIONS)]
        targets = [part.target for node in comprehensions for part in node.generators]
        variables = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        found += [f"{path.relative_to(ROOT)}:{name.lineno}: {name.id}" for name in variables if name.id in names]
    assert not found, "\n".join(found)


PROMISED = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]


def python_of(version: str) -> Path | None:
    """On the path, or among those of pyenv, whose shims on the path run the chosen one only."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python{version}")
    for python in (shutil.which(f"python{version}"), *sorted(kept)):
        said = python and subprocess.run([python, "-c", "print('here')"], capture_output=True, text=True, check=False)
        if said and said.stdout.strip() == "here":
            return Path(python)
    return None


def test_every_package_that_users_install_has_a_lower_bound() -> None:
    extras = PROJECT["optional-dependencies"]
    needs = [need for name, needs in extras.items() if name not in {"docs", "dev"} for need in needs]
    wanted = [need for need in PROJECT["dependencies"] + needs if not need.startswith("verifiers[")]
    assert [need for need in wanted if not re.fullmatch(r"[\w.-]+>=[\d.]+", need)] == []


CORE = ["tests/store", "tests/stats", "tests/parsers", "tests/test_results.py"]
ANY_PYTHON = [*CORE, "tests/viewer", "tests/sandbox", "tests/tools/test_schemas.py", "tests/test_calls.py"]
ANY_PYTHON += ["tests/test_signatures.py"]
OLDEST = [*CORE, "tests/clients", "tests/tools", "tests/rubrics", "tests/cli/test_main.py", "tests/test_runner.py"]


def check_core(python: Path | str, venv: Path, needed: list[str], tests: list[str]) -> None:
    """Run tests in a new environment with these packages."""
    subprocess.run([python, "-m", "venv", venv], check=True)
    own = venv / "bin" / "python"
    needed = [*needed, "hypothesis", "openai", "playwright", "pytest", "pytest-timeout", "scipy", "tokenizers"]
    installed = subprocess.run(
        [own, "-m", "pip", "install", "-q", *needed], capture_output=True, text=True, check=False
    )
    if installed.returncode:
        pytest.skip(f"no package registry: {installed.stderr.strip().splitlines()[-1:]}")
    done = subprocess.run(
        [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", PROMISED)
def test_the_core_the_sandbox_and_the_viewer_work_on_every_python_that_is_promised(
    version: str, tmp_path: Path
) -> None:
    """The tests that need no torch, in an environment made by that Python."""
    if (python := python_of(version)) is None:
        pytest.skip(f"there is no Python {version} on this machine")
    needed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["data"], "numpy"]
    check_core(python, tmp_path / "venv", needed, ANY_PYTHON)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the oldest releases have no wheels for newer Pythons")
def test_the_core_works_with_the_oldest_packages_that_are_promised(tmp_path: Path) -> None:
    oldest = [need.replace(">=", "==") for need in PROJECT["dependencies"]]
    needed = [*oldest, "anthropic", "datasets", "math-verify", "mcp", "numpy", "pyarrow"]
    check_core(sys.executable, tmp_path / "venv", needed, OLDEST)
