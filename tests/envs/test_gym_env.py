"""Gymnasium environments as conversations: what the model sees, how replies become actions, what an episode scores."""

from __future__ import annotations

import builtins
import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import verifiers as vf
from verifiers.envs.gym_env import GymEnv
from verifiers.envs.gym_spaces import BadActionError, describe_space, read_action, show

LAKE = {"render_mode": "ansi", "is_slippery": False}
WAYS = ["left", "down", "right", "up"]
SAFE_WAY = ["down", "down", "right", "right", "down", "right"]  # over the 4×4 lake that Gymnasium comes with


class Corridor(gymnasium.Env[int, int]):
    """Walk right to the end: each step costs 0.1, the end is worth 1. The seed decides where one starts."""

    opened = closed = 0

    def __init__(self, length: int = 5) -> None:
        self.length = length
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Discrete(length)
        type(self).opened += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(0, self.length - 1))
        return self.place, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        if self.place < 0:
            raise RuntimeError("fell out of the corridor")
        self.place += 1 if action else -1
        is_done = self.place == self.length - 1
        return self.place, 1.0 if is_done else -0.1, is_done, False, {"place": self.place}

    def close(self) -> None:
        type(self).closed += 1


def play(env: vf.Environment, reply: Any, n: int = 1) -> list[vf.State]:
    results = env.evaluate(client=vf.FakeClient(reply), model="m", use_tqdm=False, num_examples=n)
    return results.rollouts


def test_an_environment_that_renders_text_is_played_by_the_names_of_its_actions() -> None:
    env = GymEnv("FrozenLake-v1", LAKE, action_names=WAYS, num_eval_episodes=2)
    (state,) = play(env, [f"<action>{way}</action>" for way in SAFE_WAY])
    assert state["reward"] == 1.0
    assert state["prompt"][-1]["content"].endswith("[S]FFF\nFHFH\nFFFH\nHFFG\n(in brackets: S red)")
    assert state["metrics"]["episode_steps"] == 6
    assert state["is_terminated"]
    assert [step["reward"] for step in state["trajectory"]] == [0, 0, 0, 0, 0, 1]


def test_falling_into_a_hole_ends_the_episode_for_nothing() -> None:
    env = GymEnv("FrozenLake-v1", LAKE, action_names=WAYS)
    (state,) = play(env, ["RIGHT", "down"])
    assert (state["reward"], state["metrics"]["num_turns"]) == (0.0, 2)


def test_rewards_are_summed_and_each_rollout_has_an_environment_of_its_own() -> None:
    env = GymEnv(Corridor, {"length": 6}, num_eval_episodes=8)
    before = Corridor.opened
    states = play(env, "<action>1</action>", n=8)
    for state in states:
        start = int(state["prompt"][-1]["content"].split()[-1])
        assert state["reward"] == pytest.approx(1.0 - 0.1 * (4 - start))
        assert "gym_env" not in state
    assert len({state["prompt"][-1]["content"] for state in states}) > 1
    assert Corridor.opened - before == 8 + 1  # one more, to make the rows
    assert Corridor.opened == Corridor.closed


def test_a_reply_that_is_no_action_is_answered_and_counts_as_a_turn() -> None:
    env = GymEnv(Corridor, max_episode_steps=3)
    (state,) = play(env, ["go right", "<action>7</action>", "<action>0</action>"])
    said = [message["content"] for message in state["completion"]]
    assert said[1] == "'go right' is not an action. Give a whole number from 0 to 1."
    assert said[3] == "'7' is not an action. Give a whole number from 0 to 1."
    assert state["metrics"]["invalid_actions"] == 2
    assert state["reward"] == pytest.approx(-0.1)  # the third action was taken before the limit ended the episode
    assert (state["metrics"]["num_turns"], state["is_terminated"]) == (3, False)


def test_the_same_seed_begins_the_same_episodes_and_evaluation_has_others() -> None:
    def starts(**kwargs: Any) -> list[str]:
        env = GymEnv(Corridor, {"length": 1000}, num_train_episodes=5, num_eval_episodes=5, **kwargs)
        assert env.dataset is not None
        assert env.eval_dataset is not None
        assert env.dataset["question"] != env.eval_dataset["question"]
        return env.dataset["question"]

    assert starts(seed=1) == starts(seed=1) != starts(seed=9)


