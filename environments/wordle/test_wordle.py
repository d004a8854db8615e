"""The wordle environment: the marks, the rules about guesses, and whole games."""

from __future__ import annotations

import importlib
import pickle  # noqa: TID251 - an environment has to survive it
from pathlib import Path

import pytest

import verifiers as vf

FOLDER = Path(__file__).resolve().parents[1]
RULES = {"max_guesses": 6, "max_refused": 3, "hard_mode": False}


def load(**kwargs):
    return vf.load_environment("wordle", environments_dir=FOLDER, **kwargs)


@pytest.fixture(scope="module")
def wordle():
    load(num_train_examples=1, num_eval_examples=1)
    return importlib.import_module("wordle")


def guess(word: str) -> str:
    return f"<guess>{word}</guess>"


def play(env: vf.Environment, reply, secret: str | None = None) -> vf.State:
    row = dict(env.eval_dataset[0]) | ({"answer": secret} if secret else {})
    results = env.generate([row], client=vf.FakeClient(reply), model="fake", use_tqdm=False)
    assert not results.failed
    return results.rollouts[0]


@pytest.mark.parametrize(
    ("secret", "word", "expected"),
    [
        ("crane", "crane", "GGGGG"),
        ("crane", "build", "-----"),
        ("abide", "speed", "--Y-Y"),
        ("erase", "speed", "Y-YY-"),
        ("steal", "speed", "G-G--"),
        ("crepe", "speed", "-YGY-"),
        ("banal", "annal", "Y-GGG"),
        ("alley", "llama", "YGY--"),
        ("robot", "floor", "--YGY"),
        ("geese", "eerie", "YG--G"),
    ],
)
def test_repeated_letters_are_marked_as_often_as_they_are_there(wordle, secret, word, expected):
    assert wordle.marks(secret, word) == expected


def test_the_words_are_many_plain_and_right_for_the_game(wordle):
    assert len(wordle.SECRETS) == len(set(wordle.SECRETS)) == 1897
    assert len(wordle.WORDS) == 2440
    assert all(len(word) == 5 and word.isascii() and word.isalpha() and word.islower() for word in wordle.WORDS)


def test_a_game_is_won_with_a_last_word_and_quick_games_are_worth_more():
    env = load(num_eval_examples=3)
    at_once = play(env, guess("crane"), "crane")
    assert at_once["reward"] == pytest.approx(1.0)
    assert at_once["completion"][-1]["content"] == "c r a n e\nG G G G G\nYou found the word."
    later = play(env, [guess("stare"), "<guess>[CRANE]</guess>"], "crane")
    assert later["completion"][1]["content"] == "s t a r e\n- - G Y G\n5 guesses left."
    assert 0.9 < later["reward"] < at_once["reward"]
    assert later["metrics"]["num_turns"] == 2


def test_six_guesses_are_all_there_are_and_the_sixth_counts():
    env = load(num_eval_examples=3)
    lost = play(env, guess("stare"), "crane")
    assert lost["metrics"]["num_turns"] == 6
    assert lost["completion"][-1]["content"].endswith("No guesses left; the word was crane.")
    assert lost["reward"] == pytest.approx(0.2 * 2.5 / 5)
    won = play(env, [*[guess("stare")] * 5, guess("crane")], "crane")
    assert won["metrics"]["solved"] == 1.0


def test_refused_guesses_cost_nothing_until_there_are_too_many():
    env = load(num_eval_examples=3)
    replies = ["crane", guess("cranes"), guess("qwxyz"), guess("crane")]
    state = play(env, replies, "crane")
    assert [m["content"] for m in state["completion"][1:6:2]] == [
        "There is no guess in <guess> tags. Guess again.",
        "A guess is one word of 5 letters. Guess again.",
        "'qwxyz' is not in the word list. Guess again.",
    ]
    assert state["reward"] == pytest.approx(1.0)
    assert state["metrics"]["refused_guesses"] == 3
    for nothing in ("", "crane", guess("crane slate"), "<guess>crane"):
        state = play(env, nothing, "crane")
        assert (state["reward"], state["metrics"]["num_turns"]) == (0.0, 4)


def test_a_list_of_guesses_is_one_guess_and_an_echo_is_none():
    env = load(num_eval_examples=20)
    stuffed = "".join(map(guess, ["stare", "crane", "build", "mouth", "lucky"]))
    results = env.evaluate(client=vf.FakeClient(stuffed), model="fake", use_tqdm=False)
    assert results.mean_reward < 0.2
    echo = env.evaluate(client=vf.FakeClient(lambda m: m[0]["content"]), model="fake", use_tqdm=False)
    assert echo.mean_reward < 0.2  # the example in the rules is a guess like any other


def test_hard_mode_refuses_a_guess_that_forgets_what_is_known(wordle):
    rules = RULES | {"hard_mode": True}
    said = wordle.play("crane", rules, ["stare", "build"]).said
    assert said == "'build' does not use what you know: letter 3 must be 'a'. Guess again."
    assert "must have 'r' in it" in wordle.play("crane", rules, ["stare", "shade"]).said
    assert wordle.play("crane", rules, ["stare", "crane"]).guesses == ("stare", "crane")
    assert wordle.play("crane", RULES, ["stare", "build"]).guesses == ("stare", "build")
    assert "stay where they are" in load(hard_mode=True).dataset[0]["prompt"][0]["content"]


def test_with_thoughts_only_a_guess_after_them_counts():
    env = load(use_think=True, num_eval_examples=3)
    assert "<think>" in env.dataset[0]["prompt"][0]["content"]
    assert play(env, f"<think>{guess('stare')}</think>{guess('crane')}", "crane")["metrics"]["solved"] == 1.0
    assert play(env, guess("crane"), "crane")["metrics"]["solved"] == 0.0


def test_seeds_repeat_and_no_word_is_in_both_data_sets():
    env, same, other = (load(seed=seed, num_eval_examples=300) for seed in (1, 1, 2))
    assert env.dataset["answer"] == same.dataset["answer"] != other.dataset["answer"]
    assert len(env.dataset) == 2000
    assert not set(env.dataset["answer"]) & set(env.eval_dataset["answer"])


def test_it_can_be_pickled():
    env = pickle.loads(pickle.dumps(load(num_eval_examples=3)))  # noqa: S301
    assert play(env, guess("crane"), "crane")["reward"] == pytest.approx(1.0)


@pytest.mark.parametrize("arguments", [{"max_guesses": 0}, {"max_refused": -1}])
def test_nonsense_is_refused_with_its_value(arguments):
    (name, value), *_ = arguments.items()
    with pytest.raises(ValueError, match=f"{name} must .*, got {value}"):
        load(**arguments)
