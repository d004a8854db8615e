"""Scores of a run → finite numbers grouped by example, without failed rollouts."""

import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from statistics import fmean

TOLERANCE = 1e-9
"""Two scores closer than this count as equal: 0.7 + 0.2 + 0.1 is a full score, although it is less than 1.0."""

LEAST_STD = 1e-6
"""If the standard deviation of a group's scores is below this, they count as equal: the rest is rounding."""

_LARGEST = 1e100  # beyond it, sums of squares overflow
_FEW = 8
_ROUNDING = 1e-14  # the relative error of sums of a few floats


def by_example(values: Iterable[float | None], example_ids: Iterable[Hashable]) -> dict[Hashable, list[float]]:
    """Group scores by example, in order of first appearance; a failed rollout (None) adds no score.

    >>> by_example([1, None, 0, 0.5], ["a", "a", "b", "a"])
    {'a': [1.0, 0.5], 'b': [0.0]}
    """
    scores, ids = list(values), list(example_ids)
    if len(scores) != len(ids):
        raise ValueError(f"{len(scores)} values but {len(ids)} example ids; give one id for each value")
    groups: dict[Hashable, list[float]] = {}
    for position, (score, example) in enumerate(zip(scores, ids, strict=True)):
        group = groups.setdefault(example, [])
        if score is not None:
            group.append(finite(score, "values", position))
    return groups


def example_means(groups: Iterable[Sequence[float]]) -> list[float]:
    """The mean of each example that has a score, so that examples have the same weight even if some rollouts failed.

    >>> example_means([[1.0, 0.0], [], [1.0]])
    [0.5, 1.0]
    """
    return [group[0] if len(group) == 1 else fmean(group) for group in groups if group]


def centered(scores: Sequence[float]) -> list[float]:
    """Scores minus their mean; 0 if they differ by no more than rounding.

    >>> centered([1.0, 0.0]), centered([0.1 + 0.2, 0.3])
    ([0.5, -0.5], [0.0, 0.0])
    """
    if not scores:
        return []
    mean = math.fsum(scores) / len(scores)
    std = math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / len(scores))
    return [score - mean for score in scores] if std >= LEAST_STD else [0.0] * len(scores)


def are_equal(scores: Collection[float]) -> bool:
    """Whether scores differ by no more than rounding.

    >>> are_equal([0.7 + 0.2 + 0.1, 1.0]), are_equal([1e12, 1e12 + 1])
    (True, False)
    """
    low, high = min(scores), max(scores)
    return high - low <= _ROUNDING * max(abs(low), abs(high))


def have_few_values(scores: Sequence[float]) -> bool:
    """Whether scores take few values, like weighted sums of right or wrong: then a rare value may not have occurred.

    >>> have_few_values([0, 1, 1, 1]), have_few_values([0.12, 0.71, 0.33, 0.25])
    (True, False)
    """
    least, most = min(scores), max(scores)
    if least == most or {0.0, 1.0}.issuperset(scores):
        return True
    values = len({round((score - least) / (most - least), 9) for score in scores})
    return 2 * values <= len(scores) or values <= min(len(scores) - 1, _FEW)


def snapped(score: float) -> float:
    """The score, rounded to 0 or 1 if it differs from it only by rounding.

    >>> snapped(0.7 + 0.2 + 0.1), snapped(0.5)
    (1.0, 0.5)
    """
    nearest = 0.0 if score < 0.5 else 1.0
    return nearest if abs(score - nearest) <= TOLERANCE else score


def with_failures(
    values: Iterable[float | None],
    example_ids: Iterable[Hashable],
    bounds: tuple[float, float] | None = None,
) -> tuple[float, float] | None:
    """The smallest and the largest mean if the failed rollouts (None) had been scored; None without any score.

    Failed rollouts get the smallest possible score, then the largest: `bounds`, else 0 and 1 if all scores are between
    them, else the smallest and largest score seen.

    >>> with_failures([1, 1, None, 0], ["a", "a", "b", "b"])
    (0.5, 0.75)
    """
    scores, ids = list(values), list(example_ids)
    known = [score for group in by_example(scores, ids).values() for score in group]
    if not known:
        return None
    least, most = min(known), max(known)
    if bounds is not None:
        least, most = min(bounds[0], least), max(bounds[1], most)
    elif least >= 0 and most <= 1:
        least, most = 0.0, 1.0
    ends = []
    for filled in (least, most):
        groups = by_example([filled if score is None else score for score in scores], ids)
        ends.append(fmean(example_means(groups.values())))
    return ends[0], ends[1]


def finite(score: object, name: str, position: object) -> float:
    """The score as a float; NaN, infinity or any other value is a ValueError that names the position.

    >>> finite(float("nan"), "values", 3)
    Traceback (most recent call last):
    ValueError: values[3] is nan; a score must be a finite number, or None for a failed rollout
    """
    try:
        number = float("nan") if isinstance(score, (str, bytes)) else float(score)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not -_LARGEST <= number <= _LARGEST:
        raise ValueError(
            f"{name}[{position}] is {score!r}; a score must be a finite number, or None for a failed rollout"
        )
    return number


def check_share(value: float, name: str) -> None:
    """Raise ValueError unless a level or a power is between 0 and 1.

    >>> check_share(95, "level")
    Traceback (most recent call last):
    ValueError: level=95 must be between 0 and 1; write 0.95 for 95%
    """
    if not 0 < value < 1:
        raise ValueError(f"{name}={value!r} must be between 0 and 1; write 0.95 for 95%")
