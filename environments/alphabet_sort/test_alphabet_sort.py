"""The alphabet-sort environment: its turns, and the scores of complete, partial and unsorted lists."""

from __future__ import annotations

import importlib
import pickle  # noqa: TID251 - an environment has to survive it
from pathlib import Path

import pytest

import verifiers as vf

FOLDER = Path(__file__).resolve().parents[1]


def load(**kwargs):
    return vf.load_environment("alphabet-sort", environments_dir=FOLDER, **kwargs)


def evaluate(env: vf.Environment, reply) -> vf.Results:
    results = env.evaluate(client=vf.FakeClient(reply), model="fake", use_tqdm=False)
    assert not results.failed
    return results


def names_in(messages) -> list[str]:
    asked = [message["content"] for message in messages if message["role"] == "user"]
    return [line for text in asked for line in text.splitlines()[1:]]


def tagged(names: list[str]) -> str:
    return "<sorted>\n" + "\n".join(names) + "\n</sorted>"


def gold(messages) -> str:
    by_last = "by last name" in messages[1]["content"]
    return tagged(sorted(names_in(messages), key=lambda name: name.split()[::-1] if by_last else name))


def unsorted(messages) -> str:
    return tagged(names_in(messages))


def stuffed(messages) -> str:
    return tagged(sorted(names_in(messages)) * 8 + sorted(names_in(messages), key=lambda name: name.split()[1]) * 8)


@pytest.mark.parametrize("difficulty", ["easy", "medium", "hard", "mixed"])
def test_sorted_lists_score_one_and_the_games_have_the_turns_they_say(difficulty):
    env = load(difficulty=difficulty, num_eval_examples=30, max_turns=4, min_turns=2)
    results = evaluate(env, gold)
    assert results.mean_reward == 1.0
    turns = [state["metrics"]["num_turns"] for state in results.rollouts]
    assert min(turns) >= 2
    assert max(turns) == 4
    assert turns == [len(state["info"]["lists"]) for state in results.rollouts]
    assert all(state["completion"][-1]["role"] == "assistant" for state in results.rollouts)


def test_solve_plays_as_the_sorted_lists_do():
    env = load(num_eval_examples=10)
    rows = {row["question"]: row for row in env.eval_dataset}
    solve = importlib.import_module("alphabet_sort").solve
    assert evaluate(env, lambda messages: solve(messages, rows[messages[1]["content"]])).mean_reward == 1.0


def test_what_is_not_sorted_earns_next_to_nothing():
    env = load(num_eval_examples=60)
    assert evaluate(env, unsorted).mean_reward < 0.3
    assert evaluate(env, stuffed).mean_reward < 0.05
    assert evaluate(env, "").mean_reward == 0.0
    assert evaluate(env, lambda messages: messages[-1]["content"]).mean_reward == 0.0


def test_the_answer_column_is_the_list_of_the_last_turn_and_a_late_answer_counts_for_its_turn_only():
    env = load(num_eval_examples=20, min_turns=2, max_turns=2)
    answers = {row["question"]: row["answer"] for row in env.eval_dataset}
    results = evaluate(env, lambda messages: tagged(answers[messages[1]["content"]].splitlines()))
    assert all(0.5 < reward < 1.0 for reward in results["rewards"])
    assert all(state["metrics"]["all_right"] == 0.0 for state in results.rollouts)


def test_the_same_seed_gives_the_same_games_and_another_seed_others():
    assert load(seed=1).dataset["question"] == load(seed=1).dataset["question"]
    assert load(seed=1).dataset["question"] != load(seed=2).dataset["question"]
    assert set(load().dataset["difficulty"]) == {"easy", "medium", "hard"}


def test_it_can_be_pickled():
    env = pickle.loads(pickle.dumps(load(num_eval_examples=3)))  # noqa: S301
    assert evaluate(env, gold).mean_reward == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"difficulty": "insane"}, "easy, medium, hard or mixed, got 'insane'"),
        ({"max_turns": 0}, "min_turns must be from 1 to max_turns, got min_turns=1, max_turns=0"),
        ({"difficulty": "hard", "max_turns": 10}, "names for 9 turns at difficulty 'hard', got max_turns=10"),
    ],
)
def test_nonsense_is_refused_with_its_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        load(**arguments)
