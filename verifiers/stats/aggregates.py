"""All rows of a run → one aggregate metric, with a bootstrap interval from resampling the examples."""

import math
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.escapes import contained
from verifiers.stats import labels
from verifiers.stats.scores import check_share

Row = Mapping[str, Any]
Function = Callable[[Sequence[Row]], float | None]

RESAMPLES = 1000
MOST_MISSING = 0.1  # of the resamples; if more have no value, the rest would give a biased interval
SHOWN_CHARS = 200  # of an error message
MOST_IN_FULL = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """A metric of all rows; `value` is None if the function returned none or failed, and `error` is its exception."""

    value: float | None
    low: float | None = None
    high: float | None = None
    level: float = 0.95
    rows: int = 0
    examples: int = 0
    error: str | None = None

    def __str__(self) -> str:
        if self.value is None:
            return f"failed: {self.error[:SHOWN_CHARS]}" if self.error else "none"
        return _shown(self.value) + ("" if self.low is None else f"  [{_shown(self.low)}, {_shown(self.high)}]")


def _shown(value: float | None) -> str:
    """A number with three decimals; a very large one in scientific notation.

    >>> _shown(0.5), _shown(1e300)
    ('0.500', '1e+300')
    """
    return "–" if value is None else f"{value:.3f}" if abs(value) < MOST_IN_FULL else f"{value:.4g}"


def failure(error: BaseException) -> str:
    """An exception of foreign code as one line; an exception that stops the program is raised again."""
    found = contained(error)
    return f"{type(found).__name__}: {found}"


def _of_labels(function: Callable[..., float | None], **fixed: Any) -> Function:
    def aggregate(rows: Sequence[Row]) -> float | None:
        truth = [_label(row["answer"]) for row in rows]
        return function(truth, [_label(row["parsed"]) for row in rows], **fixed)

    return aggregate


def _label(value: Any) -> Hashable | None:
    return None if value is None else str(value).strip()


BY_NAME: dict[str, Function] = {
    "accuracy": _of_labels(labels.accuracy),
    "balanced_accuracy": _of_labels(labels.balanced_accuracy),
    "macro_f1": _of_labels(labels.macro_f1),
}


def f1_of(positive: str) -> Function:
    """F1 of one label: ``aggregates={"f1": vf.stats.f1_of("yes")}``."""
    return _of_labels(labels.f1, positive=positive)


def as_aggregates(given: Any) -> dict[str, Function]:
    """Names of built-in aggregates, functions of all rows, or a mapping of names to either, as functions by name.

    >>> list(as_aggregates(["balanced_accuracy", max]))
    ['balanced_accuracy', 'max']
    >>> as_aggregates(["f1"])
    Traceback (most recent call last):
    ValueError: there is no aggregate 'f1'; use accuracy, balanced_accuracy, macro_f1, or any function of all rows
    """
    pairs = given.items() if isinstance(given, Mapping) else [(_name(one), one) for one in given or ()]
    found: dict[str, Function] = {}
    for name, one in pairs:
        function = BY_NAME.get(one) if isinstance(one, str) else one
        if not callable(function):
            known = ", ".join(BY_NAME)
            raise ValueError(f"there is no aggregate {one!r}; use {known}, or any function of all rows")
        if name in found:
            raise ValueError(f"two aggregates are called {name!r}; pass them as {{name: function}} with other names")
        found[str(name)] = function
    return found


def _name(one: Any) -> str:
    return one if isinstance(one, str) else str(getattr(one, "__name__", type(one).__name__))


def aggregate(
    rows: Sequence[Row], function: Function, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Aggregate:
    """A function of all rows with its bootstrap interval; examples are resampled together with all their rollouts.

    >>> rows = [{"example_id": i, "answer": "ab"[i % 2], "parsed": "a"} for i in range(40)]
    >>> print(aggregate(rows, BY_NAME["balanced_accuracy"]))
    0.500  [0.500, 0.500]
    """
    check_share(level, "level")
    groups = by_example(rows)
    counts = {"rows": len(rows), "examples": len(groups), "level": level}
    try:
        value = _number(function(rows))
    except BaseException as error:  # foreign code: its failure is part of the result
        return Aggregate(value=None, error=failure(error), **counts)  # type: ignore[arg-type]
    if value is None or len(groups) < 2:
        return Aggregate(value=value, **counts)  # type: ignore[arg-type]
    draws = _resampled(list(groups.values()), function, resamples, seed)
    low, high = _percentiles(draws, resamples, level)
    return Aggregate(value=value, low=low, high=high, **counts)  # type: ignore[arg-type]


def aggregate_difference(
    rows_a: Sequence[Row],
    rows_b: Sequence[Row],
    function: Function,
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Aggregate:
    """The aggregate of B minus that of A, on the examples in both; each example is resampled in both runs at once."""
    a, b = by_example(rows_a), by_example(rows_b)
    shared = [example for example in a if example in b]
    counts = {"rows": sum(len(a[key]) + len(b[key]) for key in shared), "examples": len(shared), "level": level}

    def difference(pairs: Sequence[Row]) -> float | None:
        sides = [[row for pair in pairs for row in pair[side]] for side in "ab"]
        values = [_number(function(side)) for side in sides]
        return None if values[0] is None or values[1] is None else values[1] - values[0]

    pairs = [{"a": a[key], "b": b[key]} for key in shared]
    try:
        value = difference(pairs) if pairs else None
    except BaseException as error:  # foreign code
        return Aggregate(value=None, error=failure(error), **counts)  # type: ignore[arg-type]
    if value is None or len(pairs) < 2:
        return Aggregate(value=value, **counts)  # type: ignore[arg-type]
    draws = _resampled([[pair] for pair in pairs], difference, resamples, seed)
    low, high = _percentiles(draws, resamples, level)
    return Aggregate(value=value, low=low, high=high, **counts)  # type: ignore[arg-type]


def by_example(rows: Sequence[Row]) -> dict[Hashable, list[Row]]:
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["example_id"], []).append(row)
    return groups


def _resampled(groups: Sequence[Sequence[Row]], function: Function, resamples: int, seed: int) -> list[float]:
    draw = random.Random(seed)
    found = []
    for _ in range(resamples):
        rows = [row for group in draw.choices(groups, k=len(groups)) for row in group]
        try:
            value = _number(function(rows))
        except BaseException as error:  # foreign code, which may fail on a resample without one of the labels
            contained(error)
            continue
        if value is not None:
            found.append(value)
    return found


def _percentiles(draws: list[float], resamples: int, level: float) -> tuple[float, float] | tuple[None, None]:
    if len(draws) < (1 - MOST_MISSING) * resamples or len(draws) < 2:
        return None, None
    draws.sort()
    tail = (1 - level) / 2
    return draws[math.floor(tail * (len(draws) - 1))], draws[math.ceil((1 - tail) * (len(draws) - 1))]


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None
