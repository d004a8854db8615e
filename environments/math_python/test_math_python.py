"""The math-python environment, on generated problems and on a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf

FOLDER = Path(__file__).resolve().parents[1]
needs_sandbox = pytest.mark.skipif(vf.sandbox.level().name == "none", reason="this machine can isolate nothing")


def load(**kwargs: Any) -> Any:
    return vf.load_environment("math-python", environments_dir=FOLDER, **kwargs)


def cell(code: str) -> dict[str, Any]:
    function = {"name": "python", "arguments": json.dumps({"code": code})}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def test_it_loads_without_reading_the_hub():
    env = load(dataset_name="math", num_train_examples=5000)
    assert "not loaded" in repr(env.dataset)
    assert [tool["function"]["name"] for tool in env.oai_tools] == ["python"]


def test_generated_problems_repeat_by_seed_and_are_not_those_of_the_evaluation():
    env = load(dataset_name="generated", num_train_examples=700, num_eval_examples=70)
    again = load(dataset_name="generated", num_train_examples=700, num_eval_examples=70)
    assert env.dataset["question"] == again.dataset["question"]
    assert set(env.dataset["question"]).isdisjoint(env.eval_dataset["question"])
    assert env.dataset["question"] != load(dataset_name="generated", seed=1, num_train_examples=70).dataset["question"]


CHECKS = {
    r"remainder when (\d+)\^(\d+) is divided by (\d+)": lambda a, b, m: a**b % m,
    r"a\(n\) = (\d+) a\(n-1\) \+ (\d+) a\(n-2\)\. What is a\((\d+)\)": lambda p, q, n: fibonacci(p, q, n),
    r"from 1 to (\d+) are divisible by (\d+) or (\d+), but not by (\d+)": lambda n, a, b, c: len(
        [x for x in range(1, n + 1) if not (x % a and x % b) and x % c]
    ),
}


def fibonacci(p: int, q: int, n: int) -> int:
    terms = [0, 1]
    while len(terms) <= n:
        terms.append(p * terms[-1] + q * terms[-2])
    return terms[n]


def test_gold_answers_are_right_where_they_are_computed_another_way():
    checked = 0
    for row in load(dataset_name="generated", num_train_examples=60).dataset:
        for pattern, solve in CHECKS.items():
            if found := re.search(pattern, row["question"]):
                assert str(solve(*map(int, found.groups()))) == row["answer"]
                checked += 1
    assert checked > 20


@needs_sandbox
def test_a_model_that_computes_is_right_and_one_that_guesses_is_wrong():
    env = load(dataset_name="generated", num_eval_examples=3)
    answers = dict(zip(env.eval_dataset["question"], env.eval_dataset["answer"], strict=True))

    def solve(messages: Any) -> Any:
        if messages[-1]["role"] == "tool":
            return f"So it is \\boxed{{{messages[-1]['content']}}}."
        return cell(f"x = {answers[messages[-1]['content']]}\nx")

    results = env.evaluate(vf.FakeClient(solve), "fake", use_tqdm=False)
    assert results["rewards"] == [1.0, 1.0, 1.0]
    assert results.scored[0]["metrics"]["python_calls"] == 1.0
    wrong = env.evaluate(vf.FakeClient("\\boxed{no idea}"), "fake", use_tqdm=False)
    assert wrong["rewards"] == [0.0, 0.0, 0.0]
    env.close()


def test_rows_may_come_from_a_file(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "1/2 + 1/4?", "answer": "3/4"}\n')
    env = load(dataset_path=str(path))
    results = env.evaluate(vf.FakeClient("\\boxed{0.75}"), "fake", use_tqdm=False)
    assert results["rewards"] == [1.0]
    with pytest.raises(FileNotFoundError, match="dataset_path must be a"):
        load(dataset_path=str(tmp_path / "nothing.jsonl"))
