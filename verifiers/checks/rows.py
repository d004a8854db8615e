"""The rows of an environment → verdicts on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from verifiers.checks.verdicts import Report
from verifiers.envs.environment import Environment
from verifiers.envs.rows import Rows
from verifiers.messages import text_of
from verifiers.types import Row

MOST_ROWS = 5_000
SHOWN = 3


def check_rows(report: Report, env: Environment, n: int) -> list[Row]:
    """Check the rows of both splits. Returns rows to test replies on, or none if they cannot be read."""
    name = "rows are valid"
    try:
        splits = {
            split: rows for split, rows in (("train", env.dataset), ("eval", env.eval_dataset)) if rows is not None
        }
        sizes = {split: len(rows) for split, rows in splits.items()}
        empty_splits = [split for split, size in sizes.items() if not size]
        problems = [problem for split, rows in splits.items() for problem in _problems(split, rows)]
        picked = list(env.get_eval_dataset(n))
    except Exception as error:  # foreign code: rows are often created or downloaded only now
        report.add(name, "fail", f"they cannot be read: {type(error).__name__}: {error}")
        return []
    shown = ", ".join(f"{size:,} to {'evaluate' if split == 'eval' else 'train'} on" for split, size in sizes.items())
    if empty_splits or problems:
        told = [*(f"{split} has no rows" for split in empty_splits), *problems[:SHOWN]]
        more = f" … and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        report.add(name, "fail", "; ".join(told) + more)
    else:
        report.add(name, "ok", shown)
        _check_overlap(report, splits)
    return picked


def _problems(split: str, rows: Rows) -> Iterator[str]:
    step = max(1, len(rows) // MOST_ROWS)
    for number in range(0, len(rows), step):
        try:
            row = rows[number]
        except Exception as error:  # foreign data
            yield f"{split} row {number}: {error}"
            continue
        if problem := _problem(row):
            yield f"{split} row {number} {problem}"


def _problem(row: Row) -> str | None:
    if not text_in(row["prompt"]).strip():
        return "has an empty prompt"
    info = row.get("info")
    if isinstance(info, str):
        try:
            info = json.loads(info)
        except ValueError:
            return "has an 'info' that is a text but not JSON"
    if info is not None and not isinstance(info, dict):
        return f"has an 'info' that is not an object but {type(info).__name__}"
    answer = row.get("answer")
    if isinstance(answer, float) and answer != answer:
        return "has NaN as its answer"
    return None


def text_in(prompt: Any) -> str:
    """The text of a prompt without its system message."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(text_of(message) for message in prompt if message.get("role") != "system")


def _check_overlap(report: Report, splits: dict[str, Rows]) -> None:
    """Report questions that are in both splits, which make an evaluation look better than it is."""
    if len(splits) < 2:
        return
    train, evaluated = (_questions(splits[split]) for split in ("train", "eval"))
    shared = len(train & evaluated)
    share = shared / max(len(evaluated), 1)
    found = f"{shared} of {len(evaluated)} evaluation questions are also training questions"
    texts = [{question[:2] for question in questions} for questions in (train, evaluated)]
    alike = len({question for question in evaluated if question[:2] in texts[0]}) - shared
    if alike:
        found += f"; {alike} more have the same text and answer as one, but another info"
    report.add("splits are apart", "warn" if share > 0.05 else "ok", found)


def _questions(rows: Rows) -> set[tuple[str, str, str]]:
    """Questions with answers and info, because a game has the same prompt in every row and its board in the info."""
    step = max(1, len(rows) // MOST_ROWS)
    picked = (rows[number] for number in range(0, len(rows), step))
    return {(text_in(row["prompt"]), str(row.get("answer")), _info(row)) for row in picked}


def _info(row: Row) -> str:
    """The info as canonical JSON, whether it is an object or JSON."""
    info: Any = row.get("info") or {}
    if isinstance(info, str):
        try:
            info = json.loads(info)
        except ValueError:
            return str(info)
    return json.dumps(info, sort_keys=True, default=str)
