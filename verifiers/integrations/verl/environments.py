"""An environment's name and arguments → the environment, loaded once in each process of verl's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from verifiers.envs import Environment
from verifiers.envs.loading import load_environment


def environment_of(extra_info: Any) -> Environment:
    """The environment that a row of `export_rows` names."""
    if not isinstance(extra_info, Mapping) or not extra_info.get("vf_env_id") or not extra_info.get("vf_row"):
        raise ValueError("the row names no environment: make the data with `vf export verl`")
    return _loaded(str(extra_info["vf_env_id"]), str(extra_info.get("vf_env_args") or "{}"))


@lru_cache(maxsize=8)
def _loaded(env_id: str, env_args: str) -> Environment:
    return load_environment(env_id, **json.loads(env_args))


def row_of(extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """The row itself, as the environment had it."""
    row = json.loads(extra_info["vf_row"])
    if not isinstance(row, dict):
        raise ValueError(f"vf_row is no row: {row!r:.80}; make the data with `vf export verl`")
    return row
