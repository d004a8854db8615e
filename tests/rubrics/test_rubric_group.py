"""A group of rubrics adds their rewards up, each with a weight of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import verifiers as vf
from verifiers.errors import GraderError
from verifiers.rubrics import Rubric, RubricGroup
from verifiers.types import State


def rollout(completion: str = "4") -> State:
    row = {"prompt": "2+2?", "answer": "4", "task": "sums", "info": {}, "example_id": 0}
    return State({"input": row, "completion": completion, "trajectory": []})


def exact(completion, answer):
    return completion == answer


def length(completion):
    return len(completion)


def broken(completion):
    raise ValueError("no")


def best(completions):
    return [completion == max(completions) for completion in completions]


def group(*rubrics: Rubric, **kwargs: Any) -> RubricGroup:
    return RubricGroup(list(rubrics), **kwargs)


def test_rewards_add_up_by_weight_and_metrics_stay_as_they_are() -> None:
    both = group(Rubric([exact]), Rubric([length], weights=[0.5]))
    assert both.score_rollout_sync("", "4", "4", {}) == {"exact": 1.0, "length": 1.0, "reward": 1.5}
    assert both.get_group_weights() == [1.0, 1.0]
    both.set_group_weights([2.0, 0.0])
    assert both.score_rollout_sync("", "4", "4", {}) == {"exact": 1.0, "length": 1.0, "reward": 2.0}


def test_a_metric_of_the_same_name_in_two_rubrics_is_their_sum() -> None:
    assert group(Rubric([exact]), Rubric([exact])).score_rollout_sync("", "4", "4", {})["exact"] == 2.0


def test_weights_that_do_not_match_no_rubrics_and_loose_functions_are_refused() -> None:
    with pytest.raises(ValueError, match="1 rubrics but 2 weights"):
        group(Rubric(), weights=[1.0, 2.0])
    with pytest.raises(ValueError, match="at least one"):
        RubricGroup([])
    with pytest.raises(TypeError, match="put the functions into a Rubric"):
        group(Rubric(), funcs=[exact])


def test_a_rubric_that_is_added_later_counts_fully() -> None:
    both = group(Rubric([exact]), weights=[0.5])
    both.rubrics.append(Rubric([length]))
    assert both.get_group_weights() == [0.5, 1.0]
    assert both.score_rollout_sync("", "4", "4", {})["reward"] == 1.5


def test_functions_and_objects_added_to_a_group_arrive() -> None:
    def bonus(completion, extra):
        return extra

    both = group(Rubric([exact]), Rubric([length]))
    both.add_class_object("extra", 5)
    both.add_reward_func(bonus, weight=2.0)
    both.add_metric(length)
    assert both._get_reward_func_names() == ["exact", "bonus", "length", "length"]
    assert both._get_reward_weights() == [1.0, 2.0, 0.0, 1.0]
    assert both.score_rollout_sync("", "4", "4", {})["reward"] == 12.0


def test_one_rubrics_failure_fails_the_rollout() -> None:
    with pytest.raises(GraderError, match="broken"):
        group(Rubric([exact]), Rubric([broken])).score_rollout_sync("", "4", "4", {})


def test_group_rewards_of_its_rubrics_are_weighted_too_also_when_nested() -> None:
    nested = group(group(Rubric([exact]), Rubric([best])), weights=[10.0])
    states = [rollout("4"), rollout("3")]
    nested.score_group(states)
    assert nested.has_group_rewards
    assert [state["reward"] for state in states] == [20.0, 0.0]
    assert not group(Rubric([exact])).has_group_rewards


def test_a_subclass_of_group_may_score_in_its_own_way() -> None:
    class Capped(RubricGroup):
        async def score_rollout(self, state, score_sem=None):
            await super().score_rollout(state)
            state["reward"] = min(state["reward"], 1.0)

    score = asyncio.run(Capped([Rubric([exact]), Rubric([exact])]).score_alone(rollout()))
    assert score.reward == 1.0


class Writing(Rubric):
    """Writes what it finds into the states, beside what is there, and takes its time."""

    def __init__(self, name: str, reward: float) -> None:
        super().__init__()
        self.name, self.reward = name, reward


class WritingGroups(Writing):
    async def score_group(self, states, score_sem=None):
        for state in states:
            state["reward"] = self.reward
            state["metrics"] = {**(state["metrics"] or {}), self.name: self.reward}
            await asyncio.sleep(0.005)


class WritingRollouts(Writing):
    async def score_rollout(self, state, score_sem=None):
        state["reward"] = self.reward
        state["metrics"] = {**(state["metrics"] or {}), self.name: self.reward}


@pytest.mark.parametrize("kind", [WritingGroups, WritingRollouts])
def test_rubrics_that_write_into_the_states_do_not_read_each_others_scores(kind: type[Writing]) -> None:
    both = group(kind("a", 1.0), Rubric([exact]), kind("b", 10.0), weights=[1.0, 100.0, 1.0])
    states = [rollout(), rollout(), rollout()]
    asyncio.run(both.score_states(states))
    assert [state["reward"] for state in states] == [111.0] * 3
    assert [state["metrics"] for state in states] == [{"a": 1.0, "exact": 1.0, "b": 10.0}] * 3


def test_a_batch_is_scored_like_its_rollouts_one_by_one() -> None:
    both = group(Rubric([exact]), Rubric([length]))
    columns = both.score_rollouts(["", ""], ["4", "44"], ["4", "4"], [{}, {}])
    assert columns == {"exact": [1.0, 0.0], "length": [1.0, 2.0], "reward": [2.0, 2.0]}


def test_it_is_empty_when_all_its_rubrics_are() -> None:
    assert group(Rubric(), Rubric()).is_empty
    assert not group(Rubric(), Rubric([exact])).is_empty


@pytest.mark.parametrize("calls_super", [False, True])
def test_a_group_of_rubrics_may_score_a_group_of_rollouts_itself(calls_super: bool) -> None:
    class Ranked(RubricGroup):
        async def score_group(self, states, score_sem=None):
            if calls_super:
                await super().score_group(states, score_sem)
            for rank, state in enumerate(states):
                state["reward"] = (state["reward"] or 0.0) + rank

    def one(completion: Any) -> float:
        return 1.0

    env = vf.SingleTurnEnv(dataset=[{"question": "?"}], rubric=Ranked([Rubric([one]), Rubric([one])]))
    results = env.evaluate(vf.FakeClient("x"), "m", rollouts_per_example=2, use_tqdm=False)
    assert results["reward"] == ([2.0, 3.0] if calls_super else [0.0, 1.0])
    assert not Ranked([Rubric()]).is_empty
