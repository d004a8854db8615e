"""How many examples: the number is enough, one fewer is not, and repeats help only where repeats vary."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers import stats


@given(st.floats(0.01, 1), st.floats(0.05, 1), st.sampled_from([0.8, 0.95, 0.99]))
def test_the_interval_is_as_narrow_as_asked_and_no_example_is_wasted(
    resolution: float, sd: float, level: float
) -> None:
    reference = pytest.importorskip("scipy.stats")
    n = stats.examples_needed(resolution, sd=sd, level=level)

    def half_width(n: int) -> float:
        return float(reference.t.ppf((1 + level) / 2, max(1.0, n - 2))) * sd / math.sqrt(n)

    assert half_width(n) <= resolution * (1 + 1e-9)
    assert n == 2 or half_width(n - 1) > resolution * (1 - 1e-9)


@pytest.mark.parametrize(("mean", "alike"), [(0.5, 0.3), (0.9, 0.1)])
def test_the_number_of_repeated_examples_gives_the_width_that_was_asked_for(mean: float, alike: float) -> None:
    within = math.sqrt(mean * (1 - mean) * (1 - alike))
    n = stats.examples_needed(0.05, mean=mean, within_sd=within, rollouts_per_example=8)
    random, widths = Random(3), []
    for _ in range(30):
        chances = [random.betavariate(mean * (1 / alike - 1), (1 - mean) * (1 / alike - 1)) for _ in range(n)]
        scores = [random.random() < chance for chance in chances for _ in range(8)]
        widths.append(stats.mean_interval(scores, [i // 8 for i in range(8 * n)]).half_width or 1.0)
    assert sum(widths) / 30 == pytest.approx(0.05, rel=0.1)


def test_thousands_of_rollouts_of_an_example_can_be_planned_for() -> None:
    thousands, hundreds = (
        stats.examples_needed(0.05, mean=0.9, within_sd=0.25, rollouts_per_example=rollouts) for rollouts in (2000, 200)
    )
    assert 0 <= hundreds - thousands <= 2


@pytest.mark.parametrize(("resolution", "sd"), [(0.02, 0.4), (0.05, 0.3), (0.1, 0.3), (0.2, 0.3)])
@pytest.mark.parametrize("power", [0.8, 0.9])
def test_the_paired_t_test_has_the_power_asked_for(resolution: float, sd: float, power: float) -> None:
    reference = pytest.importorskip("scipy.stats")
    n = stats.examples_needed(resolution, difference_sd=sd, power=power)

    def exact_power(n: int) -> float:
        return float(reference.nct.sf(reference.t.ppf(0.975, n - 1), n - 1, resolution * math.sqrt(n) / sd))

    assert exact_power(n - 3) < power <= exact_power(n) + 0.005


def test_a_measured_spread_gives_the_same_number_as_a_stated_one() -> None:
    assert stats.examples_needed(0.5, values=[2, 4] * 50) == stats.examples_needed(0.5, sd=(100 / 99) ** 0.5)
    assert stats.examples_needed(0.05, values=[0, 1] * 50) == pytest.approx(
        stats.examples_needed(0.05, mean=0.5), rel=0.02
    )


@pytest.mark.parametrize(("resolution", "mean"), [(0.1, 0.98), (0.05, 0.9), (0.1, 0.5), (0.05, 0.02)])
def test_the_interval_of_a_mean_near_0_or_1_is_as_narrow_on_average_as_promised(resolution: float, mean: float) -> None:
    random = Random(0)
    n = stats.examples_needed(resolution, mean=mean)
    widths = [stats.mean_interval([random.random() < mean for _ in range(n)]).half_width or 1.0 for _ in range(60)]
    assert 0.75 * resolution < sum(widths) / 60 < 1.05 * resolution


@pytest.mark.parametrize(("mean", "correlation"), [(0.7, 0.3), (0.95, 0.2), (0.93, 0.0)])
def test_the_promised_power_of_single_right_or_wrong_scores_is_what_a_simulation_finds(
    mean: float, correlation: float
) -> None:
    random = Random(1)
    gap = 0.15 if mean < 0.9 else 0.1
    n = stats.examples_needed(gap, mean=mean, correlation=correlation, power=0.8)
    other = mean - gap
    together = mean * other + correlation * math.sqrt(mean * (1 - mean) * other * (1 - other))
    seen = 0
    for _ in range(120):
        a, b = {}, {}
        for i in range(n):
            a[i] = int(random.random() < mean)
            b[i] = int(random.random() < (together / mean if a[i] else (other - together) / (1 - mean)))
        seen += stats.compare(a, b).verdict == "worse"
    assert 0.7 <= seen / 120 <= 0.93


def test_advice_from_two_runs_of_16_rollouts_holds_for_any_number_of_rollouts() -> None:
    random = Random(3)

    def two_runs(n: int, rollouts: int, gap: float) -> list[dict[int, list[int]]]:
        chances = [random.betavariate(2, 2) * 0.8 for _ in range(n)]
        return [
            {i: [int(random.random() < chance + shift) for _ in range(rollouts)] for i, chance in enumerate(chances)}
            for shift in (0.0, gap)
        ]

    a, b = two_runs(150, 16, 0.05)
    needed = {r: stats.examples_to_compare(0.1, a, b, rollouts_per_example=r, power=0.8) for r in (1, 4, 16)}
    assert needed[1] > 3 * needed[4] > 6 * needed[16]
    for rollouts, n in needed.items():
        seen = sum(stats.compare(*two_runs(n, rollouts, 0.1)).verdict == "better" for _ in range(80))
        assert 0.66 <= seen / 80 <= 0.96, (rollouts, n)


def test_two_runs_that_cannot_tell_how_scores_vary_say_so() -> None:
    with pytest.raises(ValueError, match="share 1 scored examples; at least two"):
        stats.examples_to_compare(0.1, {1: 1, 2: None}, {1: 0, 2: 1})
    with pytest.raises(ValueError, match="differ by the same amount on every example"):
        stats.examples_to_compare(0.1, {1: 1, 2: 1}, {1: 0, 2: 0})
    with pytest.raises(ValueError, match="some examples have one rollout"):
        stats.examples_to_compare(0.1, {1: [1, 0], 2: [1]}, {1: [0, 1], 2: [1, 1]})


def test_repeats_are_told_apart_by_example() -> None:
    random = Random(0)
    difficulty = [random.gauss(0, 0.3) for _ in range(4000)]
    values = [mean + random.gauss(0, 0.4) for mean in difficulty for _ in range(4)]
    ids = [i // 4 for i in range(16_000)]
    for rollouts in (1, 2, 8):
        expected = stats.examples_needed(0.05, sd=0.5, within_sd=0.4, rollouts_per_example=rollouts)
        found = stats.examples_needed(0.05, values=values, clusters=ids, rollouts_per_example=rollouts)
        assert found == pytest.approx(expected, rel=0.05)


def test_unequal_repeats_and_failures_do_not_bias_the_spread() -> None:
    random = Random(1)
    values: list[float | None] = []
    ids = []
    for example in range(6000):
        mean = random.gauss(0, 0.3)
        for _ in range(1 + example % 4):
            values.append(None if random.random() < 0.1 else mean + random.gauss(0, 0.4))
            ids.append(example)
    assert stats.examples_needed(0.05, values=values, clusters=ids) == pytest.approx(
        stats.examples_needed(0.05, sd=0.5), rel=0.05
    )


def test_repeats_only_average_out_what_varies_within_an_example() -> None:
    needed = [
        stats.examples_needed(0.05, sd=0.5, within_sd=within, rollouts_per_example=8) for within in (0.0, 0.3, 0.5)
    ]
    assert needed == sorted(needed, reverse=True)
    assert needed[0] == stats.examples_needed(0.05, sd=0.5)


def test_correlation_turns_the_spread_of_scores_into_that_of_differences() -> None:
    assert stats.examples_needed(0.05, sd=0.5, correlation=0.68, power=0.8) == stats.examples_needed(
        0.05, difference_sd=0.4, power=0.8
    )
    assert stats.examples_needed(
        0.05, sd=0.5, correlation=0.6, within_sd=0.2, rollouts_per_example=4
    ) == stats.examples_needed(0.05, difference_sd=(0.5**2 * 0.8 - 2 * 0.04 + 2 * 0.01) ** 0.5)


def test_the_spread_of_a_comparison_plans_the_next_one() -> None:
    found = stats.compare({1: 0.1, 2: 0.5, 3: 0.7}, {1: 0.3, 2: 0.4, 3: 0.9})
    assert found.sd is not None
    assert stats.examples_needed(0.05, difference_sd=found.sd, power=0.8) == 97


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"resolution": 0, "sd": 1}, "resolution=0 must be a positive number"),
        ({"resolution": math.nan, "sd": 1}, "resolution=nan must be a positive number"),
        ({"resolution": 0.1}, "pass exactly one of mean, sd, values and difference_sd"),
        ({"resolution": 0.1, "sd": 1, "values": [1, 0]}, "pass exactly one of mean, sd, values and difference_sd"),
        ({"resolution": 0.1, "sd": 0}, "sd=0 must be a positive number"),
        ({"resolution": 0.1, "difference_sd": -1}, "difference_sd=-1 must be a positive number"),
        ({"resolution": 0.1, "values": [1, 1, None]}, "the 2 scores of 2 examples do not vary; pass sd"),
        ({"resolution": 0.1, "values": [1, 0], "clusters": "aa"}, "the 2 scores of 1 examples do not vary"),
        ({"resolution": 0.1, "values": [1, math.nan]}, r"values\[1\] is nan"),
        ({"resolution": 0.1, "sd": 1, "power": 0.8}, "needs either difference_sd"),
        ({"resolution": 0.1, "sd": 1, "power": 80, "correlation": 0}, "power=80 must be between 0 and 1"),
        ({"resolution": 0.1, "difference_sd": 1, "correlation": 0.5}, "needs either difference_sd"),
        ({"resolution": 0.1, "sd": 1, "correlation": 1}, "must be between -1 and 1"),
        ({"resolution": 0.1, "sd": 0.5, "within_sd": 0.4, "correlation": 0.5}, r"must be between -1 and 0\.36"),
        ({"resolution": 0.1, "sd": 1, "rollouts_per_example": 0}, "rollouts_per_example=0 must be 1 or more"),
        ({"resolution": 0.1, "sd": 1, "rollouts_per_example": 4}, "rollouts_per_example=4 needs within_sd"),
        ({"resolution": 0.1, "sd": 1, "within_sd": 2, "rollouts_per_example": 4}, "is larger than the total"),
        ({"resolution": 0.1, "sd": 1, "level": 95}, "write 0.95 for 95%"),
    ],
)
def test_a_question_that_cannot_be_answered_says_why(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stats.examples_needed(**arguments)  # type: ignore[arg-type]
