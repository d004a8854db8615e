"""Metrics of a training → text: formatted numbers, intervals, sparklines."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from verifiers.logs import printable

SPARK_CHARS = 32
_SPARKS = "▁▂▃▄▅▆▇█"
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")


def sparkline(values: Iterable[float], width: int = SPARK_CHARS) -> str:
    """Values as block characters of different heights; more than ``width`` values are averaged in bins.

    >>> sparkline([0, 1, 2, 3])
    '▁▃▆█'
    >>> sparkline([5, 5])
    '▄▄'
    """
    means = bin_means(list(values), width)
    if not means:
        return ""
    low, high = min(means), max(means)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        return _SPARKS[3] * len(means)
    return "".join(_SPARKS[min(int((value - low) / (high - low) * len(_SPARKS)), len(_SPARKS) - 1)] for value in means)


def bin_means(values: list[float], count: int) -> list[float]:
    """Means of ``count`` bins of consecutive values; the values themselves if there are at most ``count``.

    >>> bin_means([1, 3, 5, 7], 2), bin_means([1], 2)
    ([2.0, 6.0], [1.0])
    """
    if len(values) <= count:
        return [float(value) for value in values]
    bounds = [len(values) * i // count for i in range(count + 1)]
    return [fmean(values[a:b]) for a, b in itertools.pairwise(bounds)]


def clean(text: str) -> str:
    r"""Text on one line that is safe to print: escape sequences are removed, other control characters escaped.

    >>> clean("a\x1b[31mb\x1b]0;title\x07c\nd\x08")
    'abc d\\x08'
    """
    return printable(" ".join(_ESCAPES.sub("", text).splitlines()))


def number(value: Any) -> float | None:
    """A finite number, or None for anything else.

    >>> number(0.5), number(float("nan")), number(None), number(True)
    (0.5, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def is_filtered(metrics: Mapping[str, Any]) -> bool:
    """Whether more rollouts were scored in a step than are trained on, so that ``reward_sampled`` differs.

    >>> is_filtered({"samples": 16, "sampled": 40, "failed": 0, "reward_sampled": 0.1}), is_filtered({"samples": 16})
    (True, False)
    """
    counts = [number(metrics.get(name)) for name in ("sampled", "failed", "samples")]
    if number(metrics.get("reward_sampled")) is None or any(count is None for count in counts):
        return False
    sampled, failed, samples = (int(count or 0) for count in counts)
    return sampled - failed > samples


def labelled(label: str, value: Any, form: str, unit: str = "") -> str:
    """A label and a formatted number; empty if the value is not a finite number.

    >>> labelled("kl", 0.25, ".2f"), labelled("kl", None, ".2f")
    ('kl 0.25', '')
    """
    found = number(value)
    return "" if found is None else f"{label}{' ' * bool(label)}{found:z{form}}{unit}"


def with_interval(label: str, mean: Any, low: Any, high: Any) -> str:
    """A mean with its confidence interval: as ± if the interval is about symmetric, else as its two bounds.

    >>> with_interval("", 0.5, 0.4, 0.6), with_interval("", 1.0, 0.7, 1.0), with_interval("", 0.5, None, None)
    ('0.500 ± 0.100', '1.000 [0.700, 1.000]', '0.500')
    """
    text, middle = labelled(label, mean, ".3f"), number(mean)
    below, above = number(low), number(high)
    if middle is None or below is None or above is None:
        return text
    if abs((below + above) / 2 - middle) <= 0.1 * (above - below):
        return f"{text} ± {(above - below) / 2:.3f}"
    return f"{text} [{below:.3f}, {above:.3f}]"


def variance(values: Sequence[float]) -> float:
    """The unbiased sample variance; 0 for a single value.

    >>> variance([1.0, 3.0]), variance([1.0])
    (2.0, 0.0)
    """
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
