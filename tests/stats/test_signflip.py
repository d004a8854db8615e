"""The sign-flip test by all subsets, and by a draw of them."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.stats.signflip import SignFlips


@given(st.lists(st.integers(-8, 8), min_size=1, max_size=9), st.integers(-4, 4))
def test_its_p_value_is_the_share_of_flips_with_a_larger_sum_and_three_quarters_of_those_with_the_same(
    changes: list[int], about: int
) -> None:
    shifted = [change - about for change in changes]
    flips = [sum(sign * value for sign, value in zip(signs, shifted, strict=True)) for signs in flipped(len(changes))]
    ends = (sum(total > sum(shifted) for total in flips), sum(total == sum(shifted) for total in flips))
    expected = (ends[0] + 0.75 * ends[1]) / len(flips)
    assert SignFlips(changes).p_at_most(about) == pytest.approx(min(1.0, expected))


@given(st.lists(st.integers(-8, 8), min_size=1, max_size=9), st.sampled_from([0.025, 0.1, 0.25]))
def test_its_interval_has_the_values_that_are_not_rejected(changes: list[int], tail: float) -> None:
    test = SignFlips(changes)
    low, high = test.low(tail), test.high(tail)
    if low is None or high is None:
        assert test.p_at_most(-100) >= tail
        return
    assert test.p_at_most(low + 0.001) >= tail > test.p_at_most(low - 0.001)
    assert test.p_at_least(high - 0.001) >= tail > test.p_at_least(high + 0.001)


def test_a_draw_of_subsets_comes_close_to_all_of_them_and_repeats() -> None:
    changes = [0.1 * i - 0.5 for i in range(17)]  # 131,072 subsets
    drawn, again, other = SignFlips(changes), SignFlips(changes), SignFlips(changes, seed=1)
    assert (drawn.low(0.025), drawn.p_at_most(0.0)) == (again.low(0.025), again.p_at_most(0.0))
    assert drawn.p_at_most(0.0) != other.p_at_most(0.0)
    flips = [sum(s * c for s, c in zip(signs, changes, strict=True)) for signs in flipped(17)]
    whole = sum(changes)
    expected = sum(0.75 * (total > whole - 1e-9) + 0.25 * (total > whole + 1e-9) for total in flips) / len(flips)
    assert drawn.p_at_most(0.0) == pytest.approx(expected, abs=0.006)


def flipped(n: int) -> list[tuple[int, ...]]:
    return list(product((1, -1), repeat=n))
