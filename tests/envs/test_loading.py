"""An id becomes an environment: from a folder, from a package, and never from anywhere else."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import verifiers as vf
from verifiers.envs.loading import split_id

SOURCE = """
import verifiers as vf

def load_environment(n: int = 2, level: str = "easy"):
    return vf.SingleTurnEnv(dataset=[{"question": str(i)} for i in range(n)], level=level)
"""


@pytest.fixture(autouse=True)
def _forget_modules() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("toy_"):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, source in {
        "toy_sums": SOURCE,
        "toy_empty": "x = 1",
        "toy_wrong": "def load_environment(): return 7",
        "toy_broken": "raise OSError('no disk')",
        "toy_needy": "import no_such_package_anywhere",
        "toy_open": "import verifiers as vf\ndef load_environment(**kw): return vf.SingleTurnEnv(dataset=[], **kw)",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text(source)
    return tmp_path


@pytest.mark.parametrize(
    "env_id", ["toy-sums", "toy_sums", "some-org/toy-sums", "toy-sums@latest", "org/toy-sums@latest"]
)
def test_a_folder_is_found_by_name_with_or_without_organisation(env_id: str, folder: Path) -> None:
    env = vf.load_environment(env_id, environments_dir=folder, n=3, level="hard")
    assert len(env.get_dataset()) == 3
    assert env.level == "hard"  # type: ignore[attr-defined]
    assert env.env_id == "toy-sums"
    assert env.env_args == {"n": 3, "level": "hard"}


def test_an_installed_module_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_installed.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    assert len(vf.load_environment("toy-installed").get_dataset()) == 2


def test_a_folder_in_the_working_directory_wins_and_is_loaded_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.rename(tmp_path.parent / f"{tmp_path.name}-moved")
    root = tmp_path.parent / f"{tmp_path.name}-root"
    root.mkdir()
    (tmp_path.parent / f"{tmp_path.name}-moved").rename(root / "environments")
    monkeypatch.chdir(root)
    vf.load_environment("toy-sums")
    module = sys.modules["toy_sums"]
    vf.load_environment("toy-sums")
    assert sys.modules["toy_sums"] is module


@pytest.mark.parametrize(
    "env_id",
    [
        "../secrets",
        "org/../secrets",
        "/etc/passwd",
        "a/b/c",
        "toy..sums",
        "",
        ".",
        "..",
        "toy sums",
        "toy\\sums",
        "toy-sums\n",
        "toy-sums/",
        "~/toy",
        "C:toy",
        "toy-sums@",
        "tøy",
    ],
)
def test_an_id_that_is_a_path_trick_is_refused(env_id: str, folder: Path) -> None:
    with pytest.raises(ValueError, match="is not an environment id"):
        vf.load_environment(env_id, environments_dir=folder)


@given(st.text())
def test_no_id_ever_leaves_the_folder(text: str) -> None:
    try:
        name, _ = split_id(text)
    except ValueError:
        return
    assert "/" not in name
    assert "\\" not in name
    assert ".." not in name
    assert not name.startswith(".")
    assert (Path("/base") / name).parent == Path("/base")


@pytest.mark.parametrize(
    ("env_id", "error", "message"),
    [
        ("toy-empty", ValueError, r"no load_environment\(\)"),
        ("toy-wrong", TypeError, "returned int, not an Environment"),
        ("toy-broken", OSError, "no disk"),
        ("toy-sum", ValueError, "no environment 'toy-sum'.*Did you mean toy_sums.*vf install takes a folder"),
        ("toy-sums@9.9", ValueError, "requires version 9.9, but 'toy-sums' is not an installed package"),
        ("pytest@0.0.1", ValueError, "0.0.1"),
    ],
)
def test_what_cannot_be_loaded_says_why(env_id: str, error: type[Exception], message: str, folder: Path) -> None:
    with pytest.raises(error, match=message):
        vf.load_environment(env_id, environments_dir=folder)


def test_the_version_that_counts_is_that_of_the_environment_that_is_found(folder: Path) -> None:
    (folder / "toy_sums" / "pyproject.toml").write_text('[project]\nname = "toy-sums"\nversion = "0.3"\n')
    assert vf.load_environment("toy-sums@0.3", environments_dir=folder).env_id == "toy-sums"
    with pytest.raises(ValueError, match=r"requires version 0\.2, but 0\.3 is in .*toy_sums"):
        vf.load_environment("toy-sums@0.2", environments_dir=folder)
    assert vf.load_environment("arithmetic@0.1.0", environments_dir=folder).env_id == "arithmetic"


def test_only_environments_are_proposed_for_a_name_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ValueError, match="there is no environment 'pytesst'") as raised:  # pytest is installed
        vf.load_environment("pytesst", environments_dir=folder)
    assert "Did you mean" not in str(raised.value)


def test_an_argument_the_environment_does_not_take_is_refused_with_those_it_does(folder: Path) -> None:
    with pytest.raises(TypeError, match=r"does not take \['m'\]; it takes n, level"):
        vf.load_environment("toy-sums", environments_dir=folder, m=3)
    assert vf.load_environment("toy-open", environments_dir=folder, anything=3).anything == 3  # type: ignore[attr-defined]


def test_a_package_that_an_environment_lacks_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match="no_such_package_anywhere"):
        vf.load_environment("toy-needy", environments_dir=folder)
    monkeypatch.syspath_prepend(folder / "toy_needy")
    with pytest.raises(ImportError, match="needs the module 'no_such_package_anywhere'"):
        vf.load_environment("toy-needy", environments_dir=folder / "nowhere")


def test_a_module_that_failed_to_load_is_tried_again(folder: Path) -> None:
    with pytest.raises(OSError, match="no disk"):
        vf.load_environment("toy-broken", environments_dir=folder)
    (folder / "toy_broken" / "toy_broken.py").write_text(SOURCE + "# longer than before, and mended\n")
    assert len(vf.load_environment("toy-broken", environments_dir=folder).get_dataset()) == 2


# --- nonsense ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["verifiers", "verifiers.envs.loading", "org/verifiers@0.1"])
def test_the_library_itself_is_no_environment(name: str) -> None:
    with pytest.raises(ValueError, match=r"not an environment: verifiers\S* is this library itself"):
        vf.load_environment(name)


@pytest.mark.parametrize("name", ["antigravity", "json", "os.path", "idlelib"])
def test_modules_of_python_are_no_environments_and_are_not_run_to_find_out(name: str) -> None:
    sys.modules.pop("antigravity", None)
    with pytest.raises(ValueError, match="is a module of Python; vf list shows the environments"):
        vf.load_environment(name)
    assert "antigravity" not in sys.modules  # it would have opened a browser


def test_an_environment_beside_a_module_of_pythons_name_is_found(folder: Path) -> None:
    (folder / "json_env").mkdir()
    (folder / "json_env" / "json_env.py").write_text(SOURCE)
    try:
        assert len(vf.load_environment("json", environments_dir=folder).get_dataset()) == 2
    finally:
        sys.modules.pop("json_env", None)


@pytest.mark.parametrize(
    "name",
    ["a" * 5000, "a-" * 2500 + "a", "org/" + "b" * 5000, "c@" + "1" * 5000, "d." * 3000 + "d", "é", "a\0b", "", " "],
)
def test_an_id_that_can_be_none_is_one_sentence(name: str) -> None:
    with pytest.raises(ValueError, match="is not an environment id; ids look like") as error:
        vf.load_environment(name)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("name", [None, 7, b"toy", ["toy"]])
def test_what_is_no_text_is_no_id(name: object) -> None:
    with pytest.raises(ValueError, match=r"no environment|not an environment id"):
        vf.load_environment(name)  # type: ignore[arg-type]


def test_a_package_that_ends_the_program_when_it_is_imported_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_exits.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="'toy_exits' calls exit"):
        vf.load_environment("toy_exits")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("exit(0)\n", "importing 'toy_leaves' calls exit"),
        ("def load_environment(): raise SystemExit(0)\n", r"toy_leaves.load_environment\(\) calls exit\(0\)"),
    ],
)
def test_a_local_environment_that_ends_the_program_when_it_is_loaded_is_an_error(
    source: str, message: str, folder: Path
) -> None:
    (folder / "toy_leaves").mkdir()
    (folder / "toy_leaves" / "toy_leaves.py").write_text(f"from sys import exit\n{source}")
    with pytest.raises(ImportError, match=message):
        vf.load_environment("toy_leaves", environments_dir=folder)


def test_a_folder_of_pythons_own_module_name_does_not_replace_that_module(folder: Path) -> None:
    (folder / "random").mkdir()
    (folder / "random" / "random.py").write_text("def load_environment(): ...\n")
    with pytest.raises(ValueError, match="random is a module of Python"):
        vf.load_environment("random", environments_dir=folder)
    assert hasattr(sys.modules.get("random", random), "randint")
