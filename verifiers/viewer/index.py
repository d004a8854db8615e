"""An index of a results file: a few numbers per rollout in compact arrays, for fast sorting and filtering."""

from __future__ import annotations

import json
import math
import os
import threading
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from verifiers.files import lines_of, open_regular
from verifiers.store import Key, Record, is_failed
from verifiers.store.checksum import FIELD, is_intact
from verifiers.types import Usage
from verifiers.viewer.numbers import as_number

MAX_METRICS: Final = 64  # a limit on memory if each line of a file has a new metric
MAX_TOLD: Final = 20  # damaged lines that are listed individually
_CHECK_EVERY = 256  # lines between two checks of the deadline
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

OK, FAILED, POLICY = 0, 1, 2  # POLICY: an error that the model caused, which is scored as usual
STATUSES = ("ok", "failed", "policy error")


class _Line(msgspec.Struct):
    """The fields of a line that the index uses; others are skipped."""

    example_id: int | str
    rollout: Any = None
    reward: Any = None
    error: Any = None
    task: Any = None
    stop_condition: Any = None
    is_truncated: Any = None
    metrics: Any = None
    usage: Any = None
    total_ms: Any = None
    step: Any = None
    advantage: Any = None


class Names:
    """Stores each of many repeating texts once, and refers to it by number."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        found = self._numbers.get(text)
        if found is None:
            found = self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return found

    def find(self, text: str) -> int | None:
        return self._numbers.get(text)


class RolloutIndex:
    """The rollouts of one results file; ``refresh`` reads appended lines, within a time budget.

    Columns are aligned: position ``i`` is rollout number ``i``, in file order. Missing numbers are NaN.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.RLock()  # requests are handled in worker threads
        self.generation = 0  # incremented whenever the file was replaced
        self._file: BinaryIO | None = None
        self._decode = msgspec.json.Decoder(_Line).decode
        self._clear()

    def _clear(self) -> None:
        self.offsets, self.lengths = array("Q"), array("Q")
        self.examples, self.repeats = array("I"), array("q")
        self.keys: list[int | str] = []
        self.rewards, self.times_ms = array("d"), array("d")
        self.tokens, self.advantages, self.steps = array("d"), array("d"), array("d")
        self.statuses, self.truncated = bytearray(), bytearray()
        self.tasks, self.stops, self.causes = array("I"), array("I"), array("I")
        self.task_names, self.stop_names, self.cause_names = Names(), Names(), Names()
        self.metrics: dict[str, array[float]] = {}
        self.has_more_metrics = False
        self.damaged = 0
        self.trouble: str | None = None  # why the file cannot be read
        self.damaged_lines: list[dict[str, Any]] = []
        self.usage = Usage()
        self.end = 0  # bytes read so far
        self.size = 0  # bytes of the file at the last check
        self._line_number = 0
        self._example_numbers: dict[int | str, int] = {}
        self._seen: Counter[int | str] = Counter()

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def version(self) -> str:
        """A text that changes whenever a column may have changed."""
        return f"{self.generation}.{self.end}"

    @property
    def share_read(self) -> float:
        return 1.0 if self.end >= self.size else self.end / self.size

    # --- reading ------------------------------------------------------------------------------------------------

    def refresh(self, budget_s: float | None = None) -> bool:
        """Continue reading until the end or the deadline; return whether the whole file has been read."""
        with self.lock:
            try:
                found = os.stat(self.path)
            except OSError:  # it does not exist yet, or was deleted
                self._close()
                return True
            held = None if self._file is None else os.fstat(self._file.fileno())
            is_same = held is not None and (held.st_ino, held.st_dev) == (found.st_ino, found.st_dev)
            if not is_same or found.st_size < self.end:
                self._close()
                try:
                    self._file = open_regular(self.path)
                except OSError as error:
                    self.trouble = error.strerror
                    return True
                weakref.finalize(self, self._file.close)
                self.generation += 1
            self.size = found.st_size
            if self.end >= self.size or self._file is None or self.trouble is not None:
                self.size = self.end
                return True
            try:
                return self._take(self._file, None if budget_s is None else time.monotonic() + budget_s)
            except OSError as error:  # an endless line
                self.trouble, self.size = error.strerror, self.end
                return True

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._clear()

    def _take(self, file: BinaryIO, deadline: float | None) -> bool:
        file.seek(self.end)
        for text in lines_of(file):
            if not self._take_line(text):
                self.size = self.end  # ignore the last line, which is still being written
                return True
            if deadline is not None and self._line_number % _CHECK_EVERY == 0 and time.monotonic() > deadline:
                return self.end >= self.size
        return True

    def _take_line(self, text: bytes) -> bool:
        """Add a line; False if it is not complete yet."""
        line: _Line | None = None
        try:
            if not is_intact(text):
                raise msgspec.DecodeError("its checksum is wrong")
            line = self._decode(text)
        except _UNREADABLE as error:
            if not text.endswith(b"\n"):
                return False
            if not text.isspace():
                self._note_damage(str(error), len(text))
        if line is not None:
            self.offsets.append(self.end)
            self.lengths.append(len(text))
            self._add(line)
        self._line_number += 1
        self.end += len(text)
        return True

    def _note_damage(self, reason: str, length: int) -> None:
        self.damaged += 1
        if len(self.damaged_lines) < MAX_TOLD:
            self.damaged_lines.append({"line": self._line_number + 1, "bytes": length, "reason": reason[:300]})

    def _add(self, line: _Line) -> None:
        example = line.example_id
        number = self._example_numbers.get(example)
        if number is None:
            number = self._example_numbers[example] = len(self.keys)
            self.keys.append(example)
        self.examples.append(number)
        self.repeats.append(self._repeat_of(line))
        error = line.error
        status = OK if error is None else FAILED if is_failed({"error": error}) else POLICY
        self.statuses.append(status)
        self.rewards.append(math.nan if status == FAILED else as_number(line.reward))
        self.times_ms.append(as_number(line.total_ms))
        self.steps.append(as_number(line.step))
        self.advantages.append(as_number(line.advantage))
        self.truncated.append(line.is_truncated is True)
        self.tasks.append(self.task_names.number(_name(line.task)))
        self.stops.append(self.stop_names.number(_name(line.stop_condition)))
        self.causes.append(self.cause_names.number("" if error is None else cause_of(error)))
        self.tokens.append(self._count_usage(line.usage))
        if type(line.metrics) is dict:
            self._add_metrics(line.metrics)

    def _repeat_of(self, line: _Line) -> int:
        """The rollout's number within its example; in files of 0.1.x, without that column, the order of appearance."""
        if type(line.rollout) is int and abs(line.rollout) < 1 << 62:
            return line.rollout
        count = self._seen[line.example_id]
        self._seen[line.example_id] += 1
        return count

    def _count_usage(self, usage: Any) -> float:
        if type(usage) is not dict:
            return math.nan
        prompt, completion = as_number(usage.get("prompt_tokens")), as_number(usage.get("completion_tokens"))
        cost = as_number(usage.get("cost_usd"))
        self.usage += Usage(
            prompt_tokens=0 if math.isnan(prompt) else int(prompt),
            completion_tokens=0 if math.isnan(completion) else int(completion),
            cost_usd=None if math.isnan(cost) else cost,
        )
        return completion

    def _add_metrics(self, metrics: dict[str, Any]) -> None:
        rows = len(self.offsets)
        for name, value in metrics.items():
            column = self.metrics.get(name)
            if column is None:
                if len(self.metrics) >= MAX_METRICS:
                    self.has_more_metrics = True
                    continue
                column = self.metrics[name] = array("d")
            if len(column) < rows - 1:
                column.extend([math.nan] * (rows - 1 - len(column)))
            column.append(as_number(value))

    # --- columns and records ------------------------------------------------------------------------------------

    def metric(self, name: str) -> array[float]:
        """A metric's column, padded to the number of rollouts."""
        column = self.metrics[name]
        if len(column) < len(self):
            column.extend([math.nan] * (len(self) - len(column)))
        return column

    def key(self, number: int) -> Key:
        return self.keys[self.examples[number]], self.repeats[number]

    def group(self, example: int | str) -> list[int]:
        """The numbers of the rollouts of one example, by repeat."""
        wanted = self._example_numbers.get(example)
        if wanted is None:
            return []
        numbers = [number for number, found in enumerate(self.examples) if found == wanted]
        return sorted(numbers, key=self.repeats.__getitem__)

    def line(self, number: int) -> bytes:
        """The bytes of one line; empty if the file was deleted."""
        if self._file is None:
            return b""
        return os.pread(self._file.fileno(), self.lengths[number], self.offsets[number])

    def record(self, number: int) -> Record:
        """One rollout, or as much of it as can be decoded."""
        example, repeat = self.key(number)
        return {**read_line(self.line(number)), "example_id": example, "rollout": repeat}

    def records(self, numbers: Iterable[int]) -> list[Record]:
        return [self.record(number) for number in numbers]


def read_line(line: bytes) -> Record:
    """A line → a record; invalid UTF-8 becomes the replacement character, so that the line is not lost."""
    try:
        found: Any = msgspec.json.decode(line)
    except _UNREADABLE:
        try:
            found = json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError) as error:
            found = {"error": {"type": "damaged line", "blame": "infrastructure", "message": str(error)}}
    if not isinstance(found, dict):
        return {}
    found.pop(FIELD, None)
    return found


def cause_of(error: Any) -> str:
    """Why a rollout failed, as a short text for counting.

    >>> cause_of({"type": "JudgeError", "message": "down\\nfor an hour"})
    'JudgeError: down'
    """
    if not isinstance(error, dict):
        return str(error).split("\n", 1)[0][:200]
    message = str(error.get("message") or "").split("\n", 1)[0]
    return f"{error.get('type') or 'error'}: {message}"[:200]


def _name(value: Any) -> str:
    return value[:200] if isinstance(value, str) else "" if value is None else str(value)[:200]
