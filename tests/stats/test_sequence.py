"""An interval that may be looked at at any time."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers import stats


def sequence_of(scores: list[float], until: float = 0.1, **settings: object) -> stats.ConfidenceSequence:
    sequence = stats.ConfidenceSequence(until=until, **settings)  # type: ignore[arg-type]
    for score in scores:
        sequence.add(score)
    return sequence


@given(st.lists(st.floats(0, 1), max_size=60))
def test_the_interval_lies_within_the_bounds_and_holds_the_mean(scores: list[float]) -> None:
    sequence = sequence_of(scores)
    low, high = sequence.range()
    assert 0 <= low <= high <= 1
    assert sequence.mean is None if not scores else low - 1e-6 <= sequence.mean <= high + 1e-6  # type: ignore[operator]


def test_looking_at_every_moment_it_misses_the_truth_at_any_of_them_in_few_runs() -> None:
    random = Random(0)
    missed = 0
    for _ in range(40):
        sequence = stats.ConfidenceSequence(until=0.15)
        is_missed = False
        for _ in range(60):
            sequence.add(float(random.random() < 0.8))
            low, high = sequence.range()
            is_missed = is_missed or not low <= 0.8 <= high
        missed += is_missed
    assert missed <= 5


def test_an_interval_for_a_fixed_number_would_miss_it_far_more_often_if_looked_at_like_that() -> None:
    random = Random(0)
    missed = 0
    for _ in range(40):
        scores: list[int] = []
        is_missed = False
        for _ in range(25):
            scores += [int(random.random() < 0.8) for _ in range(3)]
            found = stats.mean_interval(scores)
            assert found.low is not None
            assert found.high is not None
            is_missed = is_missed or not found.low <= 0.8 <= found.high
        missed += is_missed
    assert missed > 5


def test_it_takes_about_twice_as_many_examples_as_a_number_fixed_in_advance() -> None:
    random = Random(1)
    sequence = stats.ConfidenceSequence(until=0.1)
    while not sequence.is_reached:
        sequence.add(float(random.random() < 0.6))
    fixed = stats.examples_needed(0.1, mean=0.6)
    assert fixed < sequence.n < 2.6 * fixed


def test_bounds_scale_it_and_a_score_outside_of_them_is_refused() -> None:
    plain, scaled = sequence_of([1, 0, 1, 1] * 10), sequence_of([11, -9, 11, 11] * 10, until=2.0, bounds=(-9, 11))
    assert scaled.range() == pytest.approx(tuple(20 * end - 9 for end in plain.range()))
    with pytest.raises(ValueError, match=r"a score of 1\.5 is outside the bounds 0 to 1"):
        plain.add(1.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"until": 0}, "until=0 must be a positive number"),
        ({"until": 0.1, "bounds": (1, 0)}, "the smaller first"),
        ({"until": 0.1, "level": 95}, "write 0.95 for 95%"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stats.ConfidenceSequence(**settings)  # type: ignore[arg-type]
