"""Scores as a run gives them → finite numbers grouped by example, failures left out."""

from collections.abc import Hashable, Iterable

TOLERANCE = 1e-9
"""Two scores closer than this are the same score: 0.7 + 0.2 + 0.1 is a full mark, though it is less than 1.0."""

_LARGEST = 1e100  # beyond it, sums of squares overflow


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


def finite(score: object, name: str, position: object) -> float:
    """The score as a float; NaN, infinity and what is no number are refused, by position.

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
    """Refuse a level or a power that is not a share between 0 and 1.

    >>> check_share(95, "level")
    Traceback (most recent call last):
    ValueError: level=95 must lie between 0 and 1; write 0.95 for 95%
    """
    if not 0 < value < 1:
        raise ValueError(f"{name}={value!r} must lie between 0 and 1; write 0.95 for 95%")
