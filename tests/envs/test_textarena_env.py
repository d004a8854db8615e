"""Games of TextArena: played to their end, alone and against others, the same again by their seeds, offline."""

from __future__ import annotations

import asyncio
import importlib
import pickle
import random
import re
import sys
from typing import Any

import pytest

import verifiers as vf
from verifiers.envs.textarena_env import TextArenaEnv
from verifiers.envs.textarena_game import Game

NUMBER = "GuessTheNumber-v0"


def bisect(messages: Any) -> str:
    low, high = 1, 20
    messages = [message for message in messages if message["role"] != "system"]
    for move, said in zip(messages[1::2], messages[2::2], strict=False):
        guess = int(re.findall(r"\d+", move["content"])[-1])
        low, high = (guess + 1, high) if "higher" in said["content"].lower() else (low, guess - 1)
    return f"<move>[{(low + high) // 2}]</move>"


def play(env: vf.Environment, reply: Any, n: int = 1, **kwargs: Any) -> list[vf.State]:
    results = env.evaluate(client=vf.FakeClient(reply), model="m", use_tqdm=False, num_examples=n, **kwargs)
    assert not results.failed, results.failed[0]["error"]
    return results.rollouts


def test_a_game_is_won_and_says_so() -> None:
    env = TextArenaEnv(NUMBER, num_train_examples=3, num_eval_examples=20)
    for state in play(env, bisect, n=20):
        assert state["reward"] == 1.0
        assert state["completion"][-1]["content"] == "Congratulations! You guessed the correct number."
        assert "ta_game" not in state
        assert all("[Player 0]" not in message["content"] for message in state["completion"])
        assert state["metrics"]["game_over"] == 1.0


def test_moves_that_break_the_rules_end_the_game_and_earn_nothing() -> None:
    env = TextArenaEnv(NUMBER, num_eval_examples=5)
    for reply in ("", "I pass.", "<move>[99]</move>"):
        (state,) = play(env, reply)
        assert state["reward"] == 0.0
        assert state["metrics"]["broke_rules"] == 1.0
        assert "invalid move" in state["completion"][1]["content"]


def test_a_game_that_gives_a_reason_in_place_of_a_reward_is_lost_and_not_left_out() -> None:
    """Otherwise a model could take a game that it loses out of the mean, by a bad move."""
    states = play(TextArenaEnv("ThreeCardMonte-v0", num_eval_examples=2), "I pass.", n=2)
    assert [(state["reward"], state["metrics"]["game_over"]) for state in states] == [(0.0, 1.0)] * 2


@pytest.mark.parametrize("game", ["Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0"])
def test_games_that_report_moves_in_another_order_can_be_played(game: str) -> None:
    (state,) = play(TextArenaEnv(game, num_eval_examples=1, max_moves=3), "<move>[7]</move>")
    assert state["metrics"]["num_turns"] >= 1
    assert all("[7]" not in message["content"] for message in state["completion"] if message["role"] == "user")


def test_a_game_that_runs_out_of_moves_is_not_over() -> None:
    (state,) = play(TextArenaEnv(NUMBER, max_moves=2), ["[1]", "[20]"])
    assert state["metrics"]["num_turns"] == 2
    assert (state["reward"], state["metrics"]["game_over"]) == (0.0, 0.0)
    assert "lower" in state["completion"][-1]["content"]


def test_a_seed_sets_up_the_same_games_and_evaluation_has_others() -> None:
    def boards(seed: int) -> list[str]:
        env = TextArenaEnv("Sudoku-v0-very-easy", num_train_examples=3, num_eval_examples=3, seed=seed)
        assert env.dataset is not None
        assert env.eval_dataset is not None
        assert not set(env.dataset["question"]) & set(env.eval_dataset["question"])
        return env.dataset["question"]

    assert boards(1) == boards(1) != boards(7)


def test_games_with_dice_repeat_even_when_many_are_played_at_once() -> None:
    """Blackjack draws its cards from the random module while it is played: games used to share one deck's luck."""

    def hands(max_concurrent: int) -> list[Any]:
        env = TextArenaEnv("Blackjack-v0", num_eval_examples=6)
        client = vf.FakeClient(lambda messages: "[stand]" if len(messages) % 3 else "[hit]", latency_s=0.001)
        results = env.evaluate(client=client, model="m", use_tqdm=False, max_concurrent=max_concurrent)
        return [[message["content"] for message in state["completion"]] for state in results.rollouts]

    assert hands(1) == hands(6)


def test_games_leave_the_random_module_as_they_found_it() -> None:
    random.seed(5)
    expected = [random.random() for _ in range(3)]
    random.seed(5)
    seen = []
    env = TextArenaEnv(NUMBER, num_eval_examples=2)
    seen.append(random.random())
    len(env.get_eval_dataset())
    seen.append(random.random())
    play(env, bisect, n=2)
    seen.append(random.random())
    assert seen == expected


def free(messages: Any) -> list[str]:
    _, _, moves = messages[-1]["content"].rpartition("Available Moves:")
    return re.findall(r"'(\[\d\])'", moves)


def first_free(messages: Any) -> str:
    return free(messages)[0]


def last_free(messages: Any) -> str:
    return free(messages)[-1]


async def last_free_later(messages: Any) -> str:
    await asyncio.sleep(0)
    return last_free(messages)


