"""How rewards become advantages: each estimator against its formula written out, and what holds for all of them."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.trainers.advantages import ESTIMATORS, SCALES, Estimator, flat_groups
from verifiers.trainers.config import GRPOConfig

REWARDS = st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=1, max_size=16)
GROUP = [0.0, 1.0, 0.25, 0.75, 0.5]
BATCH = [0.0, 1.0, 0.25, 3.0, 2.0, 2.0, 5.0]
GROUPS = [0, 0, 0, 1, 1, 2, 2]


def of_group(rewards: Any, name: str = "dr_grpo") -> list[Any]:
    return Estimator(name)(rewards, [0] * len(rewards))


# --- formulas -----------------------------------------------------------------------------------------------------


def test_dr_grpo_is_the_reward_less_the_mean_of_its_group():
    mean = statistics.mean(GROUP)
    assert of_group(GROUP, "dr_grpo") == pytest.approx([reward - mean for reward in GROUP])


def test_grpo_divides_by_the_deviation_of_the_group():
    mean, std = statistics.mean(GROUP), statistics.pstdev(GROUP)
    assert of_group(GROUP, "grpo") == pytest.approx([(reward - mean) / std for reward in GROUP])


def test_grpo_batch_divides_by_the_deviation_of_all_rewards_of_the_batch():
    std = statistics.pstdev(BATCH)
    means = [statistics.mean(r for r, g in zip(BATCH, GROUPS, strict=True) if g == group) for group in GROUPS]
    wanted = [(reward - mean) / std for reward, mean in zip(BATCH, means, strict=True)]
    assert Estimator("grpo_batch")(BATCH, GROUPS) == pytest.approx(wanted)


def test_rloo_compares_each_reward_with_the_mean_of_the_others():
    wanted = [reward - statistics.mean(GROUP[:i] + GROUP[i + 1 :]) for i, reward in enumerate(GROUP)]
    assert of_group(GROUP, "rloo") == pytest.approx(wanted)
    assert of_group([1.0], "rloo") == [0.0]


def test_reinforce_plus_plus_normalises_over_the_batch_whatever_the_groups():
    mean, std = statistics.mean(BATCH), statistics.pstdev(BATCH)
    found = Estimator("reinforce_plus_plus")(BATCH, GROUPS)
    assert found == pytest.approx([(reward - mean) / std for reward in BATCH])


def test_the_baseline_of_reinforce_plus_plus_is_the_group_and_its_scale_the_batch():
    less = [
        reward - statistics.mean(r for r, g in zip(BATCH, GROUPS, strict=True) if g == group)
        for reward, group in zip(BATCH, GROUPS, strict=True)
    ]
    wanted = [(one - statistics.mean(less)) / statistics.pstdev(less) for one in less]
    assert Estimator("reinforce_plus_plus_baseline")(BATCH, GROUPS) == pytest.approx(wanted)


def scored(**metrics: float) -> dict[str, Any]:
    return {"metrics": metrics, "trajectory": []}


def test_gdpo_normalises_each_reward_function_in_its_group_before_weighing_it():
    right, length = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0], [100.0, 300.0, 200.0, 50.0, 90.0, 70.0]
    groups, weights = [0, 0, 0, 1, 1, 1], {"right": 1.0, "length": 0.01, "unweighted": 0.0}
    states = [scored(right=a, length=b, unweighted=9.0 * a) for a, b in zip(right, length, strict=True)]
    total = [0.0] * 6
    for values, weight in ((right, 1.0), (length, 0.01)):
        for first in (0, 3):
            part = values[first : first + 3]
            for i in range(3):
                total[first + i] += weight * (part[i] - statistics.mean(part)) / statistics.pstdev(part)
    wanted = [(one - statistics.mean(total)) / statistics.pstdev(total) for one in total]
    found = Estimator("gdpo")([0.0] * 6, groups, states, weights=weights)
    assert found == pytest.approx(wanted)


def test_per_turn_compares_each_turn_with_the_same_turn_of_the_group():
    turns = [[1.0, 0.0, 4.0], [0.0, None], [0.5, 1.0]]
    states = [{"trajectory": [{"reward": reward} for reward in one]} for one in turns]
    found = Estimator("per_turn")([9.0, 2.0, 9.0], [0, 0, 0], states)
    second = [0.0, 2.0, 1.0]  # the second rollout's own reward stands in for that of its turn
    assert [pytest.approx(one) for one in found] == [[0.5, second[0] - 1.0, 0.0], [-0.5, 1.0], [0.0, 0.0]]


def test_per_turn_compares_rollouts_that_were_saved_without_their_turns_as_a_whole():
    states = [{"info": {}}, {"trajectory": []}, {"trajectory": [{"reward": None}]}]
    assert Estimator("per_turn")([1.0, 0.0, 0.5], [0, 0, 0], states) == [0.5, -0.5, [0.0]]


def test_the_names_of_scale_rewards_are_names_of_estimators():
    assert {SCALES[name] for name in SCALES} <= ESTIMATORS.keys()
    named = [
        GRPOConfig(scale_rewards=scale).estimator for scale in (None, "none", False, True, "group", "std", "batch")
    ]
    assert named == ["dr_grpo", "dr_grpo", "dr_grpo", "grpo", "grpo", "grpo", "grpo_batch"]
    assert GRPOConfig(loss_type="dapo").estimator == "grpo"
    assert GRPOConfig(advantage="rloo").estimator == "rloo"


# --- all of them --------------------------------------------------------------------------------------------------


@given(REWARDS, st.sampled_from(["dr_grpo", "grpo", "rloo", "grpo_batch", "reinforce_plus_plus_baseline"]))
def test_advantages_of_a_group_sum_to_zero(rewards, name):
    found = [one for one in of_group(rewards, name) if one is not None]
    assert abs(math.fsum(found)) < 1e-6 * max(1.0, *map(abs, found), 1.0) * max(len(found), 1)


@given(REWARDS, st.sampled_from(["dr_grpo", "grpo", "rloo", "grpo_batch", "reinforce_plus_plus"]))
def test_failed_rollouts_neither_get_an_advantage_nor_change_that_of_others(rewards, name):
    found = of_group(rewards, name)
    assert [one is None for one in found] == [reward is None for reward in rewards]
    alone = of_group([reward for reward in rewards if reward is not None], name)
    assert [one for one in found if one is not None] == alone


@given(REWARDS, st.floats(-5, 5))
def test_the_same_bonus_for_everyone_changes_nothing(rewards, bonus):
    moved = of_group([None if reward is None else reward + bonus for reward in rewards])
    for before, after in zip(of_group(rewards), moved, strict=True):
        assert (before is None) == (after is None)
        assert before is None or math.isclose(before, after, abs_tol=3e-6)


@given(REWARDS)
def test_scaled_advantages_have_a_deviation_of_one_or_are_all_zero(rewards):
    found = [one for one in of_group(rewards, "grpo") if one is not None]
    spread = math.fsum(one * one for one in found) / max(len(found), 1)
    assert math.isclose(spread, 1.0, rel_tol=1e-6) or not any(found)


@pytest.mark.parametrize("name", ["grpo", "rloo", "grpo_batch", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_equal_rewards_that_differ_by_rounding_teach_nothing(name):
    assert of_group([0.1 + 0.2, 0.3], name) == [0.0, 0.0]


def test_groups_of_a_batch_do_not_mix():
    assert Estimator("dr_grpo")([1.0, 5.0, 0.0, 7.0], [0, 1, 0, 1]) == [0.5, -1.0, -0.5, 1.0]
    assert flat_groups([1.0, 5.0, 1.0, 7.0], [0, 1, 0, 1]) == {0}


def test_what_is_normalised_over_the_batch_is_normalised_over_that_of_all_processes():
    def gather(values: list[Any]) -> list[Any]:
        return [*values, 10.0, 20.0]

    found = Estimator("reinforce_plus_plus")([0.0, 5.0], [0, 0], gather=gather)
    everyone = [0.0, 5.0, 10.0, 20.0]
    mean, std = statistics.mean(everyone), statistics.pstdev(everyone)
    assert found == pytest.approx([-mean / std, (5.0 - mean) / std])


# --- one of one's own ---------------------------------------------------------------------------------------------


def test_an_estimator_is_called_with_each_group_or_with_the_batch_if_it_asks_for_groups():
    calls: list[Any] = []

    def by_group(rewards):
        calls.append(list(rewards))
        return [0.0] * len(rewards)

    def by_batch(rewards, groups, states):
        calls.append((list(rewards), list(groups), [state["answer"] for state in states]))
        return [0.0] * len(rewards)

    Estimator(by_group)([1.0, None, 2.0, 3.0], [7, 7, 8, 7])
    assert calls == [[1.0, 3.0], [2.0]]
    Estimator(by_batch)([1.0, None, 2.0], [7, 7, 8], [{"answer": "a"}, None, {"answer": "b"}])
    assert calls[2:] == [([1.0, 2.0], [7, 8], ["a", "b"])]


def test_rewards_may_have_any_name_and_values_any_kind_of_number():
    import numpy as np

    assert Estimator(lambda r: np.array(r) * 2)([1.0, 2.0], [0, 0]) == [2.0, 4.0]
    assert Estimator(lambda r: [None, [1, 2.5]])([1.0, 2.0], [0, 0]) == [None, [1.0, 2.5]]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda rewards: rewards[:1], "got 1 values for 2 rollouts of a group; expected one for each"),
        (
            lambda rewards: [math.nan, 0.0],
            "got nan for a rollout with reward 1.0; an advantage must be a finite number",
        ),
        (lambda rewards: [[0.0, math.inf], 0.0], "an advantage must be a finite number"),
        (lambda rewards: 3.0, "3.0 is not a list with one entry for each of 2 rollouts of a group"),
        (lambda rewards: dict(enumerate(rewards)), r"\{0: .* is not a list with one entry for each"),
        (lambda rewards: "10", "'10' is not a list with one entry for each"),
        (lambda rewards: ["high", "low"], "is not a list with one entry for each"),
        (lambda rewards, groups: [0.0], "got 1 values for 2 rollouts of a batch"),
        (
            lambda rewards, states: [0.0, 0.0],
            "needs the states of rollouts, but this batch has completions without a state",
        ),
    ],
)
def test_an_estimator_that_gives_something_else_is_told_in_one_sentence(function, said):
    with pytest.raises(ValueError, match=said):
        Estimator(function)([1.0, 2.0], [0, 0])


def takes_nothing():
    return [0.0]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda rewards, lengths: rewards, "has an unknown parameter 'lengths'; it can have rewards, states, groups"),
        (takes_nothing, "has no parameters; it can have rewards"),
        (
            lambda rewards, gather: rewards,
            "has a parameter gather but none named groups: it would be called once for each",
        ),
        (3, "advantage must be a function or a name, not a int"),
    ],
)
def test_an_estimator_that_cannot_be_called_is_refused_when_it_is_given(function, said):
    with pytest.raises(TypeError, match=said):
        Estimator(function)


def test_a_name_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match="unknown advantage 'ppo'; use one of grpo, dr_grpo"):
        Estimator("ppo")
