"""A wanted resolution and the spread of scores → how many examples to run."""

import math
from collections.abc import Hashable, Iterable
from itertools import chain
from statistics import fmean, variance

from verifiers.stats.scores import by_example, check_share
from verifiers.stats.student import t_quantile, z_quantile


def examples_needed(
    resolution: float,
    *,
    sd: float | None = None,
    values: Iterable[float | None] | None = None,
    clusters: Iterable[Hashable] | None = None,
    difference_sd: float | None = None,
    correlation: float | None = None,
    within_sd: float | None = None,
    rollouts_per_example: int = 1,
    level: float = 0.95,
    power: float | None = None,
) -> int:
    """The number of examples for an interval of ± `resolution`, or to detect a difference that large between two runs.

    The spread of single scores is `sd`, or is measured on `values` (with `clusters`, repeats of an example are told
    apart). It becomes the spread of a paired difference with `correlation`, that of two runs' scores on one example;
    `difference_sd`, such as `compare(a, b).sd`, gives that directly. `power` asks for the chance to detect the
    difference, not only for the width of its interval. `within_sd` is the spread of repeats of the same example.

    >>> examples_needed(0.03, sd=0.5)
    1070
    >>> examples_needed(0.03, sd=0.5, correlation=0.6, power=0.8)
    1747
    """
    check_share(level, "level")
    if not 0 < resolution < math.inf:
        raise ValueError(f"resolution={resolution!r} must be a positive number, such as 0.03 for ±0.03")
    if rollouts_per_example < 1:
        raise ValueError(f"rollouts_per_example={rollouts_per_example!r} must be 1 or more")
    if [sd, values, difference_sd].count(None) != 2:
        raise ValueError("give one of sd, values and difference_sd: how much scores vary decides how many it takes")
    total, within = _measured(values, clusters) if values is not None else _given(sd, difference_sd)
    within = within if within_sd is None else within_sd**2
    if correlation is not None or difference_sd is not None or power is not None:
        total, within = _of_difference(total, within, correlation, difference_sd)
    if rollouts_per_example > 1:
        total = _averaged(total, within, rollouts_per_example)
    return _smallest_n(math.sqrt(total) / resolution, level, power)


def _given(sd: float | None, difference_sd: float | None) -> tuple[float, None]:
    spread = sd if sd is not None else difference_sd
    if spread is None or not 0 < spread < math.inf:
        name = "sd" if sd is not None else "difference_sd"
        raise ValueError(
            f"{name}={spread!r} must be a positive number; 0/1 scores with mean p have (p * (1 - p)) ** 0.5"
        )
    return spread**2, None


def _measured(values: Iterable[float | None], clusters: Iterable[Hashable] | None) -> tuple[float, float | None]:
    """The variance of one score, and the part of it within an example (None where no example repeats)."""
    scores = list(values)
    ids = range(len(scores)) if clusters is None else clusters
    groups = [group for group in by_example(scores, ids).values() if group]
    n, examples = sum(map(len, groups)), len(groups)
    if examples < 2 or len(set(chain.from_iterable(groups))) == 1:
        raise ValueError(f"the {n} scores of {examples} examples show no spread; give sd instead of values")
    if n == examples:
        return variance([group[0] for group in groups]), None
    mean = fmean(chain.from_iterable(groups))
    within = math.fsum((score - fmean(group)) ** 2 for group in groups for score in group) / (n - examples)
    between = math.fsum(len(group) * (fmean(group) - mean) ** 2 for group in groups) / (examples - 1)
    size = (n - sum(len(group) ** 2 for group in groups) / n) / (examples - 1)
    return within + max(0.0, (between - within) / size), within


def _of_difference(
    total: float, within: float | None, correlation: float | None, difference_sd: float | None
) -> tuple[float, float | None]:
    """The same two variances for the difference between two runs; repeats vary in both of them."""
    if (correlation is None) == (difference_sd is None):
        raise ValueError(
            "a difference between two runs needs either difference_sd, such as compare(a, b).sd, or correlation with "
            "sd or values (0 where nothing is known)"
        )
    if correlation is None:
        return total, None if within is None else 2 * within
    most = 1.0 if within is None else 1 - within / total
    if not -1 <= correlation < 1 or correlation > most + 1e-9:
        raise ValueError(f"correlation={correlation!r} must lie between -1 and {most:.4g}, where repeats alone differ")
    return 2 * total * (1 - correlation), None if within is None else 2 * within


def _averaged(total: float, within: float | None, rollouts: int) -> float:
    """The variance of an example's mean over its rollouts; only the part within an example averages out."""
    if within is None:
        raise ValueError(
            f"rollouts_per_example={rollouts} needs within_sd, or values with clusters in which examples repeat: "
            "repeats only average out what varies within an example"
        )
    if within > total * (1 + 1e-9):
        raise ValueError(f"the variance within an example ({within:.4g}) is more than all of it ({total:.4g})")
    return total - within + within / rollouts


def _smallest_n(ratio: float, level: float, power: float | None) -> int:
    """The smallest n at which the t quantiles of level and power, times sd / resolution, fit under √n."""
    if power is not None:
        check_share(power, "power")
    shares = [(1 + level) / 2] if power is None else [(1 + level) / 2, power]
    n = max(2, math.ceil((ratio * max(0.0, sum(map(z_quantile, shares)))) ** 2))
    while ratio * sum(t_quantile(share, n - 1) for share in shares) > math.sqrt(n):
        n += 1
    return n
