"""The arithmetic environment: right answers, reproducible seeds, and no overlap between training and evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

import verifiers as vf

FOLDER = Path(__file__).resolve().parents[1]


def load(**kwargs):
    return vf.load_environment("arithmetic", environments_dir=FOLDER, **kwargs)


def value(question: str) -> str:
    expression = question.removeprefix("What is ").removesuffix("?")
    assert set(expression) <= set("0123456789+-*() ")
    return str(eval(expression))  # noqa: S307 - nothing but digits and signs


@pytest.mark.parametrize("difficulty", ["easy", "medium", "hard", "mixed"])
def test_every_gold_answer_is_the_value_of_its_question(difficulty):
    env = load(difficulty=difficulty, num_train_examples=300)
    for row in env.dataset:
        assert value(row["question"]) == row["answer"]


def test_the_same_seed_gives_the_same_questions_and_another_seed_others():
    assert load(seed=1).dataset["question"] == load(seed=1).dataset["question"]
    assert load(seed=1).dataset["question"] != load(seed=2).dataset["question"]


def test_a_right_reply_scores_more_than_a_wrong_one_and_both_more_than_none():
    env = load(num_eval_examples=30)
    reply = env.parser.format

    def score(make) -> float:
        results = env.evaluate(client=vf.FakeClient(make), model="fake", use_tqdm=False)
        assert not results.failed
        return results.mean_reward

    def gold(messages):
        return reply(reasoning="r", answer=value(messages[-1]["content"]))

    right, wrong, empty = score(gold), score(lambda _: reply(reasoning="r", answer="x")), score(lambda _: "")
    assert right == pytest.approx(1.1)
    assert empty < wrong < right


@pytest.mark.parametrize("seed", [0, 1])
def test_no_question_is_both_to_train_and_to_evaluate_on(seed):
    env = load(difficulty="easy", num_train_examples=2000, num_eval_examples=500, seed=seed)
    assert not set(env.dataset["question"]) & set(env.eval_dataset["question"])
    levels = load(seed=seed, num_eval_examples=30).eval_dataset["difficulty"]
    assert [levels.count(level) for level in ("easy", "medium", "hard")] == [10, 10, 10]


def test_an_unknown_difficulty_is_refused_by_name():
    with pytest.raises(ValueError, match="easy, medium, hard or mixed, got 'insane'"):
        load(difficulty="insane")


def test_without_tags_the_whole_reply_is_the_answer_and_nothing_else_counts():
    env = load(difficulty="easy", use_tags=False, system_prompt="", num_eval_examples=20)
    assert [message["role"] for message in env.dataset[0]["prompt"]] == ["user"]
    assert "<" not in load(use_tags=False).dataset[0]["prompt"][0]["content"]

    def score(make) -> float:
        return env.evaluate(client=vf.FakeClient(make), model="fake", use_tqdm=False).mean_reward

    assert score(lambda messages: f" {value(messages[-1]['content'])}\n") == 1.0
    assert score(lambda messages: f"It is {value(messages[-1]['content'])}.") == 0.0
