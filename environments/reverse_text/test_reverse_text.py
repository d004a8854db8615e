"""The reverse-text environment: the right reply scores 1, closer replies score more, and hostile replies are scored."""

from __future__ import annotations

import pickle  # noqa: TID251 - an environment has to survive it
import random
import time
from pathlib import Path

import pytest

import verifiers as vf

FOLDER = Path(__file__).resolve().parents[1]


def load(**kwargs):
    return vf.load_environment("reverse-text", environments_dir=FOLDER, **kwargs)


def score(env: vf.Environment, reply) -> float:
    results = env.evaluate(client=vf.FakeClient(reply), model="fake", use_tqdm=False)
    assert not results.failed
    return results.mean_reward


def tagged(text: str) -> str:
    return f"<reversed_text>{text}</reversed_text>"


def gold(messages) -> str:
    return tagged(messages[-1]["content"][::-1])


def echo(messages) -> str:
    return tagged(messages[-1]["content"])


def half(messages) -> str:
    text = messages[-1]["content"][::-1]
    return tagged(text[: len(text) // 2])


def stuffed(messages) -> str:
    text = messages[-1]["content"]
    return tagged((text + text[::-1]) * 3)


def test_the_reversed_text_scores_one_part_of_it_less_and_tricks_little():
    env = load(num_eval_examples=40)
    assert score(env, gold) == 1.0
    assert 0.6 < score(env, half) < 0.7
    assert score(env, echo) < 0.5
    assert score(env, stuffed) < 0.35
    for nothing in ("", "I cannot do that.", tagged(""), tagged("x" * 100_000)):
        assert score(env, nothing) == 0.0


def test_without_tags_the_whole_reply_is_the_answer():
    env = load(length=3, alphabet="abcd", use_tags=False, num_eval_examples=30)
    assert all(len(text) == 3 and set(text) <= set("abcd") for text in env.dataset["question"])
    assert "<" not in env.dataset[0]["prompt"][0]["content"]
    assert score(env, lambda messages: f" {messages[-1]['content'][::-1]}\n") == 1.0
    assert 0.0 < score(env, "ab") < 0.7


def test_the_common_subsequence_is_the_one_found_by_the_table_of_the_textbook():
    draw = random.Random(5)
    common_length = load(num_examples=1, num_eval_examples=1).rubric.funcs[0].__globals__["common_length"]
    for _ in range(200):
        a, b = ("".join(draw.choices("abc", k=draw.randint(0, 12))) for _ in range(2))
        rows = [[0] * (len(b) + 1)]
        for x in a:
            row = [0]
            for j, y in enumerate(b):
                row.append(rows[-1][j] + 1 if x == y else max(rows[-1][j + 1], row[j]))
            rows.append(row)
        assert common_length(a, b) == rows[-1][-1]


def test_a_hostile_reply_to_a_long_text_is_scored_in_no_time():
    env = load(min_words=400, max_words=400, num_examples=1, num_eval_examples=1)
    began = time.process_time()
    assert score(env, tagged("ab " * 8000)) < 0.5
    assert time.process_time() - began < 2


def test_seeds_repeat_and_no_text_is_in_both_data_sets():
    env, same, other = load(seed=1), load(seed=1), load(seed=2)
    assert env.dataset["question"] == same.dataset["question"] != other.dataset["question"]
    assert not set(env.dataset["question"]) & set(env.eval_dataset["question"])
    assert all(3 <= len(text.split()) <= 10 for text in env.dataset["question"])
    assert load(num_examples=5, seed=1).dataset["question"] == env.dataset["question"][:5]


def test_too_few_texts_for_two_data_sets_are_shared():
    assert set(load(length=1, alphabet="a", num_eval_examples=3).eval_dataset["question"]) == {"a"}


def test_it_can_be_pickled():
    env = pickle.loads(pickle.dumps(load(num_eval_examples=3)))  # noqa: S301
    assert score(env, gold) == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_words": 5, "max_words": 4}, "min_words must be from 1 to max_words, got min_words=5, max_words=4"),
        ({"length": 0}, "at least 1, got 0"),
        ({"alphabet": "a b"}, "without spaces, '<' and '>', got 'a b'"),
        ({"num_examples": -1}, "must not be negative"),
    ],
)
def test_nonsense_is_refused_with_its_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        load(**arguments)