def test_ones_own_ways_to_read_actions_and_to_show_observations() -> None:
    env = GymEnv(Corridor, action_parser={"hop": 1}.__getitem__, obs_to_text=lambda seen: f"You are at {seen}.")
    (state,) = play(env, ["hop"])
    assert state["prompt"][-1]["content"].startswith("You are at ")
    assert state["metrics"]["invalid_actions"] == 0
    (state,) = play(GymEnv(Corridor, action_parser=int, max_episode_steps=2), ["jump", "7"])
    said = [message["content"] for message in state["completion"][1::2]]
    assert said == [
        "'jump' is not an action: invalid literal for int() with base 10: 'jump'",
        "'7' is not an action here",
    ]


def test_an_environment_that_raises_fails_its_rollout_and_is_closed() -> None:
    env = GymEnv(Corridor, {"length": 2}, num_eval_episodes=1)
    results = env.evaluate(client=vf.FakeClient("0"), model="m", use_tqdm=False)
    assert "fell out of the corridor" in str(results.failed[0]["error"])
    assert Corridor.opened == Corridor.closed


def test_completions_without_roles_work_too() -> None:
    env = GymEnv(Corridor, message_type="completion", num_eval_episodes=1, system_prompt="Walk.")
    (state,) = play(env, "1")
    assert state["prompt"].startswith("Walk.\n\nChoose one action")
    assert state["reward"] > 0


def test_it_can_be_pickled() -> None:
    env = pickle.loads(pickle.dumps(GymEnv("FrozenLake-v1", LAKE, action_names=WAYS, num_eval_episodes=1)))
    assert play(env, SAFE_WAY)[0]["reward"] == 1.0


SPACES = [
    (spaces.Discrete(3, start=5), "a whole number from 5 to 7", "6", ["4", "6.0", "six", "[6]", "true", ""]),
    (spaces.Box(-1, 1, (2,)), "a JSON list of 2 numbers from -1 to 1", "[0.5, -1]", ["[0.5]", "[2, 0]", "[NaN, 0]"]),
    (spaces.Box(0, 9, ()), "a number from 0 to 9", "4.5", ["[1, 2]", "10", "Infinity"]),
    (
        spaces.MultiDiscrete([2, 3]),
        "a JSON list of 2 whole numbers from 0, below [2, 3]",
        "[1, 2]",
        ["[2, 0]", "[0.5, 1]"],
    ),
    (spaces.MultiBinary(3), "a JSON list of 3 zeros and ones", "[0, 1, 1]", ["[0, 1, 2]", "[" * 100_000]),
    (spaces.Text(5), "a text of 1 to 5 characters", "abc", ["abcdef"]),
]


@pytest.mark.parametrize(
    ("space", "words", "good", "bad"), SPACES, ids=[type(s).__name__ + str(i) for i, (s, *_) in enumerate(SPACES)]
)
def test_every_common_space_is_described_and_read(space: Any, words: str, good: str, bad: list[str]) -> None:
    assert describe_space(space) == words
    assert space.contains(read_action(space, good))
    for text in bad:
        with pytest.raises(BadActionError, match=r"is not an action\. Give"):
            read_action(space, text)


def test_observations_of_every_kind_have_a_text() -> None:
    assert show(np.array([[1, 2], [3, 4]])) == "[[1, 2], [3, 4]]"
    assert show((np.int64(3), 0.5, True)) == "[3, 0.5, true]"
    assert show({"board": np.zeros(2), "note": "hi", "more": {"x": 1}}) == "board: [0.0, 0.0]\nnote: hi\nmore: x: 1"
    assert show(object()).startswith('"<object object')


