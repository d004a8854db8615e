"""``vf check``, ``vf init``, ``vf install``, ``vf list``: from a name to an environment, proven and installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import verifiers as vf


@pytest.fixture
def home(folder: Path) -> Path:
    """A folder of environments of one's own, instead of the repository's."""
    (folder / "environments").unlink()
    return folder


@pytest.mark.parametrize("flags", [[], ["--multi-file"]], ids=["one module", "a package"])
def test_a_new_environment_passes_its_check_and_its_test_at_once(run, home, repo, flags):
    name = f"fresh-{len(flags)}"
    shown = run("init", name, *flags).stdout
    assert f"vf check {name}" in shown
    result = run("check", name, "--strict")
    assert "failed" not in result.stdout
    assert "warning" not in result.stdout
    test = home / "environments" / name.replace("-", "_") / f"test_{name.replace('-', '_')}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(home), str(test)]
    done = subprocess.run(command, env={"PYTHONPATH": str(repo)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_new_environment_is_evaluated_with_its_own_defaults(run, home):
    run("init", "fresh-eval")
    assert json.loads(run("eval", "fresh-eval", "-m", "fake", "--json").stdout)["rollouts"] == 60


def test_init_writes_the_readme_of_a_package_anew_and_touches_nothing_else(run, home):
    run("init", "kept-env")
    package = home / "environments" / "kept_env"
    for name in ("README.md", "kept_env.py"):
        (package / name).write_text("mine")
    shown = run("init", "kept-env", "--rewrite-readme").stdout
    assert (package / "README.md").read_text().startswith("# kept-env")
    assert (package / "kept_env.py").read_text() == "mine"
    assert "kept_env.py" not in shown


def test_install_from_the_repository_this_library_runs_from(run, home):
    done = run("install", "reasoning-gym", "-r", "-b", "main", "--target", str(home / "there"), "--no-deps")
    assert "installed reasoning-gym-env" in done.stdout
    assert "-b main has no effect" in done.stderr
    assert (home / "there" / "reasoning_gym_env.py").is_file()
    assert (
        "the repository has no environment 'nope'; it has alphabet_sort" in run("install", "nope", "-r", code=2).stderr
    )


@pytest.mark.parametrize("name", ["reasoning-gym", "textarena"])
def test_an_environment_goes_by_the_name_of_the_package_it_is_made_of(run, folder, name):
    """``reasoning_gym`` and ``textarena`` are packages of others; the environments over them are ``…_env``."""
    pytest.importorskip(name.replace("-", "_"))
    report = json.loads(run("eval", name, "-m", "fake", "--json").stdout)
    assert report["rollouts"] == 60  # as its own pyproject.toml says
    found = json.loads(run("check", name, "-n", "1", "--json").stdout)
    assert found["verdicts"][-1]["found"].startswith(f"{name}-env ")
    assert vf.load_environment(name).env_id == name


def test_init_says_what_is_wrong_with_a_name(run, home):
    assert "cannot be the name of an environment" in run("init", "../x", code=2).stderr
    run("init", "twice-made", "-p", "elsewhere")
    assert "exists already" in run("init", "twice-made", "-p", "elsewhere", code=2).stderr


def test_a_check_is_a_table_with_a_verdict_for_each_and_an_exit_code(run, home):
    run("init", "shaky")
    module = home / "environments" / "shaky" / "shaky.py"
    text = module.read_text().replace(
        "parser.parse_answer(completion) == answer", "answer in completion[-1]['content']"
    )
    module.write_text(
        text + "\n\ndef unused(reply):\n    try:\n        return eval(reply)\n    except:\n        return 0\n"
    )
    shown = run("check", "shaky", code=1).stdout
    for part in ("fail  stuffed answers", "fail  no bare except", "eval() runs whatever text", "3 failed, "):
        assert part in shown
    found = json.loads(run("check", "shaky", "--json", code=1).stdout)
    assert found["is_clean"] is False
    bad = [verdict["name"] for verdict in found["verdicts"] if verdict["status"] == "fail"]
    assert bad == ["stuffed answers", "no bare except", "no eval or exec"]


def test_what_does_not_load_is_a_failed_check_and_what_is_not_there_wrong_usage(run, home):
    broken = home / "environments" / "broken_env"
    broken.mkdir(parents=True)
    (broken / "broken_env.py").write_text("def load_environment():\n    return 1 / 0\n")
    shown = " ".join(run("check", "broken-env", code=1).stdout.split())
    assert "fail it loads the environment 'broken-env' cannot be loaded: ZeroDivisionError" in shown
    assert "there is no environment 'nowhere'" in run("check", "nowhere", code=2).stderr


def test_a_check_by_folder(run, home):
    run("init", "by-folder", "-p", "elsewhere")
    assert "by_folder" in run("check", "elsewhere/by_folder").stdout


def test_the_list_of_environments_fits_a_narrow_terminal(in_terminal):
    lines = in_terminal(40, "list", "capitals")
    assert max(map(len, lines)) <= 40


def test_environments_are_listed_with_their_arguments_and_never_imported(run, home):
    run("init", "listed-env")
    module = home / "environments" / "listed_env" / "listed_env.py"
    module.write_text(module.read_text() + "\nraise RuntimeError\n")
    shown = run("list").stdout
    assert "listed-env 0.1.0  environments/listed_env" in shown
    assert "num_train_examples=500, num_eval_examples=100, seed=0" in shown
    (found,) = [one for one in json.loads(run("list", "--json").stdout) if one["is_local"]]
    assert found["arguments"][2] == {"name": "seed", "default": "0", "annotation": "int"}
    assert "no environment mentions zzz; vf init NAME makes one" in run("list", "zzz").stdout


def test_install_says_what_it_did_or_why_not(run, home):
    assert "is not a package: it has no pyproject.toml" in run("install", ".", code=1).stderr
    assert "cannot be installed; pass a folder" in run("install", "a b", code=1).stderr
    assert "only a folder can be installed as editable" in run("install", "org/x", "-e", code=1).stderr


def test_a_new_environment_installs_with_hatchling(run, home):
    pytest.importorskip("hatchling")
    run("init", "hatched")
    offline = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
    shown = run("install", "hatched", "--target", "there", "--no-deps", env=offline).stdout
    assert "installed hatched 0.1.0 from environments/hatched with pip" in shown
    assert sorted(path.name for path in Path("there").iterdir() if path.is_file()) == [
        "hatched.py",
        "hatched.pyproject.toml",
    ]


def test_publish_builds_a_wheel_with_the_verdict_and_install_shows_it(run, home):
    pytest.importorskip("hatchling")
    run("init", "hatched")
    offline = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
    shown = run("publish", "hatched", env=offline).stdout
    (wheel,) = Path("dist").glob("*.whl")
    assert f"built {wheel}" in shown
    assert "failed" not in shown
    installed = run("install", str(wheel), "--target", "there", "--no-deps", env=offline).stdout
    assert "checked with verifiers " in installed
    assert "passed" in installed


def test_an_environment_whose_check_fails_is_not_published(run, home):
    run("init", "hatched")
    module = Path("environments/hatched/hatched.py")
    module.write_text(module.read_text().replace("float(parser.parse_answer(completion) == answer)", "1.0"))
    assert "not built: a check failed" in run("publish", "hatched", code=1).stderr
    assert not Path("dist").exists()
    assert "there is no environment 'nothing'" in run("publish", "nothing", code=2).stderr


def test_what_is_no_installed_environment_is_not_uninstalled(run, home):
    assert "no environment 'click' is installed" in run("uninstall", "click", code=1).stderr
    assert "arithmetic comes with verifiers and cannot be uninstalled" in run("uninstall", "arithmetic", code=1).stderr


def test_what_comes_along_needs_no_installing(run, home):
    assert "wordle comes with verifiers and need not be installed" in run("install", "wordle").stdout
