"""Capitals: only the right city is rewarded, a list of all cities is not, and no country is in both data sets."""

from __future__ import annotations

from pathlib import Path

import pytest

import verifiers as vf

FOLDER = Path(__file__).resolve().parents[1]


def load(**kwargs):
    return vf.load_environment("capitals", environments_dir=FOLDER, **kwargs)


def gold(env) -> dict[str, str]:
    return {row["question"]: row["answer"] for row in env.eval_dataset}


def score(env, reply) -> float:
    return env.evaluate(client=vf.FakeClient(reply), model="fake", use_tqdm=False).mean_reward


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("{city}", 1.0),
        ("The capital is {city}! It is not Atlantis.", 1.0),
        ("{city}, or Oslo, or Paris.", 0.0),
        ("I do not know. Perhaps {city}.", 0.0),
        ("", 0.0),
    ],
)
def test_the_first_sentence_must_name_the_right_city_and_no_other(reply, reward):
    env = load()
    right = gold(env)
    assert score(env, lambda messages: reply.format(city=right[messages[-1]["content"]])) == pytest.approx(reward)


def test_another_spelling_is_right_too():
    env = load()
    right = gold(env)
    spelt = {"New Delhi": "Delhi", "Kyiv": "Kiev", "Bogota": "Bogotá", "Brasilia": "Brasília"}
    assert score(env, lambda messages: spelt.get(city := right[messages[-1]["content"]], city)) == 1.0


def test_no_country_is_both_to_train_and_to_evaluate_on_and_a_seed_repeats():
    env = load(seed=3)
    assert not set(env.dataset["question"]) & set(env.eval_dataset["question"])
    assert load(seed=3).eval_dataset["question"] == env.eval_dataset["question"] != load().eval_dataset["question"]
