"""Filters, sorts and pages the rollouts of a run for the table."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verifiers.messages import content_text, last_reply
from verifiers.store import Record
from verifiers.viewer.index import STATUSES, RolloutIndex
from verifiers.viewer.library import Run
from verifiers.viewer.numbers import known
from verifiers.viewer.search import Search

MAX_PAGE = 500
PREVIEW_CHARS = 240
TOLERANCE = 1e-8  # the bars of a histogram have rounded rewards
SORTS = ("number", "example", "reward", "tokens", "time", "step", "advantage")


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """Filters, sort order and page of the table of rollouts.

    >>> Query.parse({"status": "failed", "n": "20"}).status
    'failed'
    """

    start: int = 0
    n: int = 50
    sort: str = "number"
    is_descending: bool = False
    search: str = ""
    status: str | None = None
    task: str | None = None
    stop: str | None = None
    cause: str | None = None
    step: float | None = None
    low: float | None = None
    high: float | None = None
    is_truncated: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Query:
        """Parse the query of a URL; raises ValueError with the allowed values."""
        status = given.get("status")
        if status is not None and status not in (*STATUSES, "scored"):
            raise ValueError(f"status={status!r} must be one of scored, {', '.join(STATUSES)}")
        sort = given.get("sort", "number")
        if sort not in SORTS and not sort.startswith("metric:"):
            raise ValueError(f"sort={sort!r} must be one of {', '.join(SORTS)}, metric:NAME")
        return cls(
            start=_whole(given, "start", 0, 1 << 40),
            n=min(_whole(given, "n", 50, 1 << 40), MAX_PAGE),
            sort=sort,
            is_descending=given.get("desc") == "1",
            search=given.get("q", "")[:1000],
            status=status,
            task=given.get("task"),
            stop=given.get("stop"),
            cause=given.get("cause"),
            step=_number(given, "step"),
            low=_number(given, "low"),
            high=_number(given, "high"),
            is_truncated=given.get("truncated") == "1",
        )


def page(run: Run, query: Query, *, budget_s: float | None = None) -> dict[str, Any]:
    """One page of the table, with the total number of rollouts; the next call continues a long search."""
    index = run.index
    with index.lock:
        is_done, order = find(run, query, budget_s=budget_s)
        numbers = order[query.start : query.start + query.n]
        return {
            "total": len(order),
            "of": len(index),
            "start": query.start,
            "is_done": is_done,
            "share_read": index.share_read,
            "version": index.version,
            "rows": [row_of(index, number) for number in numbers],
        }


def neighbours(run: Run, query: Query, number: int) -> dict[str, int | None]:
    """The rollouts before and after one in the table with this query."""
    with run.index.lock:
        order = find(run, query, budget_s=0.5)[1]
        try:
            at = order.index(number)
        except ValueError:
            return {"previous": None, "next": None, "place": None, "total": len(order)}
        return {
            "previous": order[at - 1] if at else None,
            "next": order[at + 1] if at + 1 < len(order) else None,
            "place": at,
            "total": len(order),
        }


def find(run: Run, query: Query, *, budget_s: float | None = None) -> tuple[bool, Sequence[int]]:
    """Whether the search is complete, and the numbers of all matching rollouts in the query's order."""
    index = run.index
    if query.search:
        search = run.kept.get(("search", query.search, index.generation), lambda: Search(index, query.search))
        is_done = search.advance(budget_s)
        candidates: Sequence[int] = search.hits
    else:
        is_done, candidates = True, range(len(index))
    asked = replace(query, start=0, n=0)
    if asked == Query(n=0):
        return True, candidates
    if not is_done:  # do not cache an order that is still changing
        return False, _order(index, candidates, query)
    return True, run.kept.get((asked, index.version), lambda: _order(index, candidates, query))


def _order(index: RolloutIndex, candidates: Sequence[int], query: Query) -> array[int]:
    numbers: Any = candidates
    for keep in _filters(index, query):
        numbers = [number for number in numbers if keep(number)]
    if query.sort == "number":
        return array("I", reversed(numbers) if query.is_descending else numbers)
    if query.sort == "example":
        ordered = sorted(numbers, key=lambda i: _example_order(index, i), reverse=query.is_descending)
        return array("I", ordered)
    column = _column(index, query.sort)
    found = [number for number in numbers if not math.isnan(column[number])]
    missing = [number for number in numbers if math.isnan(column[number])]
    found.sort(key=column.__getitem__, reverse=query.is_descending)
    return array("I", found + missing)


