"""A saved run and an environment → the same rollouts with that environment's scores; no model is asked to play."""

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

# Of the old score, beside the reward and metrics; the judge that is asked now may be another one.
_OLD_SCORES = ("group_size", "score_alone", "scoring_ms", "judge_response")


@dataclass(kw_only=True)
class Rescored:
    """Rollouts with their new scores, and those that hold nothing to score."""

    states: list[State] = field(default_factory=list)
    rollouts: list[int] = field(default_factory=list)
    left_out: int = 0
    missed: set[str] = field(default_factory=set)  # what functions looked for in the states, and was not saved
    differing: set[Any] = field(default_factory=set)  # examples whose answer or info the data set has otherwise now
    unknown: set[Any] = field(default_factory=set)  # examples that the data set does not have, or asks in other words

    def records(self, state_columns: Iterable[str] = ()) -> Iterator[Record]:
        for state, rollout in zip(self.states, self.rollouts, strict=True):
            yield to_record(state, rollout=rollout, state_columns=tuple(state_columns))


async def rescore(env: Environment, run: RunDir, *, dataset_answers: bool = False) -> Rescored:
    """Score what a run saved. A rollout that failed before it could be scored has nothing to score, and is left out.

    Rollouts have the answer and info that they were played with, or with ``dataset_answers`` those of the data set now.
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
    """What is to be known of a rollout, as its row has it now; nothing where it is what was saved."""
    given = {name: row.get(name) for name in ("answer", "info") if row.get(name) is not None}
    if isinstance(info := given.get("info"), str):
        with suppress(msgspec.DecodeError):  # a text that is no JSON is another info, of which its function can tell
            given["info"] = msgspec.json.decode(info)
    return {name: value for name, value in given.items() if to_json(value) != to_json(record.get(name))}


def rows_by_id(env: Environment) -> dict[Any, Row]:
    """The environment's rows by example id: those to evaluate on, and where it has none those to train on."""
    return {row["example_id"]: row for row in env.get_eval_dataset()}


def row_of(record: Record, rows: Mapping[Any, Row]) -> Row:
    """The environment's own row, if it asks what the record was asked; else the row as the record has it."""
    row = rows.get(record["example_id"])
    if row is not None and row.get("prompt") == record.get("prompt"):
        return row
    return {key: record.get(key) for key in ("prompt", "answer", "info", "task", "example_id")}


def unscored_state(record: Record, row: Row) -> State:
    """A saved rollout as it was before it was scored."""
    metrics = record.get("metrics")
    old: Mapping[str, Any] = metrics if isinstance(metrics, Mapping) else {}
    forgotten = {*_OLD_SCORES, *(old.keys() - {*CORE_COLUMNS})}
    state = restored_state({key: value for key, value in record.items() if key not in forgotten}, row)
    forget_score(state)
    state.saved_metrics = old
    if not state.get("trajectory"):
        state["trajectory"] = list(turns_of(record))
    return state
