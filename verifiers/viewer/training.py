"""Reads ``metrics.jsonl`` of a training: one series per metric, evaluations, and notices."""

from __future__ import annotations

import math
import os
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec

from verifiers.files import lines_of, open_regular
from verifiers.store.checksum import FIELD, is_intact
from verifiers.viewer.numbers import as_number, known, mean

MAX_SERIES = 128
MAX_POINTS = 800  # of a series that is sent; a chart has fewer pixels
MAX_NOTICES = 200
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class MetricsLog:
    """The lines of a training so far; ``refresh`` reads appended lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.RLock()
        self._inode = 0
        self._clear()

    def _clear(self) -> None:
        self.steps = array("d")
        self.series: dict[str, array[float]] = {}
        self.evaluations: list[dict[str, Any]] = []
        self.notices: list[dict[str, Any]] = []
        self.ratio_histogram: dict[str, Any] | None = None
        self.weights: dict[str, dict[int, float]] = {}  # of reward functions: {name: {first position in steps: weight}}
        self.damaged = 0
        self._end = 0

    def refresh(self) -> None:
        with self.lock:
            try:
                found = os.stat(self.path)
            except OSError:
                self._clear()
                return
            if found.st_ino != self._inode or found.st_size < self._end:
                self._clear()
                self._inode = found.st_ino
            if found.st_size > self._end:
                try:
                    self._take()
                except OSError:  # not a regular file, or an endless line
                    self.damaged = max(self.damaged, 1)

    def _take(self) -> None:
        with open_regular(self.path) as file:
            file.seek(self._end)
            for text in lines_of(file):
                if not text.endswith(b"\n"):
                    return  # the line is still being written
                self._end += len(text)
                try:
                    if not is_intact(text):
                        raise msgspec.DecodeError
                    self._add(msgspec.json.decode(text, type=dict[str, Any]))
                except _UNREADABLE:
                    self.damaged += not text.isspace()

    def _add(self, line: dict[str, Any]) -> None:
        step = as_number(line.get("step"))
        if math.isnan(step):
            self.damaged += 1
        elif "eval" in line:
            found = line["eval"] if isinstance(line["eval"], dict) else {}
            self.evaluations = [earlier for earlier in self.evaluations if earlier["step"] < step]
            self.evaluations.append({"step": step, **{key: known(as_number(found.get(key))) for key in _EVAL_KEYS}})
        elif "notice" in line:
            if len(self.notices) < MAX_NOTICES:
                self.notices.append({"step": step, "notice": str(line["notice"])[:2000]})
        else:
            self._add_step(step, line)

    def _add_step(self, step: float, line: dict[str, Any]) -> None:
        self._go_back_to(step)
        self.steps.append(step)
        named = {name: value for name, value in line.items() if name not in ("step", FIELD)}
        metrics = named.pop("metrics", None)
        if isinstance(metrics, dict):
            named.update({f"metrics.{name}": value for name, value in metrics.items()})
        weights = named.pop("reward_weights", None)
        for name, weight in weights.items() if isinstance(weights, dict) else ():
            if not math.isnan(as_number(weight)) and (name in self.weights or len(self.weights) < MAX_SERIES):
                self.weights.setdefault(name, {})[len(self.steps) - 1] = as_number(weight)
        histogram = named.pop("ratio_histogram", None)
        if isinstance(histogram, dict):
            self.ratio_histogram = _histogram(histogram) or self.ratio_histogram
        for name, value in named.items():
            number = as_number(value)
            if name not in self.series:
                if math.isnan(number) or len(self.series) >= MAX_SERIES:
                    continue
                self.series[name] = array("d", [math.nan] * (len(self.steps) - 1))
            self.series[name].append(number)
        for column in self.series.values():
            if len(column) < len(self.steps):
                column.append(math.nan)

    def _go_back_to(self, step: float) -> None:
        """Drop earlier lines from a step on: a training resumed from a checkpoint writes some steps again."""
        keep = bisect_left(self.steps, step)
        if keep < len(self.steps):
            del self.steps[keep:]
            for column in self.series.values():
                del column[keep:]
            for changes in self.weights.values():
                for place in [place for place in changes if place >= keep]:
                    del changes[place]

    def _axes(self) -> Iterator[tuple[str, Sequence[float]]]:
        """The possible x axes besides steps: cumulative tokens, seconds and samples."""
        sums = {name: _running(self.series.get(name, ())) for name in ("step_s", "samples", "tokens")}
        yield "tokens", _filled(self.series.get("total_tokens", ())) or sums["tokens"]
        yield "seconds", sums["step_s"]
        yield "samples", sums["samples"]

    def shares(self, weights: Mapping[str, float]) -> dict[str, Any]:
        """The contribution of each reward function to the mean reward by step: its weight times its mean."""
        with self.lock:
            edges = _bucket_edges(len(self.steps), MAX_POINTS)
            names = [name for name in {**weights, **self.weights} if f"metrics.{name}" in self.series]
            functions = []
            for name in names:
                weight = self._weights_over_time(name, weights.get(name))
                column = self.series[f"metrics.{name}"]
                added = [value * counts for value, counts in zip(column, weight, strict=True)]
                functions.append(
                    {
                        "name": name,
                        "weight": known(weight[-1]) if weight else None,
                        "is_scheduled": name in self.weights,
                        "values": [mean(added[start:end]) for start, end in edges],
                        "means": [mean(column[start:end]) for start, end in edges],
                    }
                )
            reward = self.series.get("reward", array("d", [math.nan] * len(self.steps)))
            return {
                "steps": [self.steps[end - 1] for _, end in edges],
                "functions": functions,
                "reward": [mean(reward[start:end]) for start, end in edges],
            }

    def _weights_over_time(self, name: str, at_first: float | None) -> list[float]:
        now, found = math.nan if at_first is None else at_first, []
        changes = self.weights.get(name, {})
        for place in range(len(self.steps)):
            now = changes.get(place, now)
            found.append(now)
        return found

    def last(self, name: str) -> float | None:
        column = self.series.get(name)
        return None if not column or math.isnan(column[-1]) else column[-1]

    def outline(self, name: str, n: int) -> list[float | None]:
        """A whole series thinned to up to ``n`` points, for a sparkline."""
        column = self.series.get(name, array("d"))
        return [mean(column[start:end]) for start, end in _bucket_edges(len(column), n)]

    def page(self, first: float | None = None, last: float | None = None) -> dict[str, Any]:
        """All steps, or those from ``first`` to ``last``, as plain data, thinned to what a chart can show."""
        with self.lock:
            begin = 0 if first is None else bisect_left(self.steps, first)
            until = len(self.steps) if last is None else bisect_right(self.steps, last)
            edges = [(begin + a, begin + b) for a, b in _bucket_edges(max(until - begin, 0), MAX_POINTS)]
            return {
                "steps": [self.steps[end - 1] for _, end in edges],
                "axes": {name: [column[end - 1] for _, end in edges] for name, column in self._axes() if len(column)},
                "series": {
                    name: [mean(column[start:end]) for start, end in edges] for name, column in self.series.items()
                },
                "steps_a_point": max((end - start for start, end in edges), default=1),
                "last_step": self.steps[-1] if self.steps else None,
                "evaluations": self.evaluations,
                "notices": self.notices,
                "ratio_histogram": self.ratio_histogram,
                "damaged": self.damaged,
            }


_EVAL_KEYS = ("reward", "low", "high", "n", "failed")


def _bucket_edges(n: int, most: int) -> list[tuple[int, int]]:
    """Up to ``most`` adjacent ranges that cover ``n`` positions.

    >>> _bucket_edges(5, 2)
    [(0, 2), (2, 5)]
    """
    count = min(n, most)
    return list(pairwise(i * n // count for i in range(count + 1))) if count else []


def _running(column: Iterable[float]) -> list[float]:
    """The cumulative sum, without NaN values.

    >>> _running([1.0, math.nan, 2.0])
    [1.0, 1.0, 3.0]
    """
    return list(accumulate(0.0 if math.isnan(value) else value for value in column))


def _filled(column: Iterable[float]) -> list[float]:
    """A growing count with NaN replaced by the last known value.

    >>> _filled([math.nan, 2.0, math.nan])
    [0.0, 2.0, 2.0]
    """
    return list(accumulate((0.0 if math.isnan(value) else value for value in column), max))


def _histogram(found: dict[str, Any]) -> dict[str, Any] | None:
    edges, counts = found.get("edges"), found.get("counts")
    if not isinstance(edges, list) or not isinstance(counts, list) or len(edges) != len(counts) + 1:
        return None
    if any(math.isnan(as_number(value)) for value in (*edges, *counts)):
        return None
    return {"edges": edges[:200], "counts": counts[:199]}
