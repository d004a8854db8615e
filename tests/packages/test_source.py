"""Environment packages are read, never run: what is one is described, what is none is told why."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from verifiers.packages import NotAnEnvironmentError, list_environments, new_package, read_folder, read_wheel

MODULE = '''
def load_environment(n: int = 3, *, mode="a b", **kwargs):
    """Does things.

    More.
    """
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    home = tmp_path / "my_env"
    home.mkdir()
    (home / "pyproject.toml").write_text('[project]\nname = "My-Env"\nversion = "1.2"\n')
    (home / "my_env.py").write_text(MODULE)
    return home


def wheel(path: Path, **files: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_folder_says_its_name_version_arguments_and_first_sentence(package):
    found = read_folder(package)
    assert (found.name, found.version, found.module, found.summary) == ("My-Env", "1.2", "my_env", "Does things.")
    assert [str(argument) for argument in found.arguments] == ["n=3", "mode='a b'"]
    assert found.arguments[0].annotation == "int"


def test_what_raises_when_imported_is_read_all_the_same(package):
    (package / "my_env.py").write_text("raise RuntimeError\n" + MODULE)
    assert read_folder(package).arguments


def test_a_package_that_imports_its_function_is_followed(package):
    (package / "my_env.py").unlink()
    (package / "my_env").mkdir()
    (package / "my_env" / "__init__.py").write_text("from .task import load_environment\n")
    (package / "my_env" / "task.py").write_text(MODULE)
    assert [argument.name for argument in read_folder(package).arguments] == ["n", "mode"]


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("my_env.py", "x = 1\n", "its module 'my_env' defines no load_environment()"),
        ("my_env.py", "def load_environment(:\n", "is not Python"),
        ("my_env.py", None, "it has neither my_env.py nor my_env/__init__.py"),
        ("pyproject.toml", None, "it has no pyproject.toml (vf init NAME makes a whole one)"),
        ("pyproject.toml", "[project\n", "is not TOML"),
        ("pyproject.toml", "[tool]\n", "gives no name under [project]"),
    ],
    ids=["no function", "no python", "no module", "no project", "no toml", "no name"],
)
def test_a_folder_that_is_none_says_why(package, file, text, why):
    if text is None:
        (package / file).unlink()
    else:
        (package / file).write_text(text)
    with pytest.raises(NotAnEnvironmentError) as caught:
        read_folder(package)
    assert why in str(caught.value)


def test_a_wheel_is_read_without_being_unpacked(tmp_path):
    about = "Metadata-Version: 2.1\nName: my-env\nVersion: 0.3\n"
    found = read_wheel(wheel(tmp_path / "a.whl", **{"my_env.py": MODULE, "my_env-0.3.dist-info/METADATA": about}))
    assert (found.name, found.version, found.module) == ("my-env", "0.3", "my_env")


def test_a_wheel_whose_module_has_another_name_is_found_too(tmp_path):
    about = "Name: org-my-env\nVersion: 0.3\n"
    files = {"other/__init__.py": MODULE, "org_my_env-0.3.dist-info/METADATA": about}
    assert read_wheel(wheel(tmp_path / "a.whl", **files)).module == "other"


def test_a_wheel_that_is_none_says_why(tmp_path):
    about = "Name: requests\nVersion: 1\n"
    files = {"requests/__init__.py": "", "requests-1.dist-info/METADATA": about}
    with pytest.raises(NotAnEnvironmentError, match=r"'requests' defines no load_environment"):
        read_wheel(wheel(tmp_path / "a.whl", **files))
    (tmp_path / "b.whl").write_text("no zip")
    with pytest.raises(NotAnEnvironmentError, match=r"b\.whl is no wheel"):
        read_wheel(tmp_path / "b.whl")
    with pytest.raises(NotAnEnvironmentError, match="holds no METADATA"):
        read_wheel(wheel(tmp_path / "c.whl", a="b"))


def test_a_new_package_reads_back_and_never_writes_over_another(tmp_path):
    for name, is_multi_file in (("my-env", False), ("other", True)):
        new_package(name, tmp_path, is_multi_file=is_multi_file)
        assert read_folder(tmp_path / name.replace("-", "_")).name == name
    with pytest.raises(FileExistsError, match="my_env exists already"):
        new_package("my-env", tmp_path)


@pytest.mark.parametrize("name", ["../x", "My Env", "", "1st", "verifiers", "a--b"])
def test_a_name_that_could_not_be_a_package_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match="cannot be the name of an environment"):
        new_package(name, tmp_path)


def test_a_folder_lists_its_environments_and_skips_the_rest(tmp_path, package):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "plain.py").write_text(MODULE)
    (tmp_path / "notes").mkdir()
    local = [listed for listed in list_environments(tmp_path) if listed.is_local]
    assert [listed.package.name for listed in local] == ["My-Env", "plain"]
