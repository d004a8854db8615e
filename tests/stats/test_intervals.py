"""A mean's interval: what counts, what does not, and where it must not pretend to know."""

import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers import stats

scores = st.floats(-100, 100)
rollouts = st.lists(st.tuples(st.integers(0, 8), scores), min_size=2, max_size=40)
right_or_wrong = st.lists(st.tuples(st.integers(0, 8), st.sampled_from([0.0, 1.0])), min_size=2, max_size=40)
either = st.one_of(rollouts, right_or_wrong)


def interval(pairs: list[tuple[int, float]], level: float = 0.95) -> stats.Interval:
    return stats.mean_interval([score for _, score in pairs], [example for example, _ in pairs], level)


def same(one: stats.Interval, other: stats.Interval) -> bool:
    def close(x: float | None, y: float | None) -> bool:
        return x is y if x is None or y is None else math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-9)

    return all(close(getattr(one, name), getattr(other, name)) for name in ("mean", "low", "high", "se"))


def test_without_repeats_it_is_the_t_interval() -> None:
    reference = pytest.importorskip("scipy.stats")
    values = [0.1, 0.5, 0.7, 0.2, 0.95, 0.3]
    mean, se = sum(values) / 6, reference.sem(values)
    low, high = reference.t.interval(0.9, 5, mean, se)
    found = stats.mean_interval(values, level=0.9)
    assert (found.mean, found.low, found.high, found.se) == pytest.approx((mean, low, high, se))
    assert (found.n, found.clusters, found.level) == (6, 6, 0.9)
    assert found.half_width == pytest.approx((high - low) / 2)


def test_equal_repeats_give_the_t_interval_of_the_examples_means() -> None:
    values = [0.1, 0.3, 0.9, 0.6, 0.4, 0.5]
    found = stats.mean_interval(values, ["a", "a", "b", "b", "c", "c"])
    of_means = stats.mean_interval([0.2, 0.75, 0.45])
    assert same(found, of_means)
    assert (found.n, found.clusters) == (6, 3)


def test_unequal_repeats_follow_the_cluster_robust_formula() -> None:
    found = stats.mean_interval([0.2, 0.4, 0.9, 0.5, 0.6, 0.7], ["a", "a", "b", "c", "c", "c"])
    mean = 3.3 / 6
    errors = [0.6 - 2 * mean, 0.9 - mean, 1.8 - 3 * mean]
    assert found.se == pytest.approx(math.sqrt(3 / 2 * sum(error**2 for error in errors)) / 6)


