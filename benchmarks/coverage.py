"""Coverage and width of 95% intervals, and error rates of the tests, by simulation.

Every cell calls the library's functions on newly drawn runs, including new examples. `held` is the share of runs whose
interval contains the true value (a run without an interval counts as a miss). `width` is the average width relative to
that of ±1.96 true standard errors.

    python benchmarks/coverage.py                       # all parts, 2,000 runs per cell (fewer if a run is costly)
    python benchmarks/coverage.py skewed clustered --runs 400
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean, stdev

from verifiers import stats
from verifiers.stats.signflip import SignFlips
from verifiers.stats.student import t_tail

Bounds = tuple[float | None, float | None]


@dataclass(frozen=True)
class Cell:
    """One kind of run: its true mean and standard error, and a function that draws a run's interval."""

    row: str
    column: str
    truth: float
    se: float | None
    draw: Callable[[Random], Bounds]

    @property
    def name(self) -> str:
        return f"{self.row}, {self.column}"

    def simulate(self, runs: int, seed: int = 0) -> tuple[float, float | None]:
        """The share of intervals that contain the truth, and their width relative to ±1.96 true standard errors."""
        random = Random(f"{self.name} {seed}")
        held, widths = 0, []
        for _ in range(runs):
            low, high = self.draw(random)
            if low is not None and high is not None:
                held += low <= self.truth + 1e-12 and self.truth - 1e-12 <= high
                widths.append(high - low)
        width = fmean(widths) / (2 * 1.96 * self.se) if self.se and widths else None
        return held / runs, width


def chance(random: Random, share: float, alike: float) -> float:
    """An example's probability to be solved: the same for all at alike = 0, always 0 or 1 at alike = 1."""
    if not alike:
        return share
    strength = 1 / alike - 1
    return random.betavariate(share * strength, (1 - share) * strength)


def interval(found: stats.Interval | stats.PassAtK | stats.Comparison) -> Bounds:
    return found.low, found.high


# --- kinds of runs ------------------------------------------------------------------------------------------------


def single(name: str, n: int, mean: float, sd: float, draw: Callable[[Random], float]) -> Cell:
    def run(random: Random) -> Bounds:
        return interval(stats.mean_interval([draw(random) for _ in range(n)]))

    return Cell(name, f"{n} examples", mean, sd / math.sqrt(n), run)


def beta(a: float, b: float, n: int) -> Cell:
    sd = math.sqrt(a * b / (a + b) ** 2 / (a + b + 1))
    return single(f"beta({a:g}, {b:g})", n, a / (a + b), sd, lambda random: random.betavariate(a, b))


def lognormal(sigma: float, n: int) -> Cell:
    mean = math.exp(sigma**2 / 2)
    sd = mean * math.sqrt(math.exp(sigma**2) - 1)
    return single(f"lognormal(0, {sigma:g})", n, mean, sd, lambda random: random.lognormvariate(0, sigma))


def weighted(weights: tuple[float, ...], shares: tuple[float, ...], n: int) -> Cell:
    """Weighted sums of binary scores."""
    mean = sum(w * p for w, p in zip(weights, shares, strict=True))
    sd = math.sqrt(sum(w * w * p * (1 - p) for w, p in zip(weights, shares, strict=True)))
    terms = " + ".join(f"{w:g} × ({p:g} right)" for w, p in zip(weights, shares, strict=True))
    pairs = list(zip(weights, shares, strict=True))
    return single(terms, n, mean, sd, lambda random: sum(w * (random.random() < p) for w, p in pairs))


