"""Several environments as one: each row is played and scored by its own, however deep it lies."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import verifiers as vf


def single(name: str, n: int = 2, **kwargs: Any) -> vf.SingleTurnEnv:
    def reward(completion: Any, task: str, state: Any) -> float:
        assert task == name
        return float(completion[-1]["content"] == f"{name}!")

    reward.__name__ = f"{name}_right"
    rows = [{"question": f"{name} {i}", "answer": str(i), "task": name} for i in range(n)]
    settings = {"dataset": rows, "system_prompt": name, "rubric": vf.Rubric([reward]), **kwargs}
    return vf.SingleTurnEnv(**settings)


def reply(messages: Any) -> str:
    return f"{messages[0]['content']}!"  # the system prompt says whose row it is


def evaluate(env: vf.Environment, client: Any = None, **kwargs: Any) -> Any:
    return env.evaluate(client=client or vf.FakeClient(reply), model="m", use_tqdm=False, **kwargs)


def test_rows_are_routed_and_scored_by_their_own_environment() -> None:
    group = vf.EnvGroup([single("a"), single("b", 3)], env_names=["first", "second"])
    results = evaluate(group)
    assert results.causes == {}
    assert results["tasks"] == ["first"] * 2 + ["second"] * 3
    assert results["rewards"] == [1.0] * 5
    assert results["example_id"] == [0, 1, 2, 3, 4]
    assert results["a_right"] == [1.0, 1.0, None, None, None]
    assert results.interval("b_right").mean == 1.0


def test_groups_hold_groups() -> None:
    inner = vf.EnvGroup([single("a"), single("b")], env_names=["x", "y"])
    middle = vf.EnvGroup([inner, single("c")], env_names=["deep", "flat"])
    outer = vf.EnvGroup([middle, single("d")], env_names=["left", "right"])
    results = evaluate(outer, rollouts_per_example=2)
    assert results.causes == {}
    assert list(dict.fromkeys(results["tasks"])) == ["left/deep/x", "left/deep/y", "left/flat", "right"]
    assert results["rewards"] == [1.0] * 16
    assert outer.get_env_for_task("left/deep/y") is middle


def test_names_with_a_slash_do_not_confuse_the_routing() -> None:
    plain, hard = single("a"), single("b")
    group = vf.EnvGroup([plain, hard], env_names=["math", "math/hard"])
    assert group.get_env_for_task("math") is plain
    assert group.get_env_for_task("math/hard") is hard
    assert evaluate(group)["rewards"] == [1.0] * 4


@pytest.mark.parametrize(
    ("envs", "names", "message"),
    [
        ([], None, "at least one"),
        ([single("a")], ["x", "y"], "1 environments but 2 names"),
        ([single("a"), single("b")], ["x", "x"], "must be unique"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused(envs: Any, names: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vf.EnvGroup(envs, env_names=names)


def test_a_task_that_nobody_plays_fails_its_row_and_names_the_ones_there_are() -> None:
    group = vf.EnvGroup([single("a", rubric=vf.Rubric())], env_names=["x"])
    rows = [{"prompt": "p", "task": "x"}, {"prompt": "p", "task": "z"}]
    results = group.generate(inputs=rows, client=vf.FakeClient("?"), model="m", use_tqdm=False)
    assert len(results.rollouts) == 2
    (failed,) = results.failed
    assert "no environment has the task 'z'; there are x" in str(failed["error"])
    with pytest.raises(ValueError, match="no environment has the task"):
        group.get_env_for_task("z")


def test_group_rewards_of_members_see_their_own_rollouts_also_beside_an_added_rubric() -> None:
    seen: list[set[str]] = []

    def compare(completions: Any, tasks: Any) -> list[float]:
        seen.append(set(tasks))
        return [0.5] * len(completions)

    def extra(completion: Any) -> float:
        return 1.0

    group = vf.EnvGroup([single("a"), single("b", rubric=vf.Rubric([compare]))], env_names=["x", "y"])
    results = evaluate(group, rollouts_per_example=3)
    assert results["rewards"] == [1.0] * 6 + [0.5] * 6
    assert seen == [{"b"}, {"b"}]
    group.add_rubric(vf.Rubric([extra]))
    assert evaluate(group, rollouts_per_example=3)["rewards"] == [2.0] * 6 + [1.5] * 6


def test_a_member_that_scores_in_its_own_way_is_left_to_it() -> None:
    class Own(vf.SingleTurnEnv):
        def score_rollout(self, state: vf.State) -> float:  # type: ignore[override]
            return 0.25

    def compare(completions: Any) -> list[float]:
        return [9.0] * len(completions)

    own = Own(dataset=[{"question": "q"}], rubric=vf.Rubric([compare]))
    other = single("b", rubric=vf.Rubric([lambda completions: [1.0] * len(completions)]))
    group = vf.EnvGroup([own, other])
    assert evaluate(group)["rewards"] == [0.25, 1.0, 1.0]


def test_members_play_in_their_own_way() -> None:
    class Talk(vf.MultiTurnEnv):
        def env_response(self, messages: Any, state: Any) -> str:
            return "more"

    class Own(vf.SingleTurnEnv):
        def rollout(self, client: Any, model: Any, prompt: Any, answer: Any, **kwargs: Any) -> Any:
            completion, state = super().rollout(client, model, prompt, answer, **kwargs)
            state["own"] = True
            return completion, state

    rows = [{"question": "q", "answer": ""}]
    group = vf.EnvGroup(
        [Talk(dataset=rows, max_turns=3, sampling_args={"seed": 1}), Own(dataset=rows), single("a", max_retries=2)]
    )
    client = vf.FakeClient(reply)
    results = evaluate(group, client, sampling_args={"temperature": 0.5})
    assert results["num_turns"] == [3.0, 1.0, 1.0, 1.0]
    assert results.states[1]["own"] is True
    assert results["parse_retries"] == [None, None, 0.0, 0.0]
    assert results["tasks"] == ["env_0", "env_1", "env_2", "env_2"]
    assert {"seed": 1, "temperature": 0.5} in [dict(r.sampling) for r in client.requests]


def test_one_rollout_by_hand_is_routed_and_gets_its_members_system_prompt() -> None:
    group = vf.EnvGroup([single("a"), single("b")], env_names=["x", "y"])
    state = group.rollout(group.dataset[2], vf.FakeClient(reply), "m")  # type: ignore[index]
    assert (state["task"], state["completion"][0]["content"]) == ("y", "b!")
    completion, state = group.rollout(vf.FakeClient(reply), "m", "free text", "", task="y")
    assert (completion[0]["content"], state["task"]) == ("b!", "y")
    (state,) = group.run_group([group.dataset[0]], vf.FakeClient(reply), "m")  # type: ignore[index]
    assert state["reward"] == 1.0


def test_evaluation_rows_fall_back_to_training_rows_member_by_member() -> None:
    with_eval = single("a", eval_dataset=[{"question": "held out", "task": "a"}])
    group = vf.EnvGroup([with_eval, single("b", 3)])
    assert len(group.get_dataset()) == 5
    assert [row["prompt"][-1]["content"] for row in group.get_eval_dataset()] == ["held out", "b 0", "b 1", "b 2"]


def test_settings_reach_the_members_and_closing_closes_them(capsys: pytest.CaptureFixture[str]) -> None:
    class Keeper(vf.SingleTurnEnv):
        @vf.teardown
        def give_back(self) -> None:
            print("given back")

    group = vf.EnvGroup([Keeper(dataset=[{"question": "q"}]), single("a")])
    group.set_max_seq_len(9)
    group.set_score_rollouts(False)
    assert {env.max_seq_len for env in group.envs} == {9}
    assert not any(env.score_rollouts for env in group.envs)
    group.close()
    assert capsys.readouterr().out == "given back\n"


def length(completion: Any) -> float:
    return float(len(completion))


def test_a_group_pickles() -> None:
    group = vf.EnvGroup([vf.SingleTurnEnv(dataset=[{"question": "q"}], rubric=vf.Rubric([length])) for _ in "ab"])
    evaluate(group)
    assert evaluate(pickle.loads(pickle.dumps(group)))["rewards"] == [1.0, 1.0]


def test_one_environment_may_be_a_member_twice_under_two_names() -> None:
    def together(completions: Any) -> list[float]:
        return [1.0] * len(completions)

    env = vf.SingleTurnEnv(dataset=[{"question": "?"}], rubric=vf.Rubric([together]))
    group = vf.EnvGroup([env, env], ["a", "b"])
    results = group.evaluate(client=vf.FakeClient("x"), model="m", rollouts_per_example=2, use_tqdm=False)
    assert results["task"] == ["a", "a", "b", "b"]
    assert results["reward"] == [1.0] * 4


def test_a_name_that_a_member_of_an_inner_group_has_is_refused() -> None:
    env = vf.SingleTurnEnv(dataset=[{"question": "?"}], rubric=vf.Rubric())
    with pytest.raises(ValueError, match="'games/chess' is also the name of a member of a nested group"):
        vf.EnvGroup([vf.EnvGroup([env], ["chess"]), env], ["games", "games/chess"])
