"""The textarena-env environment: games alone, against the model itself and against others, and invalid arguments."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import verifiers as vf

FOLDER = Path(__file__).resolve().parents[1]


def load(**kwargs):
    defaults = {"num_train_examples": 2, "num_eval_examples": 10}
    return vf.load_environment("textarena-env", environments_dir=FOLDER, **{**defaults, **kwargs})


def evaluate(env: vf.Environment, reply) -> vf.Results:
    results = env.evaluate(client=vf.FakeClient(reply), model="fake", use_tqdm=False)
    assert not results.failed, results.failed[0]["error"]
    return results


def bisect(messages) -> str:
    low, high = 1, 20
    for move, said in zip(messages[2::2], messages[3::2], strict=False):
        guess = int(re.findall(r"\d+", move["content"])[-1])
        low, high = (guess + 1, high) if "higher" in said["content"] else (low, guess - 1)
    return f"<move>[{(low + high) // 2}]</move>"


def first_free(messages) -> str:
    _, _, moves = messages[-1]["content"].rpartition("Available Moves:")
    first, *_ = re.findall(r"\[\d\]", moves)
    return f"<move>{first}</move>"


def test_the_shortest_way_over_the_lake_wins():
    env = load(num_eval_examples=20)
    solve = importlib.import_module("textarena_env").solve
    results = evaluate(env, lambda messages: solve(messages, {}))
    assert results["rewards"] == [1.0] * 20
    assert all(state["metrics"]["num_turns"] >= 8 for state in results.rollouts)
    assert not set(env.dataset["question"]) & set(env.eval_dataset["question"])


def test_no_moves_echoes_and_lists_of_moves_earn_nothing():
    for env in (load(), load(game="GuessTheNumber-v0")):
        for nothing in ("", "Hello! [up] [3]", "<move></move>", lambda messages: messages[-1]["content"]):
            assert evaluate(env, nothing).mean_reward == 0.0
    stuffed = "<move>[up][down][left][right]</move>"
    assert evaluate(load(), stuffed).mean_reward < 0.2


def test_another_game():
    assert evaluate(load(game="GuessTheNumber-v0"), bisect).mean_reward == 1.0


def test_with_thoughts_a_move_before_their_end_does_not_count():
    env = load(game="GuessTheNumber-v0", use_think=True, num_eval_examples=3)
    assert evaluate(env, lambda messages: f"<think>[3]</think>{bisect(messages)}").mean_reward == 1.0
    assert evaluate(env, "<think><move>[3]</move></think>").mean_reward == 0.0


def test_the_model_plays_itself_or_another_model():
    alone = load(game="TicTacToe-v0", num_players=2, num_eval_examples=1)
    assert evaluate(alone, first_free).mean_reward == 1.0
    with vf.FakeServer("<move>[9]</move>") as server:
        arguments = {"opponent": "weak", "opponent_base_url": server.url, "opponent_api_key_var": ""}
        env = load(game="TicTacToe-v0", num_players=2, num_eval_examples=1, **arguments)
        (state,) = evaluate(env, first_free).rollouts
    assert (state["reward"], state["metrics"]["num_turns"]) == (1.0, 1)  # the other broke the rules


def test_the_same_seed_gives_the_same_games():
    boards = [load(game="Sudoku-v0-very-easy", seed=seed).dataset["question"] for seed in (1, 1, 5)]
    assert boards[0] == boards[1] != boards[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"game": "Sudoku"}, "TextArena has no game 'Sudoku'; did you mean Sudoku-v0"),
        ({"opponent": "gpt-5"}, "another opponent needs both a model and a URL: got opponent='gpt-5'"),
        ({"max_moves": 0}, "max_moves=0 must be at least 1"),
    ],
)
def test_nonsense_is_refused_with_its_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        load(**arguments)