def _filters(index: RolloutIndex, query: Query) -> list[Callable[[int], bool]]:
    found: list[Callable[[int], bool]] = []
    if query.status == "scored":
        found.append(lambda i: not math.isnan(index.rewards[i]))
    elif query.status is not None:
        code = STATUSES.index(query.status)
        found.append(lambda i: index.statuses[i] == code)
    named = (
        (query.task, index.tasks, index.task_names),
        (query.stop, index.stops, index.stop_names),
        (query.cause, index.causes, index.cause_names),
    )
    found += [_equals(column, names.find(text)) for text, column, names in named if text is not None]
    if query.step is not None:
        found.append(lambda i: index.steps[i] == query.step)
    if query.low is not None or query.high is not None:
        low, high = -math.inf if query.low is None else query.low, math.inf if query.high is None else query.high
        found.append(lambda i: low - TOLERANCE <= index.rewards[i] <= high + TOLERANCE)
    if query.is_truncated:
        found.append(lambda i: bool(index.truncated[i]))
    return found


def _equals(column: Sequence[int], wanted: int | None) -> Callable[[int], bool]:
    return lambda number: column[number] == wanted


def _column(index: RolloutIndex, sort: str) -> Sequence[float]:
    columns: dict[str, Sequence[float]] = {
        "reward": index.rewards,
        "tokens": index.tokens,
        "time": index.times_ms,
        "step": index.steps,
        "advantage": index.advantages,
    }
    if sort in columns:
        return columns[sort]
    name = sort.removeprefix("metric:")
    if name not in index.metrics:
        raise ValueError(f"there is no metric {name[:80]!r} in this run")
    return index.metric(name)


def _example_order(index: RolloutIndex, number: int) -> tuple[bool, int | str, int]:
    example, repeat = index.key(number)
    return isinstance(example, str), example, repeat


def row_of(index: RolloutIndex, number: int) -> dict[str, Any]:
    """One row of the table."""
    record = index.record(number)
    return {**facts_of(index, number), "asked": _preview(asked(record)), "replied": _preview(replied(record))}


def facts_of(index: RolloutIndex, number: int) -> dict[str, Any]:
    """The data of a rollout in the index."""
    example, repeat = index.key(number)
    return {
        "number": number,
        "example_id": example,
        "rollout": repeat,
        "status": STATUSES[index.statuses[number]],
        "reward": known(index.rewards[number]),
        "metrics": {name: known(index.metric(name)[number]) for name in index.metrics},
        "task": index.task_names.texts[index.tasks[number]],
        "stop": index.stop_names.texts[index.stops[number]],
        "cause": index.cause_names.texts[index.causes[number]],
        "is_truncated": bool(index.truncated[number]),
        "tokens": known(index.tokens[number]),
        "time_ms": known(index.times_ms[number]),
        "step": known(index.steps[number]),
        "advantage": known(index.advantages[number]),
    }


def asked(record: Record) -> str:
    """The text of the prompt, or of its last message."""
    prompt = record.get("prompt")
    if isinstance(prompt, list) and prompt:
        last = prompt[-1]
        return content_text(last.get("content")) if isinstance(last, dict) else str(last)
    return prompt if isinstance(prompt, str) else ""


def replied(record: Record) -> str:
    """The model's last reply."""
    completion = record.get("completion")
    try:
        return last_reply(completion) if isinstance(completion, (str, list)) else ""
    except (TypeError, AttributeError):  # a list of anything
        return ""


def _preview(text: str) -> str:
    short = " ".join(text[: PREVIEW_CHARS * 4].split())
    return short if len(short) <= PREVIEW_CHARS else f"{short[:PREVIEW_CHARS]}…"


def _whole(given: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = given.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ValueError(f"{name}={text[:40]!r} is not a whole number of 0 or more")
    return min(int(text), most)


def _number(given: Mapping[str, str], name: str) -> float | None:
    text = given.get(name)
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{name}={text[:40]!r} is not a number")
    return number
