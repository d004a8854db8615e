"""A results file → columns of numbers in memory; whole records, with their completions, are read on request."""

from __future__ import annotations

import math
import os
import weakref
from array import array
from collections.abc import Container, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Generic, TypeVar

import msgspec

from verifiers.files import lines_of, open_regular
from verifiers.store.checksum import is_intact
from verifiers.store.reading import UNREADABLE, RecordDecoder
from verifiers.store.record import Key, Record, is_usable
from verifiers.types import Usage

TIMES = ("generation_ms", "scoring_ms", "total_ms")
AT_ONCE = 4096  # rollouts
NAN = math.nan
MOST_METRICS = 256  # columns: a limit on memory if every line of a file has a new name
T = TypeVar("T")
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _Tokens(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    cost_usd: float | None = None


_NONE = _Tokens(prompt_tokens=-1)  # for a rollout without usage


class _Figures(msgspec.Struct, gc=False):
    """The fields of a line that columns store; a line with other types in these fields is kept as a whole record."""

    example_id: int | str
    rollout: int
    task: str | None = None
    reward: float | None = None
    error: None = None
    metrics: dict[str, float] | None = None
    generation_ms: float | None = None
    scoring_ms: float | None = None
    total_ms: float | None = None
    stop_condition: str | None = None
    is_truncated: bool = False
    usage: _Tokens | None = None


class SavedRollouts:
    """The rollouts of a results file by number, at about a hundred bytes each, however long their texts are."""

    def __init__(self, path: Path) -> None:
        self._file = open_regular(path)
        weakref.finalize(self, self._file.close)
        self._decode = RecordDecoder(None)
        self._offsets, self._lengths = array("Q"), array("Q")
        self._texts: _Repeated[str | None] = _Repeated()
        self._rewards, self._times = array("d"), {name: array("d") for name in TIMES}
        self.advantages = array("d")  # not in the file: the caller, who knows the whole group, fills them in
        self._tasks, self._stops, self._truncated = array("I"), array("I"), bytearray()
        self._metrics: dict[str, array[float]] = {}
        self._metric_names: _Repeated[tuple[str, ...]] = _Repeated()
        self._metric_sets = array("I")
        self._prompt_tokens, self._completion_tokens, self._costs = array("q"), array("q"), array("d")

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, wanted: Container[Key]) -> Iterator[tuple[Key, int | Record]]:
        """Each wanted rollout with its number or, if it does not fit into columns, its whole record.

        Checksums are not verified here: `wanted` comes from an index that did so, and `record` does so again.
        """
        batch: list[tuple[int, int, _Figures]] = []
        for offset, line, figures in self._lines():
            if figures is None or self._has_too_many(figures.metrics):
                record = self._decode(line)
                key = (record.get("example_id", ""), record.get("rollout") or 0)
                if key in wanted:
                    yield key, record
            elif (figures.example_id, figures.rollout) in wanted:
                batch.append((offset, len(line), figures))
            if len(batch) == AT_ONCE:
                yield from self._take(batch)
                batch = []
        yield from self._take(batch)

    def _lines(self) -> Iterator[tuple[int, bytes, _Figures | None]]:
        decode = msgspec.json.Decoder(_Figures).decode
        offset = 0
        self._file.seek(0)
        for line in lines_of(self._file):
            try:
                yield offset, line, decode(line)
            except msgspec.ValidationError:
                yield offset, line, None
            except UNREADABLE:
                pass
            offset += len(line)

    def _has_too_many(self, metrics: dict[str, float] | None) -> bool:
        if not metrics or metrics.keys() <= self._metrics.keys():
            return False
        if len(self._metrics) + len(metrics) > MOST_METRICS:
            return True
        for name in metrics:
            self._metrics.setdefault(name, array("d"))
        return False

    def _take(self, batch: list[tuple[int, int, _Figures]]) -> Iterator[tuple[Key, int]]:
        """Append a batch column by column, which is much faster than row by row."""
        first = len(self)
        self._offsets.extend([offset for offset, _, _ in batch])
        self._lengths.extend([length for _, length, _ in batch])
        rows = [figures for _, _, figures in batch]
        self._rewards.extend([NAN if row.reward is None else row.reward for row in rows])
        for name, column in self._times.items():
            values = map(attrgetter(name), rows)
            column.extend([NAN if value is None else value for value in values])
        self.advantages.extend([NAN] * len(rows))
        self._tasks.extend(self._texts.numbers([row.task for row in rows]))
        self._stops.extend(self._texts.numbers([row.stop_condition for row in rows]))
        self._truncated.extend([row.is_truncated for row in rows])
        usages = [row.usage or _NONE for row in rows]
        self._prompt_tokens.extend([usage.prompt_tokens for usage in usages])
        self._completion_tokens.extend([usage.completion_tokens for usage in usages])
        self._costs.extend([NAN if usage.cost_usd is None else usage.cost_usd for usage in usages])
        metrics = [row.metrics or {} for row in rows]
        self._metric_sets.extend(self._metric_names.numbers([tuple(some) for some in metrics]))
        for name, column in self._metrics.items():
            column.extend([NAN] * (first - len(column)))
            column.extend([some.get(name, NAN) for some in metrics])
        for number, row in enumerate(rows, first):
            yield (row.example_id, row.rollout), number

    # --- one rollout ------------------------------------------------------------------------------------------------

    def reward(self, number: int) -> float | None:
        value = self._rewards[number]
        return None if value != value else value

    def time_ms(self, number: int, name: str) -> float:
        value = self._times[name][number]
        return 0.0 if value != value else value

    def task(self, number: int) -> str | None:
        return self._texts.values[self._tasks[number]]

    def stop_condition(self, number: int) -> str | None:
        return self._texts.values[self._stops[number]]

    def is_truncated(self, number: int) -> bool:
        return bool(self._truncated[number])

    def usage(self, number: int) -> Usage | None:
        prompt, completion = self._prompt_tokens[number], self._completion_tokens[number]
        cost = self._costs[number]
        if prompt == _NONE.prompt_tokens:
            return None
        cost_usd = None if cost != cost else cost
        return Usage(prompt_tokens=prompt, completion_tokens=completion, cost_usd=cost_usd)

    def metric_names(self, number: int) -> tuple[str, ...]:
        return self._metric_names.values[self._metric_sets[number]]

    def metric(self, number: int, name: str) -> float | None:
        column = self._metrics.get(name, ())
        value = column[number] if number < len(column) else NAN
        return value if value == value and is_usable(value) else None

    def record(self, number: int) -> Record:
        """The whole record, read from disk."""
        line = os.pread(self._file.fileno(), self._lengths[number], self._offsets[number])
        if not is_intact(line):
            raise ValueError(f"{self._file.name} was changed while it was read: the checksum of a rollout is wrong")
        return self._decode(line)


class _Repeated(Generic[T]):
    """Stores each of many repeating values once, and refers to it by number."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def numbers(self, values: list[T]) -> list[int]:
        for value in dict.fromkeys(values):
            if value not in self._numbers:
                self._numbers[value] = len(self.values)
                self.values.append(value)
        return [self._numbers[value] for value in values]
