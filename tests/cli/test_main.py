"""``vf`` itself: its help costs next to nothing, its commands are found, near misses are named."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tomllib

import click
import pytest

from verifiers.cli.main import COMMANDS, vf


def test_help_names_every_command_with_the_line_the_command_itself_has(run):
    shown = run("--help").stdout
    context = click.Context(vf)
    for name, (_, line) in COMMANDS.items():
        command = vf.get_command(context, name)
        assert command.name == name
        assert command.short_help == line
        assert f"{name:<6}" in shown
        assert line in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(run, name):
    assert run(name, "--help").stdout.startswith(f"Usage: vf {name}")


def commands_and_subcommands():
    for name in COMMANDS:
        command = vf.get_command(click.Context(vf), name)
        yield (name,)
        if isinstance(command, click.Group):
            yield from ((name, one) for one in command.list_commands(click.Context(command)))


@pytest.mark.parametrize("words", list(commands_and_subcommands()), ids=" ".join)
def test_the_help_of_a_command_fits_80_columns_and_says_number_not_float_range(run, words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(*words, "--help").stdout
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert "RANGE" not in shown
    assert "..." not in shown.partition("Commands:")[2]


def test_a_word_where_a_number_belongs_is_called_no_number(run):
    assert "'x' is not a valid number" in run("power", "x", code=2).stderr
    assert "'x' is not a valid integer" in run("eval", "arithmetic", "-r", "x", code=2).stderr


def test_help_takes_less_than_200_ms_of_cpu_and_imports_no_command(repo):
    code = (
        "import sys\nsys.argv = ['vf', '--help']\nfrom verifiers.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nprint('|'.join(sys.modules), file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.2
    imported = set(done.stderr.strip().split("|"))
    assert imported.isdisjoint({"verifiers.cli.eval", "verifiers.envs", "rich", "aiohttp", "msgspec", "torch"})


def test_an_unknown_command_names_the_nearest(run):
    assert "there is no command 'evl'; did you mean 'eval'?" in run("evl", code=2).stderr
    assert "the commands are eval, check" in run("zzz", code=2).stderr


def test_the_version_is_that_of_the_package(run, repo):
    version = tomllib.loads((repo / "pyproject.toml").read_text())["project"]["version"]
    assert run("--version").stdout.strip() == f"vf, version {version}"


def test_the_programs_of_the_package_are_these_functions(repo):
    scripts = tomllib.loads((repo / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["vf"] == "verifiers.cli.main:main"
    for name in ("eval", "init", "install", "view"):
        assert scripts[f"vf-{name}"] == f"verifiers.scripts.{name}:main"
    assert scripts["vf-tui"] == scripts["vf-view"]


def test_the_classic_module_is_the_same_command(repo, folder):
    done = subprocess.run(
        [sys.executable, "-m", "verifiers.scripts.eval", "arithmetic", "-m", "fake", "-n", "2", "-r", "1"],
        env={"PYTHONPATH": str(repo)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "2 rollouts of 2 examples, 0 failed" in done.stdout


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("vf comp", "plain,compare"),
        ("vf eval arith", "plain,arithmetic"),
        ("vf eval arithmetic --max-f", "plain,--max-failure-rate"),
        ("vf replay la", "plain,last"),
    ],
)
def test_the_shell_completes_commands_environments_flags_and_runs(repo, folder, words, offered):
    env = {
        "PYTHONPATH": str(repo),
        "_VF_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    command = [sys.executable, "-c", "from verifiers.cli.main import main; main()"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert offered in done.stdout, done.stderr


@pytest.mark.parametrize("closed", ["1", "2", "012"])
def test_a_run_whose_streams_were_closed_is_saved_whole_and_nothing_is_written_into_its_files(repo, tmp_path, closed):
    words = ["eval", "arithmetic", "-p", str(repo / "environments"), "-m", "fake", "-n", "2", "-r", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "verifiers", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(repo)},
        preexec_fn=lambda: [os.close(int(number)) for number in closed],
        check=False,
    )
    assert done.returncode == 0
    (saved,) = tmp_path.glob("outputs/evals/*/*/results.jsonl")
    assert [json.loads(line)["reward"] for line in saved.read_text().splitlines()] == pytest.approx([0.02] * 2)


def test_a_full_disk_is_one_sentence(repo, tmp_path):
    def small_files_only():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))

    words = ["eval", "arithmetic", "-p", str(repo / "environments"), "-m", "fake", "-n", "9", "-s"]
    done = subprocess.run(
        [sys.executable, "-m", "verifiers", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(repo)},
        preexec_fn=small_files_only,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    said = " ".join(done.stderr[done.stderr.index("Error: ") :].split())
    assert said.startswith("Error: the run ended: ")
    assert "results.jsonl: File too large; the run ends, because results can no longer be saved" in said


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["list"], ["runs"], ["eval", "--help"]], ids=" ".join)
def test_an_output_that_cannot_be_written_is_one_sentence_and_a_reader_that_left_is_none(start, repo, words):
    with open("/dev/full", "w") as full:
        ended = start(*words, stdout=full)
        assert ended.communicate()[1] == "Error: the output cannot be written: No space left on device\n"
        assert ended.returncode == 1
    reading, writing = os.pipe()
    os.close(reading)
    ended = start(*words, stdout=writing)
    os.close(writing)
    assert ended.communicate()[1] == ""
    assert ended.returncode == 1


@pytest.mark.parametrize("words", [["check", "leaves"], ["eval", "leaves", "-m", "fake", "-n", "1"]], ids=" ".join)
def test_a_reward_function_that_ends_the_process_does_not_end_the_command_with_success(start, tmp_path, words):
    (tmp_path / "mine" / "leaves").mkdir(parents=True)
    (tmp_path / "mine" / "leaves" / "leaves.py").write_text(
        "import os\nimport verifiers as vf\n\n\ndef right(completion):\n    os._exit(0)\n\n\n"
        "def load_environment():\n"
        "    return vf.SingleTurnEnv(dataset=[{'question': '1', 'answer': '1'}], rubric=vf.Rubric([right]))\n"
    )
    ended = start(*words, "-p", "mine")
    said = ended.communicate()[1]
    assert ended.returncode == 1
    assert "Error: os._exit(0) at " in said
    assert "leaves.py:6 (in right) ended the command before it was done" in said


@pytest.mark.parametrize(
    "error", ["MemoryError()", "RuntimeError('DefaultCPUAllocator: can\\'t allocate memory: 9 GB')"]
)
def test_too_little_memory_is_one_sentence(run, tmp_path, error):
    home = tmp_path / "mine" / "greedy_toy"
    home.mkdir(parents=True)
    (home / "greedy_toy.py").write_text(f"def load_environment():\n    raise {error}\n")
    done = run("eval", "greedy-toy", "-p", str(home.parent), "-m", "fake", code=1)
    assert "the environment 'greedy-toy' cannot be loaded: there is too little memory" in " ".join(done.stderr.split())


def test_serving_beyond_this_machine_needs_a_key_or_insecure(run):
    said = " ".join(run("serve", "local", "--host", "0.0.0.0", code=2).stderr.split())
    assert "--host 0.0.0.0 without a key lets anyone who can reach it use the model and replace its weights" in said
    assert "--insecure if that is intended" in said


def test_what_the_library_logs_is_a_notice_to_a_person_and_a_log_line_to_who_asks_for_one(capsys, monkeypatch):
    import logging

    from verifiers.cli.telling import told

    monkeypatch.delenv("VF_LOG_LEVEL", raising=False)
    with told(verbose=False):
        logging.getLogger("verifiers.engine").warning("fetching a model")
    assert capsys.readouterr().err == "notice: fetching a model\n"
    with told(verbose=True):
        logging.getLogger("verifiers.engine").warning("fetching a model")
    assert capsys.readouterr().err.endswith("verifiers.engine WARNING fetching a model\n")
