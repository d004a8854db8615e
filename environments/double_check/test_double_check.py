"""The double-check environment: the sums are right, the last answer counts, the first is reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import verifiers as vf

FOLDER = Path(__file__).resolve().parents[1]


def load(**kwargs):
    return vf.load_environment("double-check", environments_dir=FOLDER, **kwargs)


def value(question: str) -> int:
    """The answer computed from the sentences, independently of the environment's code."""
    result = 0
    for sentence in question.split(". "):
        n = int(re.findall(r"\d+", sentence)[0]) if re.search(r"\d", sentence) else None
        match sentence.split()[0]:
            case "Start":
                result = n
            case "Add":
                result += n
            case "Subtract":
                result -= n
            case "Multiply":
                result *= n
            case "Take":
                result = n - result
    return result


def evaluate(env: vf.Environment, reply) -> vf.Results:
    results = env.evaluate(client=vf.FakeClient(reply), model="fake", use_tqdm=False)
    assert not results.failed
    return results


def boxed(messages) -> str:
    return f"\\boxed{{{value(messages[1]['content'])}}}"


def test_every_gold_answer_is_the_value_of_its_question():
    for row in load(num_steps=8).dataset:
        assert str(value(row["question"])) == row["answer"]
        assert row["question"].count(".") == 9


def test_the_last_answer_counts_and_the_first_is_reported():
    env = load(num_eval_examples=10)

    def corrects(messages) -> str:
        return boxed(messages) if len(messages) > 2 else "\\boxed{0.5}"

    def gives_up(messages) -> str:
        return "\\boxed{0.5}" if len(messages) > 2 else boxed(messages)

    for reply, reward, first, changed in ((boxed, 1, 1, 0), (corrects, 1, 0, 1), (gives_up, 0, 1, 1), ("", 0, 0, 0)):
        for state in evaluate(env, reply).rollouts:
            assert (state["reward"], state["metrics"]["num_turns"]) == (reward, 2)
            assert (state["metrics"]["first_answer"], state["metrics"]["changed_answer"]) == (first, changed)


def test_echoes_and_lists_of_guesses_earn_nothing():
    env = load(num_eval_examples=20)
    assert evaluate(env, lambda messages: messages[1]["content"]).mean_reward == 0.0
    guesses = "".join(f"\\boxed{{{n}}}" for n in range(-300, 300))
    assert evaluate(env, guesses + "\\boxed{0.5}").mean_reward == 0.0


def test_other_checks_and_other_seeds():
    env = load(checks=["Really?", "Really, really?"], num_eval_examples=1)
    (state,) = evaluate(env, boxed).rollouts
    assert [m["content"] for m in state["completion"][1::2]] == ["Really?", "Really, really?"]
    assert load(seed=1).dataset["question"] == load(seed=1).dataset["question"] != load(seed=2).dataset["question"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        ({"checks": ""}, "checks must be a message to the model"),
        ({"num_eval_examples": 0}, "num_eval_examples=0 must be at least 1"),
    ],
)
def test_nonsense_is_refused_with_its_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        load(**arguments)


def test_an_unknown_data_set_names_those_there_are():
    with pytest.raises(ValueError, match=r"no example dataset 'gsm9k'; there are .*gsm8k"):
        len(load(dataset_name="gsm9k").dataset)
