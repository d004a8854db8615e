"""``vf eval FILE.toml``: several evaluations in one command, and what is wrong in the file shown where it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FILE = """
model = "fake"
num_examples = 3

[[eval]]
env_id = "arithmetic"
rollouts_per_example = 2
env_args = { difficulty = "easy" }

[[eval]]
env = "arithmetic"
sampling_args = { temperature = 0.5 }
headers = { X-Title = "mine" }
state_columns = ["turn"]
save_results = true
"""


def test_each_evaluation_of_a_file_is_run_and_flags_win(run):
    Path("evals.toml").write_text(FILE)
    result = run("eval", "evals.toml")
    assert "[1/2] arithmetic: 3 examples × 2 with fake" in result.stderr
    assert "[2/2] arithmetic: 3 examples × 3 with fake" in result.stderr
    overview = result.stdout.strip().splitlines()[-3:]
    assert overview[0].split() == ["environment", "model", "rollouts", "failed", "reward"]
    assert [line.split()[2] for line in overview[1:]] == ["6", "9"]
    first, second = json.loads(run("eval", "evals.toml", "-n", "1", "-r", "1", "--json").stdout)
    assert first["rollouts"] == second["rollouts"] == 1
    assert first["env_args"] == {"difficulty": "easy"}
    assert second["sampling_args"] == {"temperature": 0.5}
    assert second["path"]


def test_a_dry_run_of_a_file_shows_every_plan(run):
    Path("evals.toml").write_text(FILE)
    assert [plan["rollouts"] for plan in json.loads(run("eval", "evals.toml", "--dry-run", "--json").stdout)] == [6, 9]
    assert run("eval", "evals.toml", "--dry-run").stdout.count("a dry run") == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[eval]]\nenv_id == "x"\n', 'is not TOML: Invalid value (at line 2, column 9)\n  env_id == "x"\n          ^'),
        ('modle = "fake"\n[[eval]]\nenv_id = "x"\n', "unknown key 'modle'; did you mean model?"),
        ('[[eval]]\nenv_id = "x"\nresume = "y"\n', "unknown key 'resume'"),
        ("[[eval]]\nnum_examples = 3\n", '[[eval]] 1 has no environment; add env_id = "name"'),
        ('[[eval]]\nenv_id = "x"\nnum_examples = 0\n', "[[eval]] 1: num_examples: it must be 1 or more"),
        ('[[eval]]\nenv_id = "x"\nnum_examples = "a"\n', "num_examples: 'a' is not a valid integer"),
        ('[[eval]]\nenv_id = "x"\nnum_examples = 1.5\n', "num_examples: '1.5' is not a valid integer"),
        ('[[eval]]\nenv_id = "x"\nsave_results = "a"\n', "save_results must be true or false, not 'a'"),
        ('[[eval]]\nenv_id = "x"\nenv_args = "a"\n', "env_args must be a table, not 'a'"),
        ('[[eval]]\nenv_id = "x"\nenv_dir_path = ["a"]\n', "env_dir_path must not be a list"),
        ("x = 1\n", "has no [[eval]]"),
    ],
    ids=["no toml", "typo", "not here", "no env", "zero", "word", "half", "no flag", "no table", "list", "no eval"],
)
def test_what_is_wrong_in_a_file_is_shown_where_it_is(run, text, message):
    Path("evals.toml").write_text(text)
    if "x = 1" in text:
        message = "evals.toml has no [[eval]]"
    assert message in run("eval", "evals.toml", "-m", "fake", code=2).stderr


def test_nothing_is_run_if_one_of_them_cannot_be(run):
    Path("evals.toml").write_text('model = "fake"\n[[eval]]\nenv = "arithmetic"\n[[eval]]\nenv = "nowhere"\n')
    result = run("eval", "evals.toml", "-s", code=2)
    assert "there is no environment 'nowhere'" in result.stderr
    assert not Path("outputs").exists()


def test_one_that_fails_is_the_exit_code_of_all_and_has_a_command_of_its_own(run):
    Path("evals.toml").write_text(
        'num_examples = 1\nrollouts_per_example = 1\nsave_results = true\n[[eval]]\nenv = "arithmetic"\nmodel = "m"\n'
        'api_base_url = "http://127.0.0.1:9/v1"\nmax_retries = 0\n[[eval]]\nenv = "arithmetic"\nmodel = "fake"\n'
    )
    result = run("eval", "evals.toml", code=1)
    assert (
        "again with: vf eval arithmetic -m m -n 1 -r 1 -b http://127.0.0.1:9/v1 --max-retries 0 --resume"
        in result.stdout
    )
    assert "1 rollout of 1 example, 0 failed" in result.stdout


def test_a_file_cannot_be_resumed_as_a_whole(run):
    Path("evals.toml").write_text(FILE)
    assert "--resume continues one run" in run("eval", "evals.toml", "--resume", "x", code=2).stderr


def test_shuffled_examples_are_others_and_the_same_for_the_same_seed(run):
    def first(*flags: str) -> str:
        return run("eval", "arithmetic", "-m", "fake", "-n", "1", "-r", "1", "--dry-run", *flags).stdout

    assert first() != first("--shuffle") == first("--shuffle", "--seed", "0") != first("--shuffle", "--seed", "1")
    found = json.loads(run("eval", "arithmetic", "-m", "fake", "-n", "4", "-r", "2", "--shuffle", "--json").stdout)
    assert (found["examples"], found["rollouts"]) == (4, 8)
