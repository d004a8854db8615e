"""Two runs, example by example."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers import stats
from verifiers.stats.student import sign_test

runs = st.dictionaries(st.integers(0, 12), st.lists(st.none() | st.floats(-5, 5), max_size=4), max_size=12)
right_or_wrong = st.dictionaries(st.integers(0, 12), st.lists(st.sampled_from([0, 1]), max_size=4), max_size=12)


def test_single_right_or_wrong_scores_get_mcnemars_test_with_three_quarters_of_what_was_seen() -> None:
    reference = pytest.importorskip("scipy.stats")
    outcomes = [(1, 1)] * 40 + [(0, 1)] * 9 + [(1, 0)] * 2 + [(0, 0)] * 19
    found = stats.compare({i: a for i, (a, _) in enumerate(outcomes)}, {i: b for i, (_, b) in enumerate(outcomes)})
    assert found.p_value == pytest.approx(reference.binomtest(2, 11).pvalue - 0.5 * reference.binom.pmf(2, 11, 0.5))
    assert found.test == "sign-flip test"
    assert (len(found.won), len(found.lost), len(found.tied), found.examples) == (9, 2, 59, 70)


def test_many_differences_are_tested_by_a_draw_of_signs_that_agrees_with_the_t_test() -> None:
    reference = pytest.importorskip("scipy.stats")
    random = Random(1)
    a = {i: random.random() for i in range(60)}
    b = {i: a[i] + random.gauss(0.05, 0.2) for i in range(60)}
    found, expected = stats.compare(a, b), reference.ttest_rel(list(b.values()), list(a.values()))
    interval = expected.confidence_interval(0.95)
    assert found.p_value == pytest.approx(expected.pvalue, abs=0.01)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=0.01)
    assert found.test == "sign-flip test, 10,000 draws"


def test_few_examples_with_many_rollouts_get_the_t_test() -> None:
    reference = pytest.importorskip("scipy.stats")
    a = {i: [1] * (4 + i) + [0] * (12 - i) for i in range(5)}
    b = {i: [1] * (10 + i % 3) + [0] * (6 - i % 3) for i in range(5)}
    found = stats.compare(a, b)
    changes = [sum(b[i]) / 16 - sum(a[i]) / 16 for i in range(5)]
    assert found.p_value == pytest.approx(reference.ttest_1samp(changes, 0).pvalue)
    assert (found.test, found.verdict) == ("paired t test", "better")


@pytest.mark.parametrize(("won", "p_value", "verdict"), [(5, 0.046875, "better"), (4, 0.09375, "no difference shown")])
def test_all_won_and_none_lost_has_an_interval_that_says_what_the_verdict_says(
    won: int, p_value: float, verdict: str
) -> None:
    a = {i: 0 if i < won else 1 for i in range(20)}
    found = stats.compare(a, dict.fromkeys(range(20), 1))
    assert (found.verdict, found.p_value) == (verdict, p_value)
    assert found.low is not None
    assert (found.low > 0) == (verdict == "better")


def disagrees(found: stats.Comparison) -> bool:
    if found.low is None or found.high is None:
        return found.verdict in ("better", "worse")
    is_outside = not found.low <= 0 <= found.high
    return is_outside != (found.verdict in ("better", "worse"))


@given(runs | right_or_wrong, runs | right_or_wrong, st.sampled_from([0.6, 0.9, 0.95]))
def test_a_verdict_never_contradicts_its_interval(a: dict, b: dict, level: float) -> None:  # type: ignore[type-arg]
    assert not disagrees(stats.compare(a, b, level=level))


def null_rejections(examples: int, rollouts: int, share: float, runs: int = 250) -> float:
    """How often two runs of the same model are told apart."""
    random = Random(examples * 100 + rollouts)
    rejected = 0
    for _ in range(runs):
        chances = [random.betavariate(8 * share, 8 * (1 - share)) for _ in range(examples)]
        a, b = ({i: [random.random() < c for _ in range(rollouts)] for i, c in enumerate(chances)} for _ in "ab")
        found = stats.compare(a, b)
        assert not disagrees(found)
        rejected += found.verdict in ("better", "worse")
    return rejected / runs


@pytest.mark.parametrize(
    ("examples", "rollouts", "share"),
    [(3, 16, 0.5), (4, 64, 0.7), (5, 16, 0.5), (8, 2, 0.5), (12, 1, 0.5), (12, 4, 0.9)],
)
def test_two_runs_of_one_model_are_told_apart_in_no_more_than_one_of_twenty(
    examples: int, rollouts: int, share: float
) -> None:
    assert null_rejections(examples, rollouts, share) <= 0.08  # 0.05, and three standard errors of 250 runs


def test_near_the_ceiling_a_loss_is_seen_as_often_as_signs_can_show_it() -> None:
    random = Random(4)
    seen = by_signs = 0
    for _ in range(120):
        a = {i: int(random.random() < 0.99) for i in range(100)}
        b = {i: int(random.random() < 0.92) for i in range(100)}
        found = stats.compare(a, b)
        seen += found.verdict == "worse"
        by_signs += sign_test(len(found.won), len(found.lost)) < 0.05
    assert seen >= by_signs > 40


def test_repeats_are_averaged_and_failures_left_out_and_mentioned() -> None:
    found = stats.compare({"x": [1, None, 0], "y": [1, 1]}, {"x": [1], "y": [0, None]})
    assert (found.mean_a, found.mean_b, found.difference) == (0.75, 0.5, -0.25)
    assert (found.won, found.lost) == (("x",), ("y",))
    assert "failed rollouts, left out: 1 in A, 1 in B" in str(found)


# --- several metrics, margins, different questions ----------------------------------------------------------------


def changed(won: int, lost: int, tied: int) -> tuple[dict[int, int], dict[int, int]]:
    pairs = [(0, 1)] * won + [(1, 0)] * lost + [(1, 1)] * tied
    return {i: a for i, (a, _) in enumerate(pairs)}, {i: b for i, (_, b) in enumerate(pairs)}


def test_several_metrics_share_the_chance_of_a_false_alarm_by_holms_correction() -> None:
    columns = {"reward": changed(12, 0, 20), "style": changed(9, 1, 22), "brief": changed(8, 1, 23)}
    a, b = ({name: pair[side] for name, pair in columns.items()} for side in (0, 1))
    found = stats.compare_metrics(a, b)
    raw = {name: stats.compare(*pair).p_value or 1.0 for name, pair in columns.items()}
    assert raw["brief"] < 0.05
    assert [one.adjusted_p for one in found.values()] == pytest.approx(
        [3 * raw["reward"], 2 * raw["style"], max(2 * raw["style"], raw["brief"])]
    )
    assert [one.verdict for one in found.values()] == ["better", "better", "better"]
    others = {"fourth": changed(8, 1, 24), "fifth": changed(8, 1, 25)}
    a |= {name: pair[0] for name, pair in others.items()}
    b |= {name: pair[1] for name, pair in others.items()}
    more = stats.compare_metrics(a, b)
    assert [one.verdict for one in more.values()] == ["better", *["no difference shown"] * 4]
    assert not any(disagrees(one) for one in (*found.values(), *more.values()))
    assert [round(one.level, 4) for one in more.values()] == [0.99, *[0.9875] * 4]


def test_a_metric_that_is_the_reward_again_costs_nothing() -> None:
    a, b = changed(6, 0, 20)
    found = stats.compare_metrics({"reward": a, "exact": a}, {"reward": b, "exact": b})
    assert [(one.verdict, one.adjusted_p) for one in found.values()] == [("better", 0.0234375)] * 2


@pytest.mark.parametrize("name", ["num_turns", "total_tool_calls", "parse_retries", "failed_cells", "num_anything"])
def test_counts_of_what_happened_get_no_verdict(name: str) -> None:
    a, b = changed(30, 0, 0)
    found = stats.compare_metrics({"reward": a, name: a}, {"reward": b, name: b})
    assert (found[name].verdict, found[name].p_value, found["reward"].metrics) == (None, None, 1)
    assert str(found[name]).startswith("No verdict: B - A = +1.000")


def test_with_a_margin_a_run_may_be_shown_to_be_not_worse() -> None:
    a, b = changed(10, 11, 979)
    plain, within, tight = (stats.compare(a, b, margin=margin) for margin in (None, 0.02, 0.005))
    assert [plain.verdict, within.verdict, tight.verdict] == ["no difference shown", "not worse", "no difference shown"]
    assert within.low is not None
    assert within.low > -0.02
    assert (plain.low, plain.high) == (within.low, within.high)
    assert str(within).startswith("B is not worse by 0.02 or more: B - A = -0.001")
    assert str(tight).startswith("Not shown that B is not worse by 0.005 or more:")
    assert stats.compare(*changed(40, 2, 100), margin=0.02).verdict == "better"
    assert stats.compare(*changed(2, 40, 100), margin=0.02).verdict == "worse"
    with pytest.raises(ValueError, match=r"margin=-0\.1 must be a finite number of 0 or more"):
        stats.compare(a, b, margin=-0.1)


def test_different_questions_are_compared_as_two_samples_on_request() -> None:
    reference = pytest.importorskip("scipy.stats")
    random = Random(5)
    a = {f"a{i}": random.gauss(3, 1) for i in range(30)}
    b = {f"b{i}": random.gauss(4, 2) for i in range(40)}
    assert stats.compare(a, b).verdict is None
    found = stats.compare(a, b, paired=False)
    expected = reference.ttest_ind(list(b.values()), list(a.values()), equal_var=False)
    assert (found.p_value, found.test) == (pytest.approx(expected.pvalue), "Welch's t test")
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert "compared as two samples of examples" in str(found)


def test_two_samples_of_all_right_answers_may_still_differ() -> None:
    found = stats.compare(dict.fromkeys("abcdefgh", 1), dict.fromkeys("ijklmnop", 1), paired=False)
    assert (found.difference, found.verdict) == (0.0, "no difference shown")
    assert found.high is not None
    assert found.high > 0.1
    alone = stats.compare({"a": 1}, {"b": 0}, paired=False)
    assert (alone.low, alone.verdict) == (None, "no difference shown")


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
    assert (found.difference, found.low, found.p_value, found.verdict) == (None, None, None, None)
    assert str(found) == "no example has a score in both runs (1 only in A, 1 only in B, 0 without a score)"


def test_one_shared_example_shows_nothing() -> None:
    found = stats.compare({1: [0, 0, 0]}, {1: [1, 1, 1]})
    assert (found.difference, found.low, found.high, found.p_value) == (1.0, None, None, 0.75)
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


def test_a_change_of_the_same_size_everywhere_is_shown_by_its_signs() -> None:
    found = stats.compare(dict.fromkeys(range(8), 0.1), dict.fromkeys(range(8), 0.3))
    assert (found.p_value, found.test) == (1.5 / 2**8, "sign-flip test")
    assert str(found).startswith("B is better:")
    assert found.low == pytest.approx(0.2)


def test_the_verdict_names_the_direction() -> None:
    right, wrong = dict.fromkeys(range(20), 1), dict.fromkeys(range(20), 0)
    assert str(stats.compare(right, wrong)).startswith("B is worse: B - A = -1.000 (95% interval -1.000 to")


def test_a_score_that_is_no_number_is_refused_by_run_example_and_position() -> None:
    with pytest.raises(ValueError, match=r"b\['x'\]\[1\] is nan"):
        stats.compare({"x": 1}, {"x": [0, float("nan")]})


@given(runs | right_or_wrong, runs | right_or_wrong, st.randoms(use_true_random=False))
def test_order_does_not_matter_and_a_seed_repeats(a: dict, b: dict, random: Random) -> None:  # type: ignore[type-arg]
    shuffled = list(a)
    random.shuffle(shuffled)
    one, other = stats.compare(a, b), stats.compare({i: a[i] for i in shuffled}, b)
    assert one == stats.compare(a, b)
    assert (one.low, one.high, one.p_value) == pytest.approx((other.low, other.high, other.p_value))
    assert {*one.won, *one.lost, *one.tied, *one.only_a, *one.only_b, *one.unscored} == {*a, *b}
    assert str(one)


@given(runs | right_or_wrong, runs | right_or_wrong)
def test_swapping_the_runs_mirrors_the_result(a: dict, b: dict) -> None:  # type: ignore[type-arg]
    one, other = stats.compare(a, b), stats.compare(b, a)
    assert (set(one.won), set(one.lost), set(one.only_a)) == (set(other.lost), set(other.won), set(other.only_b))
    assert one.p_value == pytest.approx(other.p_value)
    if one.low is not None and one.high is not None:
        assert (other.low, other.high) == pytest.approx((-one.high, -one.low))


def test_many_examples_take_fewer_draws_and_very_many_the_t_test() -> None:
    random = Random(3)
    a, b = ({i: random.random() for i in range(2000)} for _ in range(2))
    assert stats.compare(a, b).test == "sign-flip test, 4,000 draws"
    a, b = ({i: random.random() for i in range(20_000)} for _ in range(2))
    assert stats.compare(a, b).test == "paired t test"
