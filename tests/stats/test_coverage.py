"""A 95% interval holds the truth in about 95% of simulated runs; run as a program, this file prints the table.

Each case draws whole runs, examples included: a new set of examples each time, as for a benchmark that stands for more
examples like its own.
"""

import math
from collections.abc import Callable
from random import Random
from statistics import fmean

import pytest

from verifiers import stats

Bounds = tuple[float | None, float | None]
Case = tuple[float, Callable[[Random], Bounds]]


def difficulty(random: Random, mean: float, correlation: float) -> float:
    """An example's chance to be solved: alike for all at correlation 0, almost always 0 or 1 near 1."""
    strength = 1 / correlation - 1
    return random.betavariate(mean * strength, (1 - mean) * strength)


def real_valued(random: Random) -> Bounds:
    values: list[float | None] = []
    ids = []
    for example in range(30):
        mean = random.gauss(0.4, 1)
        for _ in range(4):
            values.append(None if random.random() < 0.2 else mean + random.gauss(0, 1))
            ids.append(example)
    found = stats.mean_interval(values, ids)
    return found.low, found.high


def rarely_large(random: Random) -> Bounds:
    found = stats.mean_interval([0.1 + (random.random() < 0.05) for _ in range(30)])
    return found.low, found.high


def right_or_wrong(share: float, examples: int, repeats: int = 1, correlation: float = 0.5) -> Case:
    ids = [i // repeats for i in range(examples * repeats)]

    def draw(random: Random) -> Bounds:
        chances = [difficulty(random, share, correlation) for _ in range(examples)]
        found = stats.mean_interval([random.random() < chances[i] for i in ids], ids)
        return found.low, found.high

    return share, draw


def pass_at(k: int, share: float, examples: int, repeats: int, correlation: float) -> Case:
    ids = [i // repeats for i in range(examples * repeats)]
    strength = 1 / correlation - 1
    fails_k = math.prod(((1 - share) * strength + i) / (strength + i) for i in range(k))

    def draw(random: Random) -> Bounds:
        chances = [difficulty(random, share, correlation) for _ in range(examples)]
        found = stats.pass_at_k([random.random() < chances[i] for i in ids], ids, k=k)
        return found.low, found.high

    return 1 - fails_k, draw


def difference(share: float, examples: int, repeats: int) -> Case:
    """Run B redraws the difficulty of half the examples, at a share 0.05 lower."""

    def draw(random: Random) -> Bounds:
        a, b = {}, {}
        for example in range(examples):
            before = after = difficulty(random, share, 0.5)
            if random.random() < 0.5:
                after = difficulty(random, share - 0.05, 0.5)
            a[example] = [random.random() < before for _ in range(repeats)]
            b[example] = [random.random() < after for _ in range(repeats)]
        found = stats.compare(a, b, resamples=0)
        return found.low, found.high

    return -0.025, draw


def real_valued_difference(bootstrap: bool) -> Case:
    def draw(random: Random) -> Bounds:
        a = {example: random.gauss(0, 1) for example in range(40)}
        b = {example: score + random.gauss(0.1, 0.5) for example, score in a.items()}
        found = stats.compare(a, b, resamples=200 if bootstrap else 0)
        return found.bootstrap if bootstrap else (found.low, found.high)

    return 0.1, draw


CASES: dict[str, Case] = {
    "real-valued, 30 examples × up to 4, a fifth failed": (0.4, real_valued),
    "right or wrong, mean 0.5, 50 examples × 1": right_or_wrong(0.5, 50),
    "right or wrong, mean 0.95, 30 examples × 1": right_or_wrong(0.95, 30),
    "right or wrong, mean 0.5, 20 examples × 8, strongly alike": right_or_wrong(0.5, 20, 8, 0.8),
    "right or wrong, mean 0.95, 40 examples × 4, strongly alike": right_or_wrong(0.95, 40, 4, 0.8),
    "pass@4, mean 0.3, 30 examples × 8": pass_at(4, 0.3, 30, 8, 0.5),
    "difference, real-valued, 40 examples, paired t": real_valued_difference(bootstrap=False),
    "difference, real-valued, 40 examples, bootstrap of 200": real_valued_difference(bootstrap=True),
    "difference, right or wrong, 100 examples × 1": difference(0.6, 100, 1),
    "difference, right or wrong, 50 examples × 4": difference(0.6, 50, 4),
    "difference, right or wrong, mean 0.97, 50 examples × 16": difference(0.97, 50, 16),
}

CAUTIOUS: dict[str, Case] = {
    "right or wrong, mean 0.95, 20 examples × 16, all about as hard": right_or_wrong(0.95, 20, 16, 0.001),
    "difference, right or wrong, mean 0.97, 50 examples × 1": difference(0.97, 50, 1),
}
WEAK_SPOTS: dict[str, Case] = {
    "difference, right or wrong, mean 0.99, 50 examples × 16": difference(0.99, 50, 16),
    "0.1, and 1.1 for one in twenty, 30 examples × 1": (0.15, rarely_large),
}


def coverage(truth: float, draw: Callable[[Random], Bounds], runs: int = 2000, seed: int = 0) -> float:
    """The share of simulated runs whose interval holds the truth."""
    random = Random(seed)
    ranges = [draw(random) for _ in range(runs)]
    return fmean(low is not None and high is not None and low <= truth <= high for low, high in ranges)


@pytest.mark.parametrize("name", CASES)
def test_a_95_percent_interval_holds_the_truth_in_about_95_percent_of_runs(name: str) -> None:
    assert 0.93 <= coverage(*CASES[name]) <= 0.975


@pytest.mark.parametrize("name", CAUTIOUS)
def test_near_the_edge_an_interval_is_too_wide_rather_than_too_narrow(name: str) -> None:
    assert coverage(*CAUTIOUS[name]) >= 0.94


@pytest.mark.parametrize("name", WEAK_SPOTS)
def test_rare_large_changes_on_few_examples_are_covered_too_little_as_the_docs_warn(name: str) -> None:
    assert 0.75 <= coverage(*WEAK_SPOTS[name]) <= 0.93


def exact_coverage(share: float, n: int) -> float:
    ranges = [stats.mean_interval([1] * right + [0] * (n - right)) for right in range(n + 1)]
    chances = [math.comb(n, right) * share**right * (1 - share) ** (n - right) for right in range(n + 1)]
    return math.fsum(
        chance
        for chance, found in zip(chances, ranges, strict=True)
        if found.low is not None and found.high is not None and found.low <= share <= found.high
    )


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_few_right_or_wrong_scores_are_covered_on_average_and_never_far_below(share: float) -> None:
    each = [exact_coverage(share, n) for n in range(10, 61)]
    assert 0.94 <= fmean(each) <= 0.965
    assert min(each) > 0.89


def test_forgetting_which_rollouts_share_an_example_would_cover_far_too_little() -> None:
    def unclustered(random: Random) -> Bounds:
        chances = [difficulty(random, 0.5, 0.8) for _ in range(20)]
        found = stats.mean_interval([random.random() < chance for chance in chances for _ in range(8)])
        return found.low, found.high

    assert coverage(0.5, unclustered, runs=500) < 0.7


if __name__ == "__main__":
    for name, case in (CASES | CAUTIOUS | WEAK_SPOTS).items():
        print(f"{coverage(*case):.3f}  {name}")
    for share in (0.5, 0.8, 0.95):
        each = [exact_coverage(share, n) for n in range(10, 61)]
        print(
            f"{fmean(each):.3f}  right or wrong, mean {share}, 10 to 60 examples × 1, exactly (least {min(each):.3f})"
        )
