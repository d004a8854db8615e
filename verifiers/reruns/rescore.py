"""Scores the rollouts of a saved run with an environment's rubric; nothing is sampled again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from verifiers.envs.environment import Environment
from verifiers.envs.states import note_missed, restored_state, turns_of
from verifiers.reruns.play import score
from verifiers.rubrics.score import forget_score
from verifiers.store import Record, RunDir, is_failed, to_record
from verifiers.store.plain import to_json
from verifiers.store.record import CORE_COLUMNS
from verifiers.types import Row, State

# Fields of the old score besides reward and metrics. Old judge replies are dropped: the judge may be another one now.
_OLD_SCORES = ("group_size", "score_alone", "scoring_ms", "judge_response")


@dataclass(kw_only=True)
class Rescored:
    """Rollouts with their new scores, and the number left out because they had nothing to score."""

    states: list[State] = field(default_factory=list)
    rollouts: list[int] = field(default_factory=list)
    left_out: int = 0
    missed: set[str] = field(default_factory=set)  # state keys that reward functions read but the run did not save
    differing: set[Any] = field(default_factory=set)  # examples whose answer or info is different in the data set now
    unknown: set[Any] = field(default_factory=set)  # examples not in the data set, or with another prompt there

    def records(self, state_columns: Iterable[str] = ()) -> Iterator[Record]:
        for state, rollout in zip(self.states, self.rollouts, strict=True):
            yield to_record(state, rollout=rollout, state_columns=tuple(state_columns))


async def rescore(env: Environment, run: RunDir, *, dataset_answers: bool = False) -> Rescored:
    """Score the saved rollouts of a run again, except those that failed before they could be scored.

    Rollouts keep their saved answer and info; with ``dataset_answers``, they get those of the data set now.
    """
    rows = rows_by_id(env)
    found = Rescored()
    groups: dict[Any, list[State]] = {}
    for record in run.sorted_records():
        if is_failed(record) and not (_failed_in_grading(record) and record.get("completion")):
            found.left_out += 1
            continue
        row = row_of(record, rows)
        if row is not rows.get(record["example_id"]):
            found.unknown.add(record["example_id"])
        elif others := _other_answers(record, row):
            found.differing.add(record["example_id"])
            record |= others if dataset_answers else {}
        state = note_missed(unscored_state(record, row), found.missed)
        found.states.append(state)
        found.rollouts.append(record.get("rollout") or 0)
        groups.setdefault(state.get("example_id"), []).append(state)
    for group in groups.values():
        await score(env, group)
        await asyncio.sleep(0)
    return found


def _failed_in_grading(record: Record) -> bool:
    error = record.get("error")
    return isinstance(error, dict) and error.get("blame") == "grader"


def _other_answers(record: Record, row: Row) -> Row:
    """The row's answer and info, where they differ from those saved with the rollout."""
    given = {name: row.get(name) for name in ("answer", "info") if row.get(name) is not None}
    if isinstance(info := given.get("info"), str):
        with suppress(msgspec.DecodeError):  # info that is not JSON is compared as text
            given["info"] = msgspec.json.decode(info)
    return {name: value for name, value in given.items() if to_json(value) != to_json(record.get(name))}


def rows_by_id(env: Environment) -> dict[Any, Row]:
    """The environment's evaluation rows (training rows if it has none) by example id."""
    return {row["example_id"]: row for row in env.get_eval_dataset()}


def row_of(record: Record, rows: Mapping[Any, Row]) -> Row:
    """The environment's row if its prompt is that of the record; else a row made from the record."""
    row = rows.get(record["example_id"])
    if row is not None and row.get("prompt") == record.get("prompt"):
        return row
    return {key: record.get(key) for key in ("prompt", "answer", "info", "task", "example_id")}


def unscored_state(record: Record, row: Row) -> State:
    """The state of a saved rollout before scoring."""
    metrics = record.get("metrics")
    old: Mapping[str, Any] = metrics if isinstance(metrics, Mapping) else {}
    forgotten = {*_OLD_SCORES, *(old.keys() - {*CORE_COLUMNS})}
    state = restored_state({key: value for key, value in record.items() if key not in forgotten}, row)
    forget_score(state)
    state.saved_metrics = old
    if not state.get("trajectory"):
        state["trajectory"] = list(turns_of(record))
    return state
