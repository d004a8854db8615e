"""Saved rollouts → groups of the same prompt, and batches of them to train on offline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.results import Results
from verifiers.store import read_records
from verifiers.trainers.advantages import members
from verifiers.trainers.batch import Batch, Reply, completion_text, group_equal
from verifiers.types import State

_NAMES = {"prompts": "prompt", "completions": "completion", "rewards": "reward", "answers": "answer"}
_ALIGNED = (*_NAMES.values(), "messages", "question")
_OF_A_STATE = (
    "trajectory", "oai_tools", "tools", "info", "chat_template_kwargs", "is_truncated", "stop_condition", "metrics",
)  # fmt: skip


class Offline:
    """Saved rollouts. The rows of the training are ``groups``: lists of indices of rollouts with the same prompt."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if odd := [i for i, row in enumerate(rows) if "prompt" not in row]:
            raise ValueError(f"saved rollouts need a prompt, a completion and a reward; row {odd[0]} has no prompt")
        self._rows = [row for row in rows if row.get("reward") is not None and row.get("error") is None]
        if not self._rows:
            raise ValueError("this data set has no rewards, so that there is nothing to learn from")
        for i, row in enumerate(self._rows):
            _check_row(i, row)
        self._kept = [name for name in _OF_A_STATE if any(name in row for row in self._rows)]
        prompts = group_equal([row["prompt"] for row in self._rows])
        self.groups = [group for group in members(range(len(prompts)), prompts) if len(group) > 1]
        if not self.groups:
            raise ValueError(
                "no prompt in this data set has two completions, but a group-relative method compares completions of "
                "the same prompt; generate with rollouts_per_example=4 or so"
            )

    def batch(self, groups: Sequence[Sequence[int]]) -> Batch:
        """A batch of the rollouts of these groups."""
        indices = [i for group in groups for i in group]
        rows = [self._rows[i] for i in indices]
        columns: dict[str, list[Any]] = {
            "prompts": [row["prompt"] for row in rows],
            "completions": [self._reply(i) for i in indices],
            "rewards": [float(row["reward"]) for row in rows],
            "groups": [number for number, group in enumerate(groups) for _ in group],
            "answers": [row.get("answer") for row in rows],
        }
        return Batch(columns)

    def _reply(self, i: int) -> Reply:
        """The completion with the parts of its state that were saved; without a state if only its text was."""
        row, state = self._rows[i], None
        if isinstance(row, State):
            state = row
        elif self._kept:
            asked = {"prompt": row["prompt"], "example_id": row.get("example_id", i)}
            scored = {name: row[name] for name in ("completion", "reward")}
            state = State({**{name: row.get(name) for name in self._kept}, **scored, "input": asked})
        return Reply(completion_text(row["completion"]), messages=row["completion"], state=state)


def _check_row(i: int, row: Mapping[str, Any]) -> None:
    try:
        float(row["reward"])
    except (TypeError, ValueError):
        raise ValueError(f"the reward of saved rollout {i} is {row['reward']!r:.80}, which is not a number") from None
    if not isinstance(row["completion"], Iterable):
        raise ValueError(f"the completion of saved rollout {i} must be text or messages, not {row['completion']!r:.80}")


def read_offline(given: Any) -> Offline | None:
    """Saved rollouts, from anything that `read_rows` reads; None for rows without completions and rewards."""
    if not {"completion", "completions"} & set(getattr(given, "column_names", ("completion",))):
        return None
    rows = read_rows(given)
    return Offline(rows) if rows and all("completion" in row and "reward" in row for row in rows) else None


def read_rows(given: Any) -> Sequence[Mapping[str, Any]] | None:
    """Rows from columns, a table, `Results`, a list, or a file of one of these; None for anything else."""
    if isinstance(given, (str, Path)):
        path, given = Path(given), read_file(Path(given))
        if not isinstance(given, Mapping) and not _are_rows(given):
            raise ValueError(f"{path.name} holds no rows: it must be a list of objects, or an object of columns")
    if isinstance(given, Results):
        return given.rollouts
    if isinstance(given, Mapping):
        return _rows_of_columns(given)
    if hasattr(given, "column_names") and not isinstance(given, list):
        return [_without_nulls(given[i]) for i in range(len(given))]
    return given if _are_rows(given) else None


def _are_rows(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(row, Mapping) for row in given)


def _rows_of_columns(given: Mapping[Any, Any]) -> list[Mapping[str, Any]]:
    named = {_NAMES.get(str(name), str(name)): values for name, values in given.items()}
    columns = {name: list(values) for name, values in named.items() if _is_column(values)}
    if odd := [name for name in named.keys() - columns.keys() if name in _ALIGNED]:
        raise ValueError(f"each column of a data set must be a list; {odd[0]!r} is {named[odd[0]]!r:.80}")
    lengths = {name: len(columns[name]) for name in columns if name in _ALIGNED}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of this data set have different lengths: {lengths}")
    n = max(lengths.values(), default=0)
    whole = {name: values for name, values in columns.items() if len(values) == n}
    return [_without_nulls({name: values[i] for name, values in whole.items()}) for i in range(n)]


def _is_column(values: Any) -> bool:
    return isinstance(values, Iterable) and not isinstance(values, str)


def _without_nulls(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row without the nulls of a table, where all objects have the same keys (for instance all tools' arguments)."""
    named = {_NAMES.get(name, name): value for name, value in row.items()}
    return named | {
        name: _filled(named[name]) for name in ("prompt", "completion", "messages", "tools") if name in named
    }


def _filled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(item) for key, item in value.items() if item is not None}
    return [_filled(item) for item in value] if isinstance(value, list) else value


def read_file(path: Path) -> Any:
    if path.is_dir() or (path.is_file() and path.suffix == ".jsonl"):
        return list(read_records(path))
    if not path.is_file():
        raise FileNotFoundError(f"there is no data set at {path}")
    if path.suffix in (".pt", ".pth", ".bin"):
        return _read_torch(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix == ".json":
        try:
            return json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path.name} is not JSON: {error}") from None
    raise ValueError(f"{path.name} is not a supported data set; use a jsonl, parquet, json or torch.save file")


def _read_parquet(path: Path) -> dict[str, list[Any]]:
    """The columns of a table; a column whose metadata has the encoding "json" is decoded."""
    import pyarrow.parquet as parquet
    from pyarrow import ArrowInvalid

    try:
        table = parquet.read_table(path)
    except ArrowInvalid as error:
        raise ValueError(f"{path.name} is not a readable parquet file: {error}") from None
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
            f"{path.name} holds more than plain data, so that reading it could run code; save only lists, dicts, "
            f"strings and numbers ({str(error).splitlines()[0]})"
        ) from None
