"""Converts values from files to floats; others, and those beyond `LARGEST_SCORE`, become NaN, or None on a page."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from verifiers.types import LARGEST_SCORE


def as_number(value: Any) -> float:
    """A value from a file as a float, or NaN.

    >>> as_number(2), as_number(True), as_number("2"), as_number(10**400), as_number(1e308)
    (2.0, 1.0, nan, nan, nan)
    """
    if type(value) is float or type(value) is int or type(value) is bool:
        try:
            number = float(value)
        except OverflowError:
            return math.nan
        return number if abs(number) <= LARGEST_SCORE else math.nan
    return math.nan


def known(number: float) -> float | None:
    """A number for a page: None if it is NaN."""
    return None if math.isnan(number) else number


def mean(column: Iterable[float]) -> float | None:
    """The mean of the numbers that are not NaN.

    >>> mean([1.0, math.nan, 2.0]), mean([])
    (1.5, None)
    """
    numbers = [number for number in column if not math.isnan(number)]
    return math.fsum(numbers) / len(numbers) if numbers else None