def test_nonsense_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="Gymnasium has no environment 'FrozenLaek-v1'"):
        GymEnv("FrozenLaek-v1")
    with pytest.raises(TypeError, match="env_cls must be the id of a Gymnasium environment or a class, got 5"):
        GymEnv(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_episode_steps must be at least 1, got 0"):
        GymEnv(Corridor, max_episode_steps=0)
    with pytest.raises(ValueError, match="action_names has 3 names, but the actions are Discrete"):
        len(GymEnv(Corridor, action_names=["a", "b", "c"]).get_dataset())
    with pytest.raises(TypeError, match="no standard text form for actions of Dict"):
        describe_space(spaces.Dict({"a": spaces.Discrete(2)}))

    def without_gymnasium(name: str, *args: Any) -> Any:
        if name == "gymnasium":
            raise ImportError(name)
        return real(name, *args)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without_gymnasium)
    with pytest.raises(ImportError, match=r"pip install 'verifiers\[games\]'"):
        GymEnv("FrozenLake-v1")


def test_the_import_paths_of_0_1_give_the_same_classes() -> None:
    from verifiers.envs.experimental.gym_env import GymEnv as ExperimentalGymEnv
    from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv
    from verifiers.envs.integrations.textarena_env import TextArenaEnv

    assert ExperimentalGymEnv is vf.GymEnv
    assert ReasoningGymEnv is vf.ReasoningGymEnv
    assert TextArenaEnv is vf.TextArenaEnv


def test_an_object_of_the_older_protocol_without_spaces_or_close_is_played() -> None:
    class Counter:
        def __init__(self, target: int) -> None:
            self.target = target
            self.x = 0

        def reset(self, **kwargs: Any) -> str:
            self.x = 0
            return "x=0"

        def step(self, action: int) -> tuple[str, float, bool, dict[str, int]]:
            self.x += action
            return f"x={self.x}", float(self.x == self.target), self.x >= self.target, {"x": self.x}

    from verifiers.envs.experimental.gym_env import EpisodicSumRubric

    env = GymEnv(Counter, {"target": 2}, action_parser=int, rubric=EpisodicSumRubric(weight=2.0), num_eval_episodes=1)
    (state,) = play(env, ["1", "1"])
    assert state["error"] is None
    assert (state["prompt"][-1]["content"], state["reward"], state["gym_done"]) == ("x=0", 2.0, True)
    assert [step["extras"]["gym_info"] for step in state["trajectory"]] == [{"x": 1}, {"x": 2}]


def test_a_subclass_may_write_observations_itself() -> None:
    class Told(GymEnv):
        def obs_to_text(self, seen: Any) -> str:
            return f"You are on square {seen}."

    (state,) = play(Told("FrozenLake-v1", num_eval_episodes=1), "0")
    assert state["prompt"][-1]["content"].endswith("You are on square 0.")


def test_the_spaces_say_what_the_numbers_are_and_a_description_what_they_mean() -> None:
    cards = GymEnv("Blackjack-v1", num_train_episodes=1)
    asked = cards.dataset[0]["question"]
    assert "a whole number from 0 to 1." in asked
    assert "What you see each turn is a list of 3: a whole number from 0 to 31; " in asked
    pole = GymEnv("CartPole-v1", num_train_episodes=1).dataset[0]["question"]
    assert "a list of 4 numbers: from -4.8 to 4.8; any; from -0.418879 to 0.418879; any." in pole
    rules = "Your sum, the dealer's card, a usable ace. 0 sticks and 1 hits."
    told = GymEnv("Blackjack-v1", description=rules, action_names=["stick", "hit"], num_train_episodes=1)
    assert told.dataset[0]["question"].startswith(f"{rules}\n\nChoose one action a turn")
    assert "stick, hit" in told.dataset[0]["question"]


def test_colours_of_a_screen_become_brackets() -> None:
    (state,) = play(GymEnv("FrozenLake-v1", LAKE, action_names=WAYS, num_eval_episodes=1, max_turns=2), ["right"] * 2)
    screens = [message["content"] for message in state["completion"] if message["role"] == "user"]
    assert screens == [
        "  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG\n(in brackets: F red)",
        "  (Right)\nSF[F]F\nFHFH\nFFFH\nHFFG\n(in brackets: F red)",
    ]
    taxi = GymEnv("Taxi-v4", {"render_mode": "ansi"}, num_train_episodes=1).dataset[0]["question"]
    assert "\x1b" not in taxi
    assert "blank yellow" in taxi
    with pytest.raises(ValueError, match="two names for the same argument"):
        GymEnv("FrozenLake-v1", max_turns=2, max_episode_steps=3)
