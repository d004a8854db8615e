"""The gsm8k environment, on a folder of three problems made up here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import verifiers as vf

FOLDER = Path(__file__).resolve().parents[1]
PROBLEMS = [
    ("Ida has 3 nets with 4 crabs each and frees 2 crabs. How many crabs are left?", "3*4=12, 12-2=10\n#### 10"),
    ("A ferry takes 250 cars a trip. How many does it take in 4 trips?", "250*4=1000\n#### 1,000"),
    ("It was 2 degrees and got 5 degrees colder. How many degrees is it?", "2-5=-3\n#### -3"),
]
ANSWERS = ["10", "1,000", "-3"]


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    lines = "".join(json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in PROBLEMS)
    (tmp_path / "train.jsonl").write_text(lines + "\n")
    (tmp_path / "test.jsonl").write_text(lines)
    return tmp_path


def load(**kwargs):
    return vf.load_environment("gsm8k", environments_dir=FOLDER, **kwargs)


def score(env: vf.Environment, replies: list[str]) -> list[float]:
    table = dict(zip((question for question, _ in PROBLEMS), replies, strict=True))
    results = env.evaluate(client=vf.FakeClient(table), model="fake", use_tqdm=False)
    assert not results.failed
    return results["rewards"]


def test_answers_are_what_follows_the_hashes(problems):
    env = load(dataset_path=str(problems))
    assert env.dataset["answer"] == env.eval_dataset["answer"] == ANSWERS
    assert "boxed" in env.dataset[0]["prompt"][0]["content"]


def test_a_number_counts_in_whatever_way_it_is_written(problems):
    env = load(dataset_path=str(problems))
    assert score(env, ["So \\boxed{10}.", "\\boxed{1000}", "\\boxed{-3}"]) == [1.0, 1.0, 1.0]
    assert score(env, ["\\boxed{10.0}", "\\boxed{\\$1{,}000.00}", "\\boxed{3}"]) == [1.0, 1.0, 0.0]


def test_a_reply_without_a_box_has_no_answer_and_many_boxes_are_one_guess(problems):
    env = load(dataset_path=str(problems))
    assert score(env, ["10", "1000 1,000 #### 1000", "\\boxed{-3} or \\boxed{3}"]) == [0.0, 0.0, 0.0]


def test_with_thoughts_only_what_follows_them_is_read(problems):
    env = load(dataset_path=str(problems), use_think=True)
    assert "<think>" in env.dataset[0]["prompt"][0]["content"]
    replies = ["<think>\\boxed{7}</think> \\boxed{10}", "\\boxed{1000}", "<think>\\boxed{-3}</think> no idea"]
    assert score(env, replies) == [1.0, 0.0, 0.0]


def test_the_variable_names_a_folder_and_rows_can_be_fewer(problems, monkeypatch):
    monkeypatch.setenv("GSM8K_PATH", str(problems))
    env = load(num_train_examples=2, num_eval_examples=1)
    assert (len(env.dataset), len(env.eval_dataset)) == (2, 1)


def test_a_folder_without_the_files_and_a_line_that_cannot_be_read_are_named(problems, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no train\.jsonl"):
        load(dataset_path=str(tmp_path / "elsewhere"))
    (problems / "test.jsonl").write_text('{"question": "2+2?", "answer": "4"}\n')
    with pytest.raises(ValueError, match=r"test\.jsonl:1: the answer has no '####'"):
        len(load(dataset_path=str(problems)).eval_dataset)
