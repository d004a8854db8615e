"""A mean's interval: what counts, what does not, and where it must not pretend to know."""

import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from verifiers import stats

scores = st.floats(-100, 100)
rollouts = st.lists(st.tuples(st.integers(0, 8), scores), min_size=2, max_size=40)
whole_rollouts = st.lists(st.tuples(st.integers(0, 8), st.integers(-100, 100)), min_size=2, max_size=40)
right_or_wrong = st.lists(st.tuples(st.integers(0, 8), st.sampled_from([0.0, 1.0])), min_size=2, max_size=40)
either = st.one_of(rollouts, right_or_wrong)


def interval(pairs: list[tuple[int, float]], level: float = 0.95) -> stats.Interval:
    return stats.mean_interval([score for _, score in pairs], [example for example, _ in pairs], level)


def same(one: stats.Interval, other: stats.Interval) -> bool:
    def close(x: float | None, y: float | None) -> bool:
        return x is y if x is None or y is None else math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-9)

    return all(close(getattr(one, name), getattr(other, name)) for name in ("mean", "low", "high", "se"))


def test_scores_that_are_not_skewed_get_the_t_interval_with_a_degree_of_freedom_less() -> None:
    reference = pytest.importorskip("scipy.stats")
    values = [1, 3, 5, 7, 9, 11]
    low, high = reference.t.interval(0.9, 4, 6, reference.sem(values))
    found = stats.mean_interval(values, level=0.9)
    assert (found.mean, found.se) == pytest.approx((6, reference.sem(values)))
    assert found.low == pytest.approx(low, rel=0.01)
    assert found.half_width == pytest.approx((high - low) / 2, rel=0.01)
    assert (found.n, found.clusters, found.level) == (6, 6, 0.9)


def test_a_long_tail_stretches_the_interval_to_its_side_and_never_shrinks_it_on_the_other() -> None:
    reference = pytest.importorskip("scipy.stats")
    values = [2.0, 2.1, 2.2, 2.3, 2.4, 2.6, 2.9, 3.7, 5.1, 9.0]
    found, plain = stats.mean_interval(values), reference.t.interval(0.95, 8, sum(values) / 10, reference.sem(values))
    assert found.low == pytest.approx(plain[0])
    assert found.high > plain[1] + 0.5
    mirrored = stats.mean_interval([-value for value in values])
    assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low))


def test_equal_repeats_give_the_t_interval_of_the_examples_means() -> None:
    values = [0.1, 0.3, 0.9, 0.6, 0.4, 0.5]
    found = stats.mean_interval(values, ["a", "a", "b", "b", "c", "c"])
    of_means = stats.mean_interval([0.2, 0.75, 0.45])
    assert same(found, of_means)
    assert (found.n, found.clusters) == (6, 3)


def test_examples_weigh_the_same_however_many_of_their_rollouts_failed() -> None:
    values = [0.0, None, None, None, 1.0, 1.0, 1.0, 1.0]
    assert stats.mean_interval(values, "aaaabbbb").mean == 0.5


