"""pass@k: unbiased, averaged over the examples that have enough rollouts, and honest at the edges."""

from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers import stats


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_one_example_is_the_share_of_k_subsets_with_a_success(right: list[bool], k: int) -> None:
    found = stats.pass_at_k(right, ["x"] * len(right), k=k)
    subsets = list(combinations(right, k))
    if subsets:
        assert found.mean == pytest.approx(sum(map(any, subsets)) / len(subsets))
    else:
        assert (found.mean, found.left_out) == (None, ("x",))


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_hat_k_is_the_share_of_k_subsets_that_are_all_right(right: list[bool], k: int) -> None:
    found = stats.pass_hat_k(right, ["x"] * len(right), k=k)
    subsets = list(combinations(right, k))
    assert found.name == f"pass^{k}"
    if subsets:
        assert found.mean == pytest.approx(sum(map(all, subsets)) / len(subsets))
    else:
        assert (found.mean, found.left_out) == (None, ("x",))


def test_pass_hat_k_falls_with_k_from_where_pass_at_k_rises() -> None:
    right, ids = [1, 0, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]
    falling = [stats.pass_hat_k(right, ids, k=k).mean for k in (1, 2, 4)]
    assert falling == sorted(falling, reverse=True)  # type: ignore[type-var]
    assert falling[0] == stats.pass_at_k(right, ids, k=1).mean == 0.625
    assert str(stats.pass_hat_k(right, ids, k=2)).startswith("pass^2 0.333 (95% interval ")


def test_pass_at_k_says_how_many_examples_had_enough_rollouts() -> None:
    right = [1] * 4 * 29 + [0] * 71
    ids = [i // 4 for i in range(4 * 29)] + list(range(100, 171))
    found = stats.pass_at_k(right, ids, k=4)
    assert found.counts == "29 of 100 examples, 71 left out with fewer than 4 scored rollouts"


def test_the_estimate_is_unbiased() -> None:
    random = Random(0)
    found = stats.pass_at_k([random.random() < 0.2 for _ in range(60_000)], [i // 6 for i in range(60_000)], k=3)
    assert found.mean == pytest.approx(1 - 0.8**3, abs=0.01)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=40))
def test_more_tries_never_pass_less(pairs: list[tuple[int, bool]]) -> None:
    ids, right = [i for i, _ in pairs] + [0, 1] * 4, [r for _, r in pairs] + [True, False] * 4
    enough = [(i, r) for i, r in zip(ids, right, strict=True) if ids.count(i) >= 3]
    curve = [stats.pass_at_k([r for _, r in enough], [i for i, _ in enough], k=k).mean for k in (1, 2, 3)]
    assert curve == sorted(curve)  # type: ignore[type-var]


def test_pass_at_1_is_the_mean_with_the_same_interval() -> None:
    right, ids = [1, 0, 1, 1, 0, 0, 1, 0], [0, 0, 1, 1, 2, 2, 3, 3]
    one, mean = stats.pass_at_k(right, ids, k=1), stats.mean_interval(right, ids)
    assert (one.mean, one.low, one.high, one.se) == pytest.approx((mean.mean, mean.low, mean.high, mean.se))


def test_an_example_with_fewer_than_k_scores_is_left_out_and_counted() -> None:
    found = stats.pass_at_k([1, 0, None, 1, 0, 0], ["a", "a", "b", "b", "c", "c"], k=2)
    assert (found.mean, found.examples, found.left_out) == (0.5, 2, ("b",))
    assert str(found).endswith("; 2 of 3 examples, 1 left out with fewer than 2 scored rollouts)")


def test_weights_that_add_up_to_one_only_almost_still_reach_the_threshold() -> None:
    assert 0.7 + 0.2 + 0.1 < 1.0
    assert stats.pass_at_k([0.7 + 0.2 + 0.1, 0.9], ["a", "b"], k=1).mean == 0.5
    assert stats.pass_at_k([0.4, 0.6], ["a", "b"], k=1, threshold=0.5).mean == 0.5


def test_all_passing_is_not_certain_to_pass() -> None:
    found = stats.pass_at_k([1] * 40, [i // 4 for i in range(40)], k=4)
    assert found.mean == found.high == 1.0
    assert found.low == pytest.approx(0.712, abs=1e-3)


def test_one_example_has_no_interval_and_none_has_no_mean() -> None:
    one, none = stats.pass_at_k([1, 0], ["a", "a"], k=2), stats.pass_at_k([None], ["a"], k=1)
    assert (one.mean, one.low, one.high, one.se) == (1.0, None, None, None)
    assert str(one) == "pass@2 1.000 (no 95% interval; 1 example)"
    assert (none.mean, none.examples) == (None, 0)
    assert str(none) == "pass@1: 0 of 1 example, 1 left out with fewer than 1 scored rollouts"


@pytest.mark.parametrize("k", [0, -1, 1.5, 2.0, None])
def test_k_is_a_whole_number(k: object) -> None:
    with pytest.raises(ValueError, match="must be a whole number of 1 or more"):
        stats.pass_at_k([1], ["a"], k=k)  # type: ignore[arg-type]
