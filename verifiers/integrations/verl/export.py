"""An environment's rows → parquet files in verl's columns."""

from __future__ import annotations

import datetime
import decimal
import json
import uuid
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from verifiers.envs import Environment
from verifiers.messages import text_of

AGENT = "verifiers"


def export_rows(
    env: Environment, folder: str | Path, *, env_id: str, env_args: Mapping[str, Any] | None = None, n: int = -1
) -> dict[str, Path]:
    """Write ``train.parquet`` and ``test.parquet`` with ``n`` rows each (-1: all).

    Each row contains its environment's name, for the agent loop and `compute_score` in verl's processes.
    """
    import pyarrow
    import pyarrow.parquet

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for split, rows in (("train", env.get_dataset(n)), ("test", env.get_eval_dataset(n))):
        records = [_record(row, i, split, env_id, env_args or {}) for i, row in enumerate(rows)]
        written[split] = folder / f"{split}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), written[split])
    return written


def _record(row: Mapping[str, Any], index: int, split: str, env_id: str, env_args: Mapping[str, Any]) -> dict[str, Any]:
    prompt, answer = row["prompt"], row.get("answer")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {
        "data_source": f"verifiers/{env_id}",
        "agent_name": AGENT,
        "prompt": [{"role": message["role"], "content": text_of(message)} for message in messages],
        "ability": str(row.get("task") or "default"),
        "reward_model": {"style": "rule", "ground_truth": "" if answer is None else str(answer)},
        "extra_info": {
            "index": index,
            "split": split,
            "vf_env_id": env_id,
            "vf_env_args": json.dumps(dict(env_args), default=_as_json),
            "vf_row": json.dumps(dict(row), default=_as_json),
        },
    }


def _as_json(value: Any) -> Any:
    """Convert to JSON types: arrays to lists, dates and the like to text.

    Other types raise, because ``str`` of an arbitrary object would be passed to the rubric in its place.
    """
    if hasattr(value, "tolist"):  # NumPy
        return value.tolist()
    if isinstance(value, (datetime.date, datetime.time, decimal.Decimal, uuid.UUID, PurePath)):
        return str(value)
    raise TypeError(f"a row contains {value!r:.80}, a {type(value).__name__}, which is not JSON: make it plain data")
