"""How rewards of a group become advantages."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from verifiers.trainers.advantages import batch_advantages, flat_groups, group_advantages

REWARDS = st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=1, max_size=16)


@given(REWARDS, st.sampled_from(["none", "std"]))
def test_advantages_of_a_group_sum_to_zero(rewards, scale):
    found = [one for one in group_advantages(rewards, scale) if one is not None]
    assert abs(math.fsum(found)) < 1e-6 * max(1.0, *map(abs, found), 1.0) * max(len(found), 1)


@given(REWARDS, st.sampled_from(["none", "std"]))
def test_failed_rollouts_neither_get_an_advantage_nor_change_that_of_others(rewards, scale):
    found = group_advantages(rewards, scale)
    assert [one is None for one in found] == [reward is None for reward in rewards]
    alone = group_advantages([reward for reward in rewards if reward is not None], scale)
    assert [one for one in found if one is not None] == alone


@given(REWARDS, st.floats(-5, 5))
def test_the_same_bonus_for_everyone_changes_nothing(rewards, bonus):
    moved = group_advantages([None if reward is None else reward + bonus for reward in rewards])
    for before, after in zip(group_advantages(rewards), moved, strict=True):
        assert (before is None) == (after is None)
        assert before is None or math.isclose(before, after, abs_tol=1e-6)


@given(REWARDS)
def test_scaled_advantages_have_a_deviation_of_one_or_are_all_zero(rewards):
    found = [one for one in group_advantages(rewards, "std") if one is not None]
    spread = math.fsum(one * one for one in found) / max(len(found), 1)
    assert math.isclose(spread, 1.0, rel_tol=1e-6) or not any(found)


def test_equal_rewards_that_differ_by_rounding_teach_nothing():
    assert group_advantages([0.1 + 0.2, 0.3], "std") == [0.0, 0.0]


def test_groups_of_a_batch_do_not_mix():
    assert batch_advantages([1.0, 5.0, 0.0, 7.0], [0, 1, 0, 1]) == [0.5, -1.0, -0.5, 1.0]
    assert flat_groups([1.0, 5.0, 1.0, 7.0], [0, 1, 0, 1]) == {0}
