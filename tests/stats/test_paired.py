"""Two runs, example by example."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers import stats

runs = st.dictionaries(st.integers(0, 12), st.lists(st.none() | st.floats(-5, 5), max_size=4), max_size=12)
right_or_wrong = st.dictionaries(st.integers(0, 12), st.lists(st.sampled_from([0, 1]), max_size=4), max_size=12)


def test_real_valued_scores_get_the_paired_t_test() -> None:
    reference = pytest.importorskip("scipy.stats")
    random = Random(1)
    a = {i: random.random() for i in range(30)}
    b = {i: a[i] + random.gauss(0.05, 0.2) for i in range(30)}
    found, expected = stats.compare(a, b), reference.ttest_rel(list(b.values()), list(a.values()))
    interval = expected.confidence_interval(0.95)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.test == "paired t test"


def test_single_right_or_wrong_scores_get_mcnemars_exact_test_and_bonett_and_prices_interval() -> None:
    reference = pytest.importorskip("scipy.stats")
    outcomes = [(1, 1)] * 40 + [(0, 1)] * 9 + [(1, 0)] * 2 + [(0, 0)] * 19
    found = stats.compare({i: a for i, (a, _) in enumerate(outcomes)}, {i: b for i, (_, b) in enumerate(outcomes)})
    assert found.p_value == pytest.approx(reference.binomtest(2, 11).pvalue)
    assert found.test == "McNemar's exact test"
    won, lost = 10 / 72, 3 / 72
    reach = reference.norm.ppf(0.975) * ((won + lost - (won - lost) ** 2) / 72) ** 0.5
    assert (found.low, found.high) == pytest.approx((won - lost - reach, won - lost + reach))
    assert (len(found.won), len(found.lost), len(found.tied), found.examples) == (9, 2, 59, 70)


def test_the_bootstrap_is_scipys_percentile_bootstrap_at_a_level_widened_for_few_examples() -> None:
    reference, numpy = pytest.importorskip("scipy.stats"), pytest.importorskip("numpy")
    random = Random(2)
    changes = [random.expovariate(1) - 0.8 for _ in range(60)]
    found = stats.compare(dict.fromkeys(range(60), 0.0), dict(enumerate(changes)), resamples=20_000)
    level = 1 - 2 * reference.norm.sf((60 / 59) ** 0.5 * reference.t.ppf(0.975, 59))
    other = reference.bootstrap(
        (changes,),
        numpy.mean,
        confidence_level=level,
        method="percentile",
        n_resamples=20_000,
        rng=numpy.random.default_rng(0),
    ).confidence_interval
    assert found.bootstrap == pytest.approx((other.low, other.high), abs=0.01)


def test_repeats_are_averaged_and_failures_left_out() -> None:
    found = stats.compare({"x": [1, None, 0], "y": [1, 1]}, {"x": [1], "y": [0, None]})
    assert (found.mean_a, found.mean_b, found.difference) == (0.75, 0.5, -0.25)
    assert (found.won, found.lost) == (("x",), ("y",))
    assert found.test == "adjusted z test"


def test_examples_without_a_pair_are_listed_and_not_used() -> None:
    a = {"both": 1, "a": 0, "failed in b": 1, "failed in both": None}
    b: dict[str, list[float | None]] = {"b": [0, 1], "both": [0], "failed in b": [None], "failed in both": []}
    found = stats.compare(a, b)
    assert (found.examples, found.lost) == (1, ("both",))
    assert (found.only_a, found.only_b, found.unscored) == (("a", "failed in b"), ("b",), ("failed in both",))
    assert "not compared: 2 only in A, 1 only in B, 1 without a score" in str(found)


def test_the_largest_changes_come_first() -> None:
    a = {"small": 0.5, "large": 0.1, "down": 0.9, "far down": 0.9, "same": 0.1 + 0.2}
    b = {"small": 0.6, "large": 0.9, "down": 0.8, "far down": 0.0, "same": 0.3}
    found = stats.compare(a, b)
    assert (found.won, found.lost, found.tied) == (("large", "small"), ("far down", "down"), ("same",))


def test_two_runs_with_nothing_in_common() -> None:
    found = stats.compare({1: 1}, {"1": 1})
    assert (found.difference, found.low, found.p_value, found.bootstrap) == (None, None, None, (None, None))
    assert str(found) == "no example has a score in both runs (1 only in A, 1 only in B, 0 without a score)"


def test_one_shared_example_shows_nothing() -> None:
    found = stats.compare({1: [0, 0, 0]}, {1: [1, 1, 1]})
    assert (found.difference, found.low, found.high, found.p_value) == (1.0, None, None, 1.0)
    assert str(found).startswith("No difference shown: B - A = +1.000 (no 95% interval)")


@pytest.mark.parametrize("repeats", [1, 4])
def test_two_runs_that_agree_everywhere_may_still_differ_elsewhere(repeats: int) -> None:
    run = {i: [i % 2] * repeats for i in range(50)}
    found = stats.compare(run, run)
    assert (found.difference, found.p_value) == (0.0, 1.0)
    assert found.low is not None
    assert found.high is not None
    assert found.low == pytest.approx(-found.high)
    assert found.high > 0.01
    assert found.bootstrap == (None, None)


def test_a_change_of_the_same_size_everywhere_gets_the_sign_test() -> None:
    found = stats.compare(dict.fromkeys(range(8), 0.1), dict.fromkeys(range(8), 0.3))
    assert (found.low, found.high, found.test) == (None, None, "sign test")
    assert found.p_value == pytest.approx(2 / 2**8)
    assert str(found).startswith("B is better:")


def test_the_verdict_names_the_direction() -> None:
    right, wrong = dict.fromkeys(range(20), 1), dict.fromkeys(range(20), 0)
    assert str(stats.compare(right, wrong)).startswith("B is worse: B - A = -1.000 (95% interval -1.000 to")


def test_a_score_that_is_no_number_is_refused_by_run_example_and_position() -> None:
    with pytest.raises(ValueError, match=r"b\['x'\]\[1\] is nan"):
        stats.compare({"x": 1}, {"x": [0, float("nan")]})


def test_a_bootstrap_of_a_few_is_refused_and_of_none_is_left_out() -> None:
    with pytest.raises(ValueError, match="give 100 or more, or 0"):
        stats.compare({1: 1}, {1: 0}, resamples=10)
    assert stats.compare({1: 1, 2: 0}, {1: 0, 2: 0}, resamples=0).bootstrap == (None, None)


@given(runs | right_or_wrong, runs | right_or_wrong, st.randoms(use_true_random=False))
def test_order_does_not_matter_and_a_seed_repeats(a: dict, b: dict, random: Random) -> None:  # type: ignore[type-arg]
    shuffled = list(a)
    random.shuffle(shuffled)
    one, other = stats.compare(a, b, resamples=100), stats.compare({i: a[i] for i in shuffled}, b, resamples=100)
    assert one == stats.compare(a, b, resamples=100)
    assert one.bootstrap == other.bootstrap
    assert (one.low, one.high, one.p_value) == pytest.approx((other.low, other.high, other.p_value))
    assert {*one.won, *one.lost, *one.tied, *one.only_a, *one.only_b, *one.unscored} == {*a, *b}
    assert str(one)


@given(runs | right_or_wrong, runs | right_or_wrong)
def test_swapping_the_runs_mirrors_the_result(a: dict, b: dict) -> None:  # type: ignore[type-arg]
    one, other = stats.compare(a, b, resamples=0), stats.compare(b, a, resamples=0)
    assert (set(one.won), set(one.lost), set(one.only_a)) == (set(other.lost), set(other.won), set(other.only_b))
    assert one.p_value == pytest.approx(other.p_value)
    if one.low is not None and one.high is not None:
        assert (other.low, other.high) == pytest.approx((-one.high, -one.low))


def test_many_examples_take_fewer_resamples() -> None:
    random = Random(3)
    a, b = ({i: random.random() for i in range(20_000)} for _ in range(2))
    assert stats.compare(a, b, resamples=1000).resamples == 500
