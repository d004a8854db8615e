"""The reasoning-gym-env environment: its mixture, a chosen data set, thoughts, and invalid arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

import verifiers as vf

FOLDER = Path(__file__).resolve().parents[1]


def load(**kwargs):
    return vf.load_environment("reasoning-gym-env", environments_dir=FOLDER, **{"num_train_examples": 3, **kwargs})


def score(env: vf.Environment, reply) -> float:
    results = env.evaluate(client=vf.FakeClient(reply), model="fake", use_tqdm=False)
    assert not results.failed
    return results.mean_reward


def gold(env: vf.Environment, form: str = "<answer>{}</answer>"):
    answers = {row["question"]: row["answer"] for row in env.eval_dataset}
    return lambda messages: form.format(answers[messages[-1]["content"]])


def test_the_mixture_scores_right_answers_and_nothing_else():
    env = load(num_eval_examples=30)
    assert len(set(env.eval_dataset["task"])) >= 4
    assert score(env, gold(env)) == 1.0
    for nothing in ("", "<answer></answer>", "I cannot say."):
        assert score(env, nothing) == 0.0
    assert score(env, lambda messages: f"<answer>{messages[-1]['content']}</answer>") < 0.1
    assert score(env, f"<answer>{' '.join(map(str, range(200)))}</answer>") < 0.1


def test_one_data_set_with_settings():
    env = load(gym="gcd", config={"min_numbers": 4, "max_numbers": 4}, num_eval_examples=5)
    assert all(question.count(",") == 3 for question in env.eval_dataset["question"])
    assert score(env, gold(env)) == 1.0


def test_with_thoughts_only_what_follows_them_is_read():
    env = load(gym="gcd", use_think=True, num_eval_examples=5)
    assert "<think>" in env.eval_dataset[0]["prompt"][0]["content"]
    assert score(env, gold(env, "<think><answer>no</answer></think><answer>{}</answer>")) == 1.0
    assert score(env, gold(env)) == 0.0


def test_the_same_seed_gives_the_same_puzzles():
    first, same, other = (load(seed=seed).dataset["question"] for seed in (1, 1, 2))
    assert first == same != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gym": "gdc"}, "no data set 'gdc'; did you mean"),
        ({"num_eval_examples": -1}, "num_eval_examples=-1 must be 0 or more"),
        ({"config": {"size": 3}, "gym": "gcd"}, "size of 'gcd' cannot be configured: the environment sets them"),
    ],
)
def test_nonsense_is_refused_with_its_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        load(**arguments)
