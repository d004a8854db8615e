"""An environment's rows → parquet files in verl's columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verifiers.envs import Environment
from verifiers.messages import text_of

AGENT = "verifiers"


def export_rows(
    env: Environment, folder: str | Path, *, env_id: str, env_args: Mapping[str, Any] | None = None, n: int = -1
) -> dict[str, Path]:
    """Write ``train.parquet`` and ``test.parquet``; ``n`` rows of each, or all of them.

    Each row names its environment, so that the agent loop and `compute_score` find it again in verl's own processes.
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
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {
        "data_source": f"verifiers/{env_id}",
        "agent_name": AGENT,
        "prompt": [{"role": message["role"], "content": text_of(message)} for message in messages],
        "ability": str(row.get("task") or "default"),
        "reward_model": {"style": "rule", "ground_truth": str(row.get("answer", ""))},
        "extra_info": {
            "index": index,
            "split": split,
            "vf_env_id": env_id,
            "vf_env_args": json.dumps(dict(env_args)),
            "vf_row": json.dumps(dict(row), default=str),
        },
    }
