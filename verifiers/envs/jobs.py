"""Rows and repeats → the jobs of a run. A row that cannot be read becomes a job that fails."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import count
from typing import Any

from verifiers.envs.rows import RowFormat, Rows, as_rows, from_columns
from verifiers.escapes import contained
from verifiers.runner import Job
from verifiers.store import example_key
from verifiers.types import Row


def jobs_of(rows: Rows, repeats: int, n_samples: int | None = None) -> list[Job]:
    """Each row ``repeats`` times; or, with ``n_samples``, so many rollouts, cycling through the rows."""
    n = len(rows)
    if n_samples is not None and n:
        order = [
            (i % n, repeat + (i // n) * repeats) for i in range(-(-n_samples // repeats)) for repeat in range(repeats)
        ]
        order = order[:n_samples]
    else:
        order = [(i, repeat) for i in range(n) for repeat in range(repeats)]
    cache: dict[int, tuple[Row, Exception | None]] = {}
    jobs = []
    for position, (i, repeat) in enumerate(order):
        if i not in cache:
            cache[i] = _row_or_error(rows, i)
        row, error = cache[i]
        jobs.append(Job(position, row, repeat, error))
    return jobs


def _row_or_error(rows: Rows, i: int) -> tuple[Row, Exception | None]:
    try:
        return rows[i], None
    except BaseException as error:  # a bad row must not end the run
        return {"prompt": None, "example_id": rows.example_id(i), "task": "default"}, contained(error)


def jobs_of_inputs(inputs: Any, row_format: RowFormat, repeats: int) -> list[Job]:
    """Jobs for rows passed by a host. Rows with the same example id are several rollouts of one example."""
    if isinstance(inputs, Rows):
        return jobs_of(inputs, repeats)
    rows = _without_ids(inputs)
    raw = as_rows(rows, row_format)
    given = {row["given_id"] for row in rows if "given_id" in row}
    free = (number for number in count(len(rows)) if number not in given)
    seen: dict[Any, int] = {}
    jobs: list[Job] = []
    for i in range(len(raw)):
        row, error = _row_or_error(raw, i)
        if "given_id" in rows[i]:
            row["example_id"] = rows[i]["given_id"]
            row.pop("given_id", None)
        elif row["example_id"] in given:
            row["example_id"] = next(free)
        for _ in range(repeats):
            repeat = seen.get(row["example_id"], 0)
            seen[row["example_id"]] = repeat + 1
            jobs.append(Job(len(jobs), row, repeat, error))
    return jobs


def _without_ids(inputs: Any) -> list[Row]:
    """Move the ids to another key, because they may repeat here, and a data set's ids must be unique.

    They become what is stored of them, because a resumed run finds its rollouts by it; NaN is no id (pandas).
    """
    if isinstance(inputs, Mapping) and _is_one_row(inputs):
        inputs = [inputs]
    if isinstance(inputs, Mapping):
        inputs = from_columns(inputs)
    rows = []
    for row in inputs:
        row = dict(row)
        given = row.pop("example_id", None)
        if given is not None and not (isinstance(given, float) and math.isnan(given)):
            row["given_id"] = example_key(given)
        rows.append(row)
    return rows


def _is_one_row(inputs: Mapping[str, Any]) -> bool:
    """Whether this is one row rather than columns: its prompt is a text or a list of messages."""
    asked = inputs.get("prompt", inputs.get("question"))
    is_messages = isinstance(asked, list | tuple) and bool(asked) and isinstance(asked[0], Mapping)
    return isinstance(asked, str) or is_messages
