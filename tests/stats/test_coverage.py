"""A 95% interval holds the truth in at least 93% of simulated runs, and is not much wider than it must be.

A part of what `benchmarks/coverage.py` simulates, with fewer runs; docs/stats.md has its table.
"""

from random import Random

import pytest

from benchmarks import coverage
from verifiers import stats

RUNS = 400
LEAST = 0.93 - 0.033  # three standard errors of 400 runs below

CELLS = [
    coverage.beta(0.5, 5, 5),
    coverage.beta(0.5, 5, 20),
    coverage.beta(9, 0.5, 5),
    coverage.lognormal(1.5, 100),
    coverage.lognormal(1.0, 100),
    coverage.weighted((0.9, 0.1), (0.1, 0.9), 20),
    coverage.weighted((0.9, 0.1), (0.05, 0.95), 50),
    coverage.weighted((1.0, 0.1), (0.5, 0.9), 50),
    coverage.repeated(0.5, 20, 8, 0.8),
    coverage.repeated(0.95, 20, 16, 0.5),
    coverage.repeated(0.8, 10, 4, 0.1),
    coverage.repeated(0.35, 12, 6, 0.7),
    coverage.repeated(0.9, 30, 32, 0.7),
    coverage.repeated(0.98, 7, 2, 0.4),
    coverage.repeated(0.9, 5, 16, 0.5),
    coverage.repeated(0.5, 5, 16, 0.2),
    coverage.repeated(0.8, 3, 8, 0.6),
    coverage.failing_at_random(0.9, 6, 8, 0.1, 0.4),
    coverage.failing_at_random(0.6, 6, 8, 0.4, 0.4),
    coverage.impossible(0.2, 20, 16),
    coverage.real_valued(30, 4, 0.2),
    coverage.passing(4, 0.3, 30, 8, is_all=False),
    coverage.passing(4, 0.7, 30, 8, is_all=True),
]
COSTLY = [
    coverage.real_difference(8),
    coverage.real_difference(40),
    coverage.difference(0.6, 10, 16),
    coverage.difference(0.97, 50, 1),
    coverage.difference(0.97, 50, 16),
    coverage.unpaired(0.97, 40),
]


def name_of(cell: coverage.Cell) -> str:
    return cell.name


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_a_95_percent_interval_holds_the_truth_in_at_least_93_percent_of_runs(cell: coverage.Cell) -> None:
    assert cell.simulate(RUNS)[0] >= LEAST


@pytest.mark.parametrize("cell", COSTLY, ids=name_of)
def test_so_does_the_interval_of_a_difference(cell: coverage.Cell) -> None:
    assert cell.simulate(RUNS // 5)[0] >= 0.93 - 0.085


@pytest.mark.parametrize("n", [5, 10, 30, 80])
def test_few_right_or_wrong_scores_are_covered_at_every_mean(n: int) -> None:
    each = [coverage.exact_coverage(share, n) for share in (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.42, 0.5)]
    assert min(each) >= 0.93


@pytest.mark.parametrize(
    ("cell", "most"),
    [
        (coverage.repeated(0.95, 20, 16, 0.0), 1.6),
        (coverage.repeated(0.8, 50, 16, 0.0), 1.3),
        (coverage.repeated(0.5, 50, 8, 0.5), 1.2),
        (coverage.beta(2, 2, 100), 1.1),
    ],
    ids=lambda value: name_of(value) if isinstance(value, coverage.Cell) else str(value),
)
def test_an_interval_is_not_much_wider_than_it_must_be(cell: coverage.Cell, most: float) -> None:
    width = cell.simulate(60)[1]
    assert width is not None
    assert 0.95 < width < most


@pytest.mark.parametrize(
    ("share", "n", "rollouts", "alike", "most"),
    [
        (0.95, 5, 16, 0.0, 2.5),
        (0.95, 5, 16, 0.1, 2.5),
        (0.9, 5, 16, 0.0, 2.2),
        (0.9, 3, 8, 0.0, 2.5),
        (0.5, 3, 8, 0.0, 2.1),
        (0.98, 12, 6, 0.03, 3.0),
    ],
)
def test_a_few_examples_whose_wrong_answers_are_spread_evenly_are_not_taken_for_copies(
    share: float, n: int, rollouts: int, alike: float, most: float
) -> None:
    held, width = coverage.repeated(share, n, rollouts, alike).simulate(RUNS // 2)
    assert held >= LEAST
    assert width is not None
    assert width < most


def test_rare_impossible_examples_are_missed_by_few_examples_and_found_by_more() -> None:
    few, more = (coverage.impossible(0.2, n, 16).simulate(RUNS // 2)[0] for n in (5, 20))
    assert few < 0.88  # five hold none in a third of runs: what docs/stats.md warns of
    assert more >= LEAST


def test_forgetting_which_rollouts_share_an_example_would_cover_far_too_little() -> None:
    def unclustered(random: Random) -> coverage.Bounds:
        chances = [coverage.chance(random, 0.5, 0.8) for _ in range(20)]
        found = stats.mean_interval([random.random() < chances[i // 8] for i in range(160)])
        return found.low, found.high

    assert coverage.Cell("unclustered", "20 × 8", 0.5, None, unclustered).simulate(200)[0] < 0.7


def test_a_run_that_is_stopped_as_soon_as_it_is_known_holds_the_truth_all_the_same() -> None:
    assert coverage.stopped(0.7, 0.15, looks=1.05).simulate(150)[0] >= 0.95
