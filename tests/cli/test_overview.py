"""Several models in one evaluation: one table, models × environments, intervals, and paired differences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import verifiers as vf

TOY = """
import verifiers as vf

def exact(completion, answer): return completion[-1]["content"] == answer

def load_environment(n=12, word="yes"):
    rows = [{"question": f"say {word} {i}", "answer": word if i else "never"} for i in range(n)]
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([exact]))
"""


@pytest.fixture
def toys(folder: Path) -> None:
    for name in ("toy_one", "toy_two"):
        home = folder / "mine" / name
        home.mkdir(parents=True)
        (home / f"{name}.py").write_text(TOY)


@pytest.fixture
def registry(toys, folder: Path):
    """Two models at two servers: one says yes, the other no."""
    with vf.FakeServer("no") as bad, vf.FakeServer("yes") as good:
        (folder / "configs").mkdir()
        entry = '[[endpoint]]\nendpoint_id = "{0}"\nmodel = "{0}"\nurl = "{1}"\n'
        text = entry.format("bad", bad.url) + entry.format("good", good.url)
        (folder / "configs" / "endpoints.toml").write_text(text)
        yield ["-p", "mine", "-n", "12", "-r", "1"]


def test_several_models_give_one_table_with_intervals_and_paired_differences(run, registry):
    result = run("eval", "toy-one", "toy-two", "-m", "bad", "-m", "good", *registry)
    table = result.stdout.split("\n\n")[-2:]
    assert table[0].splitlines()[0].split() == ["reward", "toy-one", "toy-two"]
    bad, good = table[0].splitlines()[1:]
    assert bad.split()[:2] == ["bad", "0.000"]
    assert good.split()[:2] == ["good", "0.917"]
    assert good.count("[") == 2
    assert "against bad, example by example (95%, Holm over" in table[1]
    assert "+0.917" in table[1]
    assert "better" in table[1]
    assert len(list(Path("outputs/evals").glob("*/*"))) == 4


def test_the_same_in_plain_data(run, registry):
    found = json.loads(run("eval", "toy-one", "-m", "bad", "-m", "good", *registry, "--json").stdout)
    assert [one["model"] for one in found["evaluations"]] == ["bad", "good"]
    (difference,) = found["differences"]
    assert (difference["a"], difference["b"], difference["verdict"]) == ("bad", "good", "better")
    assert difference["low"] < difference["difference"] < difference["high"] or difference["difference"] > 0.9


def test_each_model_of_a_file_is_evaluated_too(run, registry):
    Path("evals.toml").write_text('model = ["bad", "good"]\n[[eval]]\nenv = "toy-one"\n[[eval]]\nenv = "toy-two"\n')
    result = run("eval", "evals.toml", *registry)
    assert "[4/4] toy-two: 12 examples × 1 with good" in result.stderr
    assert "toy-one" in result.stdout.split("\n\n")[-2].splitlines()[0]


def test_an_endpoint_that_is_down_ends_its_own_model_only(run, registry, folder):
    entry = '[[endpoint]]\nendpoint_id = "away"\nmodel = "away"\nurl = "http://127.0.0.1:9/v1"\n'
    path = folder / "configs" / "endpoints.toml"
    path.write_text(path.read_text() + entry)
    words = ["--max-retries", "0", "--down-after", "0.2"]
    result = run("eval", "toy-one", "-m", "away", "-m", "good", *registry, *words, code=None)
    assert "good" in result.stdout.split("\n\n")[-1] + result.stdout.split("\n\n")[-2]


def test_one_run_is_resumed_and_not_several(run, registry):
    shown = run("eval", "toy-one", "-m", "bad", "-m", "good", *registry, "--resume", "x", code=2).stderr
    assert "--resume continues one run" in shown
