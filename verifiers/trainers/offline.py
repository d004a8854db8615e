"""Rollouts that were made and saved before, as batches to learn from: prompts, completions and rewards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.store import read_records
from verifiers.trainers.batch import Batch, Reply, group_equal, text_of
from verifiers.types import State

COLUMNS = ("prompts", "completions", "rewards")
_OF_A_STATE = ("trajectory", "oai_tools", "tools", "info", "chat_template_kwargs", "is_truncated", "stop_condition")
_SINGULAR = {"prompt": "prompts", "completion": "completions", "reward": "rewards", "answer": "answers"}


class Offline:
    """Saved rollouts, in groups of the same prompt: each group is a row of the training."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        if missing := [name for name in COLUMNS if name not in columns]:
            raise ValueError(f"a saved data set has prompts, completions and rewards; this one has no {missing[0]}")
        lengths = {name: len(columns[name]) for name in COLUMNS}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of different lengths: {lengths}")
        scored = [i for i, reward in enumerate(columns["rewards"]) if reward is not None]
        self.dropped = lengths["rewards"] - len(scored)
        if not scored:
            raise ValueError("this data set has no rewards: there is nothing to learn from")
        self._columns = {
            name: [columns[name][i] for i in scored] for name in columns if len(columns[name]) > scored[-1]
        }
        members: dict[int, list[int]] = {}
        for i, group in enumerate(group_equal(self._columns["prompts"])):
            members.setdefault(group, []).append(i)
        self._groups = list(members.values())
        if all(len(group) < 2 for group in self._groups):
            raise ValueError(
                "no prompt in this data set has two completions: a group-relative method compares completions of the "
                "same prompt; generate with rollouts_per_example=4 or so"
            )

    def groups(self) -> list[list[int]]:
        """The groups that have something to compare, each by the places of its rollouts."""
        return [group for group in self._groups if len(group) > 1]

    def batch(self, groups: Sequence[Sequence[int]]) -> Batch:
        """The rollouts of these groups."""
        places = [(i, number) for number, group in enumerate(groups) for i in group]
        states = self._columns.get("states")
        columns: dict[str, list[Any]] = {
            "prompts": [self._columns["prompts"][i] for i, _ in places],
            "completions": [self._reply(i, states) for i, _ in places],
            "rewards": [float(self._columns["rewards"][i]) for i, _ in places],
            "groups": [number for _, number in places],
            "answers": [self._columns.get("answers", {}) and self._columns["answers"][i] for i, _ in places],
        }
        return Batch(columns)

    def _reply(self, i: int, states: Sequence[Any] | None) -> Reply:
        completion = self._columns["completions"][i]
        state = states[i] if states is not None else None
        if not isinstance(state, State):
            state = self._state(i)
        return Reply(text_of(completion), messages=completion, state=state)

    def _state(self, i: int) -> State | None:
        """The state of a saved record, as far as it was saved; None for columns that are nothing but text."""
        kept = {name: self._columns[name][i] for name in _OF_A_STATE if name in self._columns}
        if not kept:
            return None
        asked = {"prompt": self._columns["prompts"][i], "example_id": self._columns.get("example_id", range(i + 1))[i]}
        scored = {"completion": self._columns["completions"][i], "reward": self._columns["rewards"][i]}
        return State({**kept, **scored, "input": asked})


def read_offline(given: Any) -> Offline | None:
    """Saved rollouts from columns, rows, `Results` or a file (jsonl, parquet, json, torch.save); None for bare rows."""
    if isinstance(given, (str, Path)):
        given = read_file(Path(given))
    columns = _columns(given)
    return Offline(columns) if "completions" in columns and "rewards" in columns else None


def _columns(given: Any) -> dict[str, Any]:
    if hasattr(given, "rollouts") and hasattr(given, "keys"):  # Results
        return {name: list(given[name]) for name in ("prompts", "completions", "rewards", "answers", "states")}
    if isinstance(given, Mapping):
        return {_SINGULAR.get(str(name), str(name)): list(values) for name, values in given.items()}
    if hasattr(given, "column_names") and not isinstance(given, list):
        names = given.column_names
        if not {"completion", "completions"} & set(names):
            return {}
        return {_SINGULAR.get(name, name): list(given[name]) for name in names}
    if isinstance(given, list) and given and isinstance(given[0], Mapping):
        names = [name for name in given[0] if all(name in row for row in given)]
        names += [name for name in _OF_A_STATE if name not in names and any(name in row for row in given)]
        return {_SINGULAR.get(name, name): [row.get(name) for row in given] for name in names}
    return {}


def read_file(path: Path) -> Any:
    if path.is_dir():
        return list(read_records(path))
    if not path.is_file():
        raise FileNotFoundError(f"there is no data set at {path}")
    if path.suffix in (".pt", ".pth", ".bin"):
        return _read_torch(path)
    if path.suffix == ".jsonl":
        return list(read_records(path))
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix == ".json":
        return json.loads(path.read_text())
    raise ValueError(f"{path.name} is no data set that can be read; give jsonl, parquet, json, or a torch.save file")


def _read_parquet(path: Path) -> dict[str, list[Any]]:
    """The columns of a table; those that hold JSON text, and say so, as what it says."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(path)
    columns: dict[str, list[Any]] = table.to_pydict()
    for field in table.schema:
        if (field.metadata or {}).get(b"encoding") == b"json":
            columns[field.name] = [None if text is None else json.loads(text) for text in columns[field.name]]
    return columns


def _read_torch(path: Path) -> Any:
    import pickle  # noqa: TID251 - only to name the error that torch raises

    import torch

    try:
        return torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path.name} holds more than plain data, and reading it could run code; save lists, dicts, texts and "
            f"numbers only ({str(error).splitlines()[0]})"
        ) from None
