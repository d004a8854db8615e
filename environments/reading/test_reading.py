"""Reading: the answers are right, only a right answer is paid for, and a list of all places is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import verifiers as vf

FOLDER = Path(__file__).resolve().parents[1]


def load(**kwargs):
    return vf.load_environment("reading", environments_dir=FOLDER, **kwargs)


def look_up(question: str) -> str:
    thing = re.search(r"Where is the (\w+)\?", question)[1]
    return re.search(rf"The {thing} is in the (\w+)\.", question)[1]


@pytest.mark.parametrize("notes", [2, 3, 10])
def test_every_gold_answer_is_in_the_note_about_the_thing_that_is_asked_for(notes):
    env = load(notes=notes)
    for row in (*env.dataset, *env.eval_dataset):
        assert look_up(row["question"]) == row["answer"]
        assert row["question"].count(" is in the ") == notes


def score(env, reply) -> float:
    return env.evaluate(client=vf.FakeClient(reply), model="fake", use_tqdm=False).mean_reward


def test_only_the_right_place_is_paid_for_and_a_list_of_places_is_not():
    env = load(num_eval_examples=40)
    asked = lambda messages: messages[-1]["content"]  # noqa: E731
    assert score(env, lambda messages: look_up(asked(messages))) == 1.0
    assert score(env, lambda messages: f"It is in the {look_up(asked(messages)).upper()}! And more.") == 1.0
    assert score(env, lambda messages: asked(messages)) < 0.5  # the first note only
    assert score(env, lambda messages: asked(messages).replace(".", ",")) == 0.0
    assert score(env, "") == 0.0


def test_the_same_seed_gives_the_same_questions_and_none_is_in_both_data_sets():
    first, second = load(seed=1), load(seed=1)
    assert first.eval_dataset["question"] == second.eval_dataset["question"] != load(seed=2).eval_dataset["question"]
    assert not set(first.dataset["question"]) & set(first.eval_dataset["question"])


def test_a_number_of_notes_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="from 2 to 10, got 11"):
        load(notes=11)