def test_failures_on_hard_examples_do_not_bend_the_mean() -> None:
    random = Random(0)
    means, held = [], []
    for _ in range(60):
        values: list[float | None] = []
        for _ in range(500):
            chance = random.betavariate(1.2, 0.8)
            fails = 0.24 * (1 - chance) / 0.4 / 2
            values += [None if random.random() < fails else float(random.random() < chance) for _ in range(8)]
        found = stats.mean_interval(values, [i // 8 for i in range(4000)])
        assert found.mean is not None
        assert found.low is not None
        assert found.high is not None
        means.append(found.mean)
        held.append(found.low <= 0.6 <= found.high)
    assert sum(means) / 60 == pytest.approx(0.6, abs=0.005)
    assert sum(held) >= 54


def test_failed_rollouts_leave_the_mean_between_a_worst_and_a_best_case() -> None:
    assert stats.with_failures([1, None, 0, 0], "aabb") == (0.25, 0.5)
    assert stats.with_failures([3.0, None, 5.0, 4.0], "aabb") == (3.75, 4.25)  # no 0 and 1: the least and most seen
    assert stats.with_failures([0.5, None], "ab", bounds=(-1, 1.1)) == pytest.approx((-0.25, 0.8))
    assert stats.with_failures([1, 0], "ab") == (0.5, 0.5)
    assert stats.with_failures([None], "a") is None


@pytest.mark.parametrize(("right", "n"), [(0, 10), (3, 10), (10, 10), (95, 100), (1, 2)])
def test_single_right_or_wrong_scores_get_a_binomial_interval_that_counts_three_quarters_of_what_was_seen(
    right: int, n: int
) -> None:
    reference = pytest.importorskip("scipy.stats").binom
    found = stats.mean_interval([1] * right + [0] * (n - right))
    assert found.low is not None
    assert found.high is not None
    if right:
        chance = 0.75 * reference.sf(right - 1, n, found.low) + 0.25 * reference.sf(right, n, found.low)
        assert chance == pytest.approx(0.025)
    if right < n:
        chance = 0.75 * reference.cdf(right, n, found.high) + 0.25 * reference.cdf(right - 1, n, found.high)
        assert chance == pytest.approx(0.025)
    assert (found.low == 0, found.high == 1) == (right == 0, right == n)


def test_full_marks_that_miss_1_by_rounding_are_full_marks() -> None:
    rounded, whole = stats.mean_interval([0.7 + 0.2 + 0.1] * 20), stats.mean_interval([1.0] * 20)
    assert rounded == whole
    mixed = stats.mean_interval([0.7 + 0.2 + 0.1, 1.0, 0.1 + 0.2 + 0.7] * 7)
    assert mixed.high == 1.0
    assert mixed.low is not None


def test_large_scores_that_differ_a_little_have_the_interval_of_what_differs() -> None:
    large = stats.mean_interval([1e12, 1e12 + 1] * 20)
    small = stats.mean_interval([0, 1] * 20)
    assert [end and end - 1e12 for end in (large.low, large.high)] == pytest.approx([small.low, small.high], abs=1e-3)


def test_weak_clustering_of_many_rollouts_does_not_make_the_interval_three_times_too_wide() -> None:
    random = Random(2)
    widths = []
    for _ in range(20):
        values = [random.random() < 0.95 for _ in range(20 * 16)]
        widths.append(stats.mean_interval(values, [i // 16 for i in range(320)]).half_width or 0.0)
    perfect = 1.96 * math.sqrt(0.95 * 0.05 / 320)
    assert perfect < sum(widths) / 20 < 2.2 * perfect


def test_wrong_answers_of_one_example_say_less_than_as_many_of_all() -> None:
    ids = [i // 16 for i in range(80)]
    spread = stats.mean_interval([i % 16 > 0 for i in range(80)], ids)
    together = stats.mean_interval([i >= 5 for i in range(80)], ids)
    assert spread.mean == together.mean == 75 / 80
    assert spread.half_width is not None
    assert together.half_width is not None
    assert spread.half_width < 0.6 * together.half_width


def test_a_single_wrong_answer_does_not_show_that_repeats_are_independent() -> None:
    ids = [i // 16 for i in range(80)]
    found, copies = stats.mean_interval([i > 0 for i in range(80)], ids), stats.mean_interval([1] * 5)
    independent = stats.mean_interval([i > 0 for i in range(80)])
    assert found.low is not None
    assert copies.low is not None
    assert independent.low is not None
    assert copies.low < found.low < independent.low - 0.1


def test_rights_and_wrongs_on_another_scale_have_the_same_interval_there() -> None:
    ids, right = [i // 8 for i in range(40)], [i % 7 > 0 for i in range(40)]
    plain = stats.mean_interval(right, ids)
    scaled = stats.mean_interval([10.0 * one - 5 for one in right], ids, bounds=(-5, 5))
    assert plain.low is not None
    assert plain.high is not None
    assert (scaled.low, scaled.high) == pytest.approx((10 * plain.low - 5, 10 * plain.high - 5))


def test_bounds_that_are_known_count_and_a_score_outside_of_them_is_refused() -> None:
    assert stats.mean_interval([1.1] * 20).low is None
    known = stats.mean_interval([1.1] * 20, bounds=(0, 1.1))
    assert known.high == pytest.approx(1.1)
    assert known.low == pytest.approx(1.1 * (stats.mean_interval([1] * 20).low or 0.0))
    with pytest.raises(ValueError, match=r"a score of 2.0 is outside bounds=\(0, 1\)"):
        stats.mean_interval([1, 2], bounds=(0, 1))
    with pytest.raises(ValueError, match="the smaller first"):
        stats.mean_interval([1, 2], bounds=(3, 0))


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


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=20))
def test_copies_of_rollouts_do_not_shrink_the_interval(scores: list[float]) -> None:
    assert same(interval([*enumerate(scores)]), interval([*enumerate(scores)] * 16))


@example([(0, 0.0), (0, 0.0), (0, 0.0625), (1, 0.0)])  # both lower ends are less than can be told apart from 0
@given(either)
def test_the_interval_holds_the_mean_and_a_higher_level_is_wider(pairs: list[tuple[int, float]]) -> None:
    narrow, wide = interval(pairs, 0.5), interval(pairs, 0.99)
    if narrow.low is None or narrow.high is None or wide.low is None or wide.high is None or narrow.mean is None:
        assert narrow.low is narrow.high is wide.low is wide.high is None
    else:
        assert wide.low <= narrow.low <= narrow.mean <= narrow.high <= wide.high


@given(whole_rollouts, st.floats(-10, 10), st.floats(0.1, 10))
def test_shifting_and_scaling_scores_shifts_and_scales_the_interval(
    pairs: list[tuple[int, float]], shift: float, scale: float
) -> None:
    wide = [*pairs, (9, -1000.3), (10, 2007.7)]  # so that none of them lies between 0 and 1, nor is taken to
    plain, moved = interval(wide), interval([(example, scale * score + shift) for example, score in wide])
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