@pytest.mark.parametrize(("right", "n"), [(0, 10), (3, 10), (10, 10), (95, 100), (1, 2)])
def test_single_right_or_wrong_scores_get_wilsons_interval(right: int, n: int) -> None:
    reference = pytest.importorskip("scipy.stats")
    expected = reference.binomtest(right, n).proportion_ci(method="wilson")
    found = stats.mean_interval([1] * right + [0] * (n - right))
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_all_right_is_not_known_to_be_perfect_and_repeats_do_not_make_it_so() -> None:
    once = stats.mean_interval([True] * 20)
    often = stats.mean_interval([1.0] * 320, [i // 16 for i in range(320)])
    assert once.low is not None
    assert once.low < 0.9
    assert (often.low, often.high) == pytest.approx((once.low, once.high))


def test_repeats_that_vary_freely_within_examples_do_narrow_the_interval() -> None:
    random = Random(0)
    once = stats.mean_interval([random.random() < 0.5 for _ in range(100)])
    often = stats.mean_interval([random.random() < 0.5 for _ in range(800)], [i // 8 for i in range(800)])
    assert once.half_width is not None
    assert often.half_width is not None
    assert often.half_width < 0.5 * once.half_width


def test_a_failed_rollout_is_no_zero() -> None:
    assert stats.mean_interval([None, 0.5, 0.75, None], "aabb") == stats.mean_interval([0.5, 0.75], "ab")


@pytest.mark.parametrize("values", [[], [None, None]])
def test_nothing_scored_has_no_mean(values: list[None]) -> None:
    found = stats.mean_interval(values)
    assert found == stats.Interval(None, None, None, 0, 0, 0.95, None)
    assert str(found) == "no scored rollouts"


def test_one_example_has_a_mean_but_no_interval() -> None:
    found = stats.mean_interval([0.0, 1.0, 0.0, 1.0], ["a"] * 4)
    assert found == stats.Interval(0.5, None, None, 4, 1, 0.95, None)
    assert found.half_width is None
    assert str(found) == "0.500 (no 95% interval; 4 rollouts of 1 example)"


def test_scores_that_never_vary_claim_no_width_of_zero() -> None:
    found = stats.mean_interval([0.1] * 30, [i // 3 for i in range(30)])
    assert (found.low, found.high) == (None, None)
    assert found.mean == pytest.approx(0.1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), "1", 1e300, 10**400])
def test_what_is_no_finite_number_is_refused_by_position(bad: object) -> None:
    with pytest.raises(ValueError, match=r"values\[2\] is .*finite number, or None for a failed rollout"):
        stats.mean_interval([0, None, bad])  # type: ignore[list-item]


@pytest.mark.parametrize("level", [0, 1, 95, -0.5, float("nan")])
def test_a_level_is_a_share(level: float) -> None:
    with pytest.raises(ValueError, match=r"level=.* write 0\.95 for 95%"):
        stats.mean_interval([0, 1], level=level)


def test_every_value_has_an_example() -> None:
    with pytest.raises(ValueError, match="3 values but 2 example ids"):
        stats.mean_interval([0, 1, 1], ["a", "b"])


@given(either, st.randoms(use_true_random=False))
def test_the_order_of_rollouts_does_not_matter(pairs: list[tuple[int, float]], random: Random) -> None:
    shuffled = pairs.copy()
    random.shuffle(shuffled)
    assert same(interval(pairs), interval(shuffled))


@given(either)
def test_copies_of_rollouts_do_not_shrink_the_interval(pairs: list[tuple[int, float]]) -> None:
    assert same(interval(pairs), interval(pairs * 3))


@given(either)
def test_the_interval_holds_the_mean_and_a_higher_level_is_wider(pairs: list[tuple[int, float]]) -> None:
    narrow, wide = interval(pairs, 0.5), interval(pairs, 0.99)
    if narrow.low is None or narrow.high is None or wide.low is None or wide.high is None or narrow.mean is None:
        assert narrow.low is narrow.high is wide.low is wide.high is None
    else:
        assert wide.low <= narrow.low <= narrow.mean <= narrow.high <= wide.high


@given(rollouts, st.floats(-10, 10), st.floats(0.1, 10))
def test_shifting_and_scaling_scores_shifts_and_scales_the_interval(
    pairs: list[tuple[int, float]], shift: float, scale: float
) -> None:
    plain = interval([*pairs, (9, 0.3), (10, 7.7)])
    moved = interval([(example, scale * score + shift) for example, score in [*pairs, (9, 0.3), (10, 7.7)]])
    for name in ("mean", "low", "high"):
        assert getattr(moved, name) == pytest.approx(scale * getattr(plain, name) + shift, rel=1e-6, abs=1e-6)


@given(right_or_wrong)
def test_swapping_right_and_wrong_mirrors_the_interval(pairs: list[tuple[int, float]]) -> None:
    plain, mirrored = interval(pairs), interval([(example, 1 - score) for example, score in pairs])
    if plain.low is not None and plain.high is not None:
        assert (mirrored.low, mirrored.high) == pytest.approx((1 - plain.high, 1 - plain.low))
        assert 0 <= plain.low <= plain.high <= 1
        assert plain.low < plain.high


@pytest.mark.parametrize("make", [iter, tuple, lambda values: pytest.importorskip("numpy").array(values)])
def test_scores_come_in_any_iterable(make: Callable[[list[float]], object]) -> None:
    found = stats.mean_interval(make([0.0, 1.0, 1.0]), make([1, 1, 2]))  # type: ignore[arg-type]
    assert found == stats.mean_interval([0.0, 1.0, 1.0], [1, 1, 2])
    assert type(found.mean) is float
