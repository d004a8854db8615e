"""An environment's name and arguments → the environment, loaded once in each verl process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from verifiers.envs import Environment
from verifiers.envs.loading import load_environment


def environment_of(extra_info: Any) -> Environment:
    """The environment of a row written by `export_rows`."""
    if not isinstance(extra_info, Mapping) or not extra_info.get("vf_env_id") or not extra_info.get("vf_row"):
        raise ValueError("the row has no environment: create the data with `vf export verl`")
    return _loaded(str(extra_info["vf_env_id"]), str(extra_info.get("vf_env_args") or "{}"))


@lru_cache(maxsize=8)
def _loaded(env_id: str, env_args: str) -> Environment:
    return load_environment(env_id, **_object(env_args, "vf_env_args"))


def row_of(extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """The original row of the environment."""
    return _object(extra_info["vf_row"], "vf_row")


def _object(text: Any, column: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (TypeError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{column} is not a JSON object: {text!r:.80}; create the data with `vf export verl`")
    return found