@pytest.mark.parametrize(
    "opponent", [last_free, last_free_later, vf.FakeClient(last_free)], ids=["sync", "async", "client"]
)
def test_others_are_played_by_a_function_or_a_client(opponent: Any) -> None:
    env = TextArenaEnv("TicTacToe-v0", num_players=2, opponent=opponent, opponent_model="other", num_eval_examples=1)
    (state,) = play(env, first_free)
    assert state["metrics"]["num_turns"] == 3
    assert "placed their symbol (X) in cell 8" in state["completion"][1]["content"]
    assert state["reward"] == 1.0
    (state,) = play(env, "[9]")
    assert (state["reward"], state["metrics"]["broke_rules"]) == (-1.0, 1.0)


def test_the_policy_can_play_against_itself() -> None:
    env = TextArenaEnv("TicTacToe-v0", num_players=2, opponent="self", num_eval_examples=1)
    client = vf.FakeClient(lambda messages: f"<move>{first_free(messages)}</move>")
    (state,) = env.evaluate(client=client, model="m", use_tqdm=False).rollouts
    assert len(client.requests) == 7  # 0 to 6 in turn: player 0 has 0, 2, 4 and 6, a diagonal
    assert state["reward"] == 1.0
    assert "You are Player 1" in client.requests[1].prompt[0]["content"]


def test_what_the_game_says_can_be_put_in_other_words() -> None:
    (state,) = play(TextArenaEnv(NUMBER, feedback_fn=str.upper, system_prompt="Guess."), bisect)
    assert state["completion"][-1]["content"].isupper()
    assert state["prompt"][0] == {"role": "system", "content": "Guess."}


def test_it_can_be_pickled_before_and_after_it_was_used() -> None:
    env = TextArenaEnv(NUMBER, num_eval_examples=1)
    assert play(pickle.loads(pickle.dumps(env)), bisect)[0]["reward"] == 1.0
    play(env, bisect)
    assert play(pickle.loads(pickle.dumps(env)), bisect)[0]["reward"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"game": "GuesTheNumber-v0"}, "no game 'GuesTheNumber-v0'; did you mean GuessTheNumber-v0"),
        ({"game": NUMBER, "max_moves": 0}, "must be at least 1"),
        ({"game": "TicTacToe-v0", "num_players": 2}, "a game for 2 takes an opponent="),
        ({"game": NUMBER, "opponent": "self"}, "a game for 1 takes no opponent="),
    ],
)
def test_nonsense_is_refused_when_the_environment_is_built(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextArenaEnv(**arguments)


def test_games_that_cannot_be_set_up_say_what_they_lack() -> None:
    with pytest.raises(RuntimeError, match=r"'TicTacToe-v0' cannot be set up for num_players=1: AssertionError"):
        len(TextArenaEnv("TicTacToe-v0").get_dataset())
    with pytest.raises(RuntimeError, match="'Debate-v0' cannot be set up: ValueError: OpenRouter API key not found"):
        len(TextArenaEnv("Debate-v0", num_players=2, opponent="self").get_dataset())


def test_games_that_need_word_lists_name_the_command_that_fetches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    nltk = importlib.import_module("nltk")
    asked: list[Any] = []
    monkeypatch.setattr(nltk, "download", lambda *args, **kwargs: asked.append((args, kwargs)))
    monkeypatch.setattr(nltk.data, "path", [])
    with pytest.raises(RuntimeError, match=r"python -m nltk\.downloader words"):
        len(TextArenaEnv("Hangman-v0").get_dataset())
    assert all(kwargs["quiet"] for _, kwargs in asked)


def test_copies_of_a_game_share_its_word_lists_and_nothing_else() -> None:
    textarena = importlib.import_module("textarena")

    class Words(textarena.Env):  # type: ignore[misc]
        def __init__(self) -> None:
            self.word_list = [str(n) for n in range(5000)]
            self.guessed: list[str] = []

        def reset(self, num_players: int, seed: int | None = None) -> None:
            self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed)
            self.state.reset(game_state={"secret_word": random.choice(self.word_list)})

        def step(self, action: str) -> Any:
            self.guessed.append(action)
            return self.state.step()

    template = Words()
    games = [Game(template, 1, seed) for seed in (1, 1, 2)]
    assert games[0].secret == games[1].secret != games[2].secret
    games[0].move("five")
    assert all(game._rules.word_list is template.word_list for game in games)
    assert [game._rules.guessed for game in games] == [["five"], [], []]


def test_without_the_package_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena.envs.registration", None)
    with pytest.raises(ImportError, match=r"pip install 'verifiers\[games\]'"):
        TextArenaEnv(NUMBER)


def test_max_turns_is_another_name_for_the_number_of_moves() -> None:
    env = TextArenaEnv("GuessTheNumber-v0", num_train_examples=1, num_eval_examples=1, max_turns=2)
    (state,) = env.evaluate(vf.FakeClient("<move>[1]</move>"), "m", use_tqdm=False).rollouts
    assert state["error"] is None
    assert len(state["trajectory"]) == 2
    assert TextArenaEnv("GuessTheNumber-v0", num_train_examples=1, max_turns=-1).max_moves > 10_000
    with pytest.raises(ValueError, match="max_moves=3 and max_turns=2"):
        TextArenaEnv("GuessTheNumber-v0", max_moves=3, max_turns=2)