def repeated(share: float, n: int, rollouts: int, alike: float) -> Cell:
    ids = [i // rollouts for i in range(n * rollouts)]

    def run(random: Random) -> Bounds:
        chances = [chance(random, share, alike) for _ in range(n)]
        return interval(stats.mean_interval([random.random() < chances[i] for i in ids], ids))

    se = math.sqrt(share * (1 - share) * (alike + (1 - alike) / rollouts) / n)
    return Cell(f"mean {share:g}, {n} examples × {rollouts}", f"alike {alike:g}", share, se, run)


def impossible(part: float, n: int, rollouts: int) -> Cell:
    """A part of the examples is never solved, the others with probability 0.95."""
    ids = [i // rollouts for i in range(n * rollouts)]
    truth = 0.95 * (1 - part)
    se = math.sqrt((part * (1 - part) * 0.95**2 + (1 - part) * 0.95 * 0.05 / rollouts) / n)

    def run(random: Random) -> Bounds:
        chances = [0.0 if random.random() < part else 0.95 for _ in range(n)]
        return interval(stats.mean_interval([random.random() < chances[i] for i in ids], ids))

    return Cell(f"{n} examples × {rollouts}", f"{part:.0%} impossible", truth, se, run)


def real_valued(n: int, rollouts: int, failed: float) -> Cell:
    def run(random: Random) -> Bounds:
        values: list[float | None] = []
        for _ in range(n):
            mean = random.gauss(3, 1)
            values += [None if random.random() < failed else random.gauss(mean, 1) for _ in range(rollouts)]
        return interval(stats.mean_interval(values, [i // rollouts for i in range(n * rollouts)]))

    return Cell("real-valued", f"{n} × {rollouts}, {failed:.0%} failed", 3.0, None, run)


def failing_where_hard(n: int, rollouts: int) -> Cell:
    """12% of the rollouts fail, more often on hard examples."""

    def run(random: Random) -> Bounds:
        values: list[float | None] = []
        for _ in range(n):
            solved = random.betavariate(1.2, 0.8)
            values += [
                None if random.random() < 0.3 * (1 - solved) else float(random.random() < solved)
                for _ in range(rollouts)
            ]
        return interval(stats.mean_interval(values, [i // rollouts for i in range(n * rollouts)]))

    return Cell("mean 0.6, hard examples fail", f"{n} × {rollouts}, 12% failed", 0.6, None, run)


def failing_at_random(share: float, n: int, rollouts: int, alike: float, failed: float) -> Cell:
    """Binary scores of which a part is missing, so that examples have unequal numbers of rollouts."""

    def run(random: Random) -> Bounds:
        chances = [chance(random, share, alike) for _ in range(n)]
        values = [
            None if random.random() < failed else float(random.random() < solved)
            for solved in chances
            for _ in range(rollouts)
        ]
        return interval(stats.mean_interval(values, [i // rollouts for i in range(n * rollouts)]))

    row = f"mean {share:g}, alike {alike:g}, failing at random"
    return Cell(row, f"{n} × {rollouts}, {failed:.0%} failed", share, None, run)


def passing(k: int, share: float, n: int, rollouts: int, is_all: bool) -> Cell:
    ids = [i // rollouts for i in range(n * rollouts)]
    a, b = share, 1 - share  # beta(share, 1 - share): alike is 0.5
    none, every = (math.prod((x + i) / (1 + i) for i in range(k)) for x in (b, a))

    def run(random: Random) -> Bounds:
        chances = [random.betavariate(a, b) for _ in range(n)]
        find = stats.pass_hat_k if is_all else stats.pass_at_k
        return interval(find([random.random() < chances[i] for i in ids], ids, k=k))

    truth = every if is_all else 1 - none
    return Cell(f"pass{'^' if is_all else '@'}{k}, mean {share:g}", f"{n} × {rollouts}", truth, None, run)


def two_runs(random: Random, share: float, n: int, rollouts: int, gap: float) -> tuple[dict, dict]:  # type: ignore[type-arg]
    """Run B draws new difficulties for half the examples, so that its mean is lower by ``gap``."""
    a, b = {}, {}
    for example in range(n):
        before = after = chance(random, share, 0.5)
        if random.random() < 0.5 and gap:
            after = chance(random, share - 2 * gap, 0.5)
        a[example] = [random.random() < before for _ in range(rollouts)]
        b[example] = [random.random() < after for _ in range(rollouts)]
    return a, b


def difference(share: float, n: int, rollouts: int) -> Cell:
    def run(random: Random) -> Bounds:
        return interval(stats.compare(*two_runs(random, share, n, rollouts, 0.025)))

    return Cell(f"difference, mean {share:g}, {n} examples", f"× {rollouts}", -0.025, None, run)


def real_difference(n: int) -> Cell:
    def run(random: Random) -> Bounds:
        a = {i: random.gauss(0, 1) for i in range(n)}
        return interval(stats.compare(a, {i: score + random.gauss(0.1, 0.5) for i, score in a.items()}))

    return Cell(f"difference, real-valued, {n} examples", "× 1", 0.1, 0.5 / math.sqrt(n), run)


def unpaired(share: float, n: int) -> Cell:
    def run(random: Random) -> Bounds:
        a = {f"a{i}": random.random() < share for i in range(n)}
        return interval(stats.compare(a, {f"b{i}": random.random() < share - 0.1 for i in range(n)}, paired=False))

    return Cell(f"two samples, means {share:g} and {share - 0.1:g}, {n} examples", "× 1", -0.1, None, run)


def stopped(share: float, until: float, looks: float = 1.02) -> Cell:
    """A run that is checked repeatedly, and stopped as soon as its interval is narrow enough."""

    def run(random: Random) -> Bounds:
        sequence, next_look = stats.ConfidenceSequence(until=until), 2
        while True:
            sequence.add(float(random.random() < share))
            if sequence.n >= next_look:
                if sequence.is_reached:
                    return sequence.range()
                next_look = max(sequence.n + 1, int(sequence.n * looks))

    return Cell(f"stopped at ±{until:g}", f"mean {share:g}", share, None, run)


# --- the parts ----------------------------------------------------------------------------------------------------


def skewed() -> Iterator[Cell]:
    for n in (5, 10, 20, 50, 100):
        yield beta(0.5, 5, n)
    for n in (5, 20, 100):
        yield beta(9, 0.5, n)
        yield beta(2, 2, n)
    for n in (100, 1000):
        yield lognormal(1.0, n)
        yield lognormal(1.5, n)
    for n in (5, 10, 100):
        yield single("exponential", n, 1.0, 1.0, lambda random: random.expovariate(1))
        yield single("normal", n, 0.0, 1.0, lambda random: random.gauss(0, 1))


def sums() -> Iterator[Cell]:
    for n in (20, 50, 100):
        yield weighted((0.9, 0.1), (0.1, 0.9), n)
        if n > 20:  # with fewer, many runs have no interval, because every score is 0.1
            yield weighted((0.9, 0.1), (0.05, 0.95), n)
        yield weighted((0.8, 0.2), (0.9, 0.5), n)
        yield weighted((1.0, 0.1), (0.5, 0.9), n)
        yield weighted((1.0, 0.5), (0.2, 0.7), n)
        yield weighted((0.6, 0.3, 0.1), (0.3, 0.9, 0.5), n)


def clustered() -> Iterator[Cell]:
    for n in (5, 20, 50):
        for rollouts in (4, 16):
            for alike in (0.0, 0.1, 0.5, 0.9):
                for share in (0.5, 0.95):
                    yield repeated(share, n, rollouts, alike)


def others() -> Iterator[Cell]:
    for share in (0.35, 0.65, 0.9, 0.98):
        for n, rollouts in ((3, 8), (7, 2), (12, 6), (30, 32)):
            for alike in (0.03, 0.2, 0.4, 0.7, 0.97):
                yield repeated(share, n, rollouts, alike)


def held_out() -> Iterator[Cell]:
    """Means, sizes and values of ``alike`` on which no constant was tuned."""
    for share in (0.37, 0.62, 0.88, 0.97):
        for n, rollouts in ((4, 10), (9, 3), (14, 7), (35, 24)):
            for alike in (0.06, 0.25, 0.6):
                yield repeated(share, n, rollouts, alike)


def missed() -> Iterator[Cell]:
    """A limit of any interval: a small sample may contain none of the impossible examples."""
    for n in (5, 10, 20, 50):
        for part in (0.0, 0.1, 0.2, 0.3):
            yield impossible(part, n, 16)


def failing() -> Iterator[Cell]:
    yield real_valued(30, 4, 0.2)
    yield failing_where_hard(500, 8)
    yield failing_at_random(0.9, 6, 8, 0.1, 0.4)
    yield failing_at_random(0.6, 6, 8, 0.4, 0.4)


def passes() -> Iterator[Cell]:
    yield passing(4, 0.3, 30, 8, is_all=False)
    yield passing(4, 0.7, 30, 8, is_all=True)
    yield passing(2, 0.5, 50, 16, is_all=False)


def differences() -> Iterator[Cell]:
    yield real_difference(8)
    yield real_difference(40)
    for rollouts in (1, 4, 16):
        yield difference(0.6, 10, rollouts)
        yield difference(0.6, 50, rollouts)
        yield difference(0.97, 50, rollouts)
    yield unpaired(0.6, 40)
    yield unpaired(0.97, 40)


def sequences() -> Iterator[Cell]:
    for share in (0.5, 0.9, 0.99):
        yield stopped(share, 0.1)
    yield stopped(0.9, 0.05)


PARTS: dict[str, tuple[Callable[[], Iterator[Cell]], float]] = {  # and the share of --runs that it uses
    "skewed": (skewed, 1.0),
    "sums": (sums, 0.5),
    "clustered": (clustered, 0.5),
    "others": (others, 0.25),
    "held-out": (held_out, 0.125),
    "missed": (missed, 0.25),
    "failing": (failing, 0.25),
    "passes": (passes, 0.5),
    "differences": (differences, 0.25),
    "sequences": (sequences, 0.15),
}


def exact_coverage(share: float, n: int) -> float:
    """The exact coverage of the interval of n binary scores, summed over all outcomes."""
    total = 0.0
    for right in range(n + 1):
        found = stats.mean_interval([1] * right + [0] * (n - right))
        if found.low is not None and found.high is not None and found.low <= share <= found.high:
            total += math.comb(n, right) * share**right * (1 - share) ** (n - right)
    return total


def rejections(share: float, n: int, rollouts: int, kept: float, runs: int) -> tuple[float, float, float]:
    """How often two runs are found to differ: by `compare`, by the sign test alone, and by Student's t alone.

    Run B solves each example `kept` times as often as run A.
    """
    random = Random(f"{share} {n} {rollouts} {kept}")
    found, by_signs, by_t = 0, 0, 0
    for _ in range(runs):
        chances = [chance(random, share, 0.3) for _ in range(n)]
        a, b = (
            {i: [random.random() < c * k for _ in range(rollouts)] for i, c in enumerate(chances)} for k in (1, kept)
        )
        found += stats.compare(a, b).verdict in ("better", "worse")
        changes = [fmean(b[i]) - fmean(a[i]) for i in a]
        signs = SignFlips(changes)
        by_signs += 2 * min(signs.p_at_most(0.0), signs.p_at_least(0.0)) < 0.05
        se = stdev(changes) / math.sqrt(n)
        by_t += se > 1e-12 and t_tail(fmean(changes) / se, n - 1) < 0.05
    return found / runs, by_signs / runs, by_t / runs


def print_table(cells: Sequence[Cell], runs: int) -> None:
    """Print one row per kind of run; a cell has the coverage and the relative width."""
    columns = list(dict.fromkeys(cell.column for cell in cells))
    rows: dict[str, dict[str, str]] = {}
    for cell in cells:
        held, width = cell.simulate(runs)
        rows.setdefault(cell.row, {})[cell.column] = f"{held:.3f}" + ("" if width is None else f" ({width:.2f})")
    print(f"\n| {runs:,} runs of each | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for row, found in rows.items():
        print(f"| {row} | {' | '.join(found.get(column, '') for column in columns)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", help=f"of {', '.join((*PARTS, 'exact', 'verdicts'))}; all if none is named")
    parser.add_argument("--runs", type=int, default=2000)
    given = parser.parse_args()
    wanted = given.parts or [*PARTS, "exact", "verdicts"]
    for part, (cells, share) in PARTS.items():
        if part in wanted:
            print_table(list(cells()), max(50, int(given.runs * share)))
    if "exact" in wanted:
        print("\n| examples | least held over shares 0.01 to 0.99 | on average |\n|---|---|---|")
        for n in (5, 10, 20, 50, 100, 200):
            each = [exact_coverage(i / 100, n) for i in range(1, 51)]
            print(f"| {n} | {min(each):.3f} | {fmean(each):.3f} |", flush=True)
    if "verdicts" in wanted:
        runs = max(50, given.runs // 5)
        print("\n| mean of A | examples × rollouts | the same model told apart (by signs; t) | B a fifth worse, seen |")
        print("|---|---|---|---|")
        for share, n, rollouts in (
            (0.5, 3, 16), (0.5, 4, 64), (0.5, 5, 16), (0.5, 8, 2), (0.5, 10, 4), (0.5, 30, 1), (0.5, 30, 4),
            (0.95, 10, 16), (0.95, 50, 1), (0.95, 50, 4), (0.95, 200, 1),
        ):  # fmt: skip
            same, lower = (
                "{:.3f} ({:.3f}; {:.3f})".format(*rejections(share, n, rollouts, kept, runs)) for kept in (1.0, 0.8)
            )
            print(f"| {share:g} | {n} × {rollouts} | {same} | {lower} |", flush=True)


if __name__ == "__main__":
    began = time.time()
    main()
    print(f"\n{time.time() - began:.0f} s")
