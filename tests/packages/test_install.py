"""Installing: from a folder, a wheel, an index and a hub, into a folder of its own; what is none changes nothing."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from verifiers.packages import InstallError, install, publish, read_verdict, uninstall
from verifiers.packages.install import Installer, find_program

MODULE = "def load_environment(n=3):\n    'Counts.'\n"
# Builds without a build package, so that nothing has to be fetched.
BACKEND = """
import zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "my_env-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.write("my_env.py")
        wheel.writestr("my_env-0.1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: my-env\\nVersion: 0.1.0\\n")
        wheel.writestr("my_env-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr("my_env-0.1.0.dist-info/RECORD", "")
    return name
"""
PYPROJECT = """
[project]
name = "my-env"
version = "0.1.0"
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    home = tmp_path / "environments" / "my_env"
    home.mkdir(parents=True)
    (home / "pyproject.toml").write_text(PYPROJECT)
    (home / "backend.py").write_text(BACKEND)
    (home / "my_env.py").write_text(MODULE)
    return home


@pytest.fixture
def wheel(folder: Path, tmp_path: Path) -> Path:
    namespace: dict = {}
    exec(BACKEND, namespace)
    before = Path.cwd()
    os.chdir(folder)
    try:
        return tmp_path / shutil.move(folder / namespace["build_wheel"](str(folder)), tmp_path)
    finally:
        os.chdir(before)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address at which its files are served."""
    root = tmp_path / "served"
    root.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(root))

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield root, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def into(tmp_path: Path) -> dict:
    return {"target": str(tmp_path / "target"), "has_deps": False}


def test_a_folder_is_built_and_installed(folder, tmp_path):
    done = install(str(folder), **into(tmp_path))
    assert (done.package.name, done.package.version, done.program) == ("my-env", "0.1.0", "pip")
    assert (tmp_path / "target" / "my_env.py").read_text() == MODULE


def test_a_bare_name_is_looked_up_in_the_folder_of_environments_first(folder, tmp_path):
    done = install("my-env", environments_dir=folder.parent, **into(tmp_path))
    assert done.source == str(folder)


def test_a_wheel_is_installed(wheel, tmp_path):
    install(str(wheel), **into(tmp_path))
    assert (tmp_path / "target" / "my_env.py").is_file()


def test_a_name_comes_from_the_index_that_was_named_and_no_other(wheel, served, tmp_path):
    root, url = served
    (root / "my-env").mkdir()
    shutil.copy(wheel, root / "my-env")
    done = install("my-env@0.1.0", index=url, environments_dir=tmp_path / "none", **into(tmp_path))
    assert done.source == url
    assert (tmp_path / "target" / "my_env.py").is_file()
    with pytest.raises(InstallError, match="No matching distribution"):
        install("click", index=url, **into(tmp_path))


@pytest.mark.parametrize("version", ["0.1.0", "latest"])
def test_a_name_of_a_hub_is_the_wheel_that_the_hub_names(wheel, served, tmp_path, version, monkeypatch):
    root, url = served
    entry = root / "api" / "v1" / "environmentshub" / "org" / "my-env" / f"@{version}"
    entry.parent.mkdir(parents=True)
    data = {"name": "my-env", "semantic_version": "0.1.0", "wheel_url": f"{url}/{wheel.name}", "url_dependencies": []}
    entry.write_text(json.dumps({"data": data}))
    shutil.copy(wheel, root)
    monkeypatch.setenv("VF_HUB_URL", url)
    done = install("org/my-env" if version == "latest" else f"org/my-env@{version}", **into(tmp_path))
    assert done.source == f"org/my-env on {url}"
    assert (tmp_path / "target" / "my_env.py").is_file()


def test_what_a_hub_does_not_have_is_told(served, tmp_path):
    with pytest.raises(InstallError, match="org/none@latest: the hub has no such environment"):
        install("org/none", hub=served[1], **into(tmp_path))
    with pytest.raises(InstallError, match="gave no valid answer"):
        install("org/none", hub="http://127.0.0.1:9", **into(tmp_path))


def test_without_a_hub_one_sentence_says_how_to_name_one(tmp_path, monkeypatch):
    monkeypatch.delenv("VF_HUB_URL", raising=False)
    with pytest.raises(InstallError, match="VF_HUB_URL, or use the hub's own program: prime env install org/my-env"):
        install("org/my-env", **into(tmp_path))


def test_an_environment_replaces_no_installed_package_that_is_none(folder, monkeypatch):
    ran: list = []
    module = sys.modules[Installer.__module__]
    monkeypatch.setattr(module, "run_program", lambda program, words, settings=None: ran.append(words))
    (folder / "pyproject.toml").write_text(PYPROJECT.replace("my-env", "pytest"))
    (folder / "my_env.py").rename(folder / "pytest.py")
    with pytest.raises(InstallError, match=r"pytest [\d.]+ is installed here and is not an environment"):
        install(str(folder))
    assert ran == []
    install(str(folder), target="elsewhere")
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "pytest.py").rename(folder / "my_env.py")
    install(str(folder))
    assert [words[0] for words in ran] == ["install", "install"]


def test_what_is_no_environment_is_refused_before_anything_is_installed(folder, wheel, tmp_path):
    (folder / "my_env.py").write_text("x = 1\n")
    with pytest.raises(InstallError, match="does not define load_environment"):
        install(str(folder), **into(tmp_path))
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("click-1.dist-info/METADATA", "Name: click\nVersion: 1\n")
        archive.writestr("click/__init__.py", "")
    with pytest.raises(InstallError, match="does not define load_environment"):
        install(str(tmp_path / "other.whl"), **into(tmp_path))
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("what", ["a b", "https://x/y", "", "../nowhere"])
def test_what_cannot_be_installed_is_named(what, tmp_path):
    with pytest.raises(InstallError, match="cannot be installed; pass a folder"):
        install(what, environments_dir=tmp_path / "none", **into(tmp_path))


def test_uv_is_used_where_there_is_no_pip(monkeypatch, tmp_path, folder):
    said = tmp_path / "said"
    program = tmp_path / "bin" / "uv"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {said}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find_program() == "uv"
    done = install(str(folder))
    assert done.program == "uv"
    Installer(program="uv", target="there").install(done.package, ["my-env==0.1.0"], index="http://x/simple")
    first, second = said.read_text().splitlines()
    assert first.startswith("pip install --quiet --python ")
    assert first.endswith(str(folder))
    assert second.endswith("--target there --index http://x/simple my-env==0.1.0")


def test_without_either_program_the_way_to_get_one_is_told(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(InstallError, match=r"neither pip nor uv is available; try: .* -m ensurepip"):
        find_program()
    with pytest.raises(InstallError, match="uv is not available"):
        find_program("uv")


def test_an_environment_is_installed_from_a_git_address_and_what_is_none_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")

    def commit(text: str) -> str:
        (folder / "my_env.py").write_text(text)
        for words in (
            ["init", "-q"],
            ["add", "."],
            ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"],
        ):
            subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)
        return f"git+file://{folder}"

    target = tmp_path / "target"
    done = install(commit(MODULE), target=str(target), has_deps=False, program="pip")
    assert done.package.name == "my-env"
    assert (target / "my_env.py").is_file()
    with pytest.raises(InstallError, match="does not define load_environment"):
        install(commit("x = 1\n"), target=str(tmp_path / "other"), has_deps=False, program="pip")
    assert not (tmp_path / "other").exists()


def test_a_published_wheel_carries_its_verdict_and_says_when_it_is_about_other_files(
    folder: Path, tmp_path: Path
) -> None:
    verdict = {"env_id": "my-env", "is_clean": True, "verdicts": [{"name": "it loads", "status": "ok", "found": ""}]}
    wheel = publish(folder, tmp_path / "dist", verdict, program="pip")
    found = read_verdict(wheel)
    assert found is not None
    assert found["counts"] == {"ok": 1}
    assert found["is_current"]
    done = install(str(wheel), target=str(tmp_path / "target"), has_deps=False, program="pip")
    assert done.package.module == "my_env"
    assert list((tmp_path / "target").glob("*.dist-info/verifiers-check.json"))

    changed = tmp_path / "changed.whl"
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name) + (b"# more\n" if name == "my_env.py" else b""))
    other = read_verdict(changed)
    assert other is not None
    assert not other["is_current"]


def test_only_an_installed_environment_is_uninstalled() -> None:
    with pytest.raises(InstallError, match="no environment 'pytest' is installed"):
        uninstall("pytest")
    with pytest.raises(InstallError, match="arithmetic comes with verifiers"):
        uninstall("arithmetic")
