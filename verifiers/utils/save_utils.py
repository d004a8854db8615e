"""Classic import path: rollouts as plain data, and their files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from verifiers.envs.evaluation import make_dataset
from verifiers.envs.host_calls import to_output
from verifiers.results import Results
from verifiers.store import encode
from verifiers.types import RolloutOutput, State

__all__ = [
    "get_hf_hub_dataset_name",
    "load_outputs",
    "make_dataset",
    "make_serializable",
    "sanitize_metadata",
    "save_metadata",
    "save_new_outputs",
    "save_outputs",
    "save_to_disk",
    "state_to_output",
    "states_to_outputs",
]


def make_serializable(value: Any) -> Any:
    """Convert a value to JSON types: ``json.dumps(value, default=make_serializable)``.

    >>> json.dumps({"where": Path("a/b"), "why": ValueError("x")}, default=make_serializable)
    '{"where": "a/b", "why": "ValueError(\\'x\\')"}'
    """
    if callable(dump := getattr(value, "model_dump", None)):
        return dump()
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Path):
        return value.as_posix()
    if isinstance(value, BaseException):
        return repr(value)
    return dict(value) if isinstance(value, Mapping) else str(value)


def state_to_output(state: State, state_columns: Sequence[str] = ()) -> RolloutOutput:
    """One rollout as plain data, with the named columns of its state."""
    return to_output(state, state_columns)


def states_to_outputs(states: Iterable[State], state_columns: Sequence[str] = ()) -> list[RolloutOutput]:
    return [to_output(state, state_columns) for state in states]


def save_outputs(outputs: Iterable[Mapping[str, Any]], results_path: Path, mode: str = "w") -> None:
    """Write rollouts into ``results.jsonl`` of a folder, one per line."""
    folder = Path(results_path)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "results.jsonl", f"{mode}b") as file:
        for output in outputs:
            file.write(encode(dict(output)))


def save_new_outputs(new_outputs: Iterable[Mapping[str, Any]], results_path: Path) -> None:
    """Append rollouts to those in a folder."""
    save_outputs(new_outputs, results_path, mode="a")


def load_outputs(results_path: Path) -> list[RolloutOutput]:
    """The rollouts in a folder; an incomplete last line is ignored."""
    lines = (Path(results_path) / "results.jsonl").read_bytes().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n") and line.strip()]
    return [RolloutOutput(json.loads(line)) for line in whole]


def save_metadata(metadata: Mapping[str, Any], result_path: Path) -> None:
    """Write ``metadata.json`` of a folder."""
    folder = Path(result_path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metadata.json").write_text(json.dumps(sanitize_metadata(metadata), default=make_serializable))


def sanitize_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a run's metadata that is saved with its rollouts.

    >>> sanitize_metadata({"model": "m", "date": "today", "path_to_save": "a/b"})
    {'model': 'm'}
    """
    return {name: value for name, value in metadata.items() if name not in ("path_to_save", "date")}


def save_to_disk(outputs: Iterable[Mapping[str, Any]], metadata: Mapping[str, Any], path: Path) -> None:
    """Write rollouts (a list, or a ``Dataset`` of them) and the metadata of their run into a folder."""
    save_outputs(outputs, path)
    save_metadata(metadata, path)


def get_hf_hub_dataset_name(results: Results) -> str:
    """A name for a run on the hub: environment, model, number of examples, rollouts per example."""
    of = results.metadata
    return f"{of['env_id']}_{of['model'].replace('/', '_')}_n{of['num_examples']}_r{of['rollouts_per_example']}"
