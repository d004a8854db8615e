"""Classic import path: where the results of an evaluation go."""

from __future__ import annotations

import uuid
from pathlib import Path

from verifiers.store import safe_name
from verifiers.types import EvalConfig

__all__ = ["get_eval_results_path", "get_results_path"]


def get_results_path(env_id: str, model: str, base_path: Path = Path("outputs")) -> Path:
    """A new folder name each time: ``{base_path}/evals/{env}--{model}/{8 hex}``."""
    return Path(base_path) / "evals" / safe_name(f"{env_id}--{model}") / uuid.uuid4().hex[:8]


def get_eval_results_path(config: EvalConfig) -> Path:
    """Inside the environment's own folder where there is one here, else under ``outputs/``."""
    folder = Path(config.env_dir_path) / config.env_id.replace("-", "_")
    return get_results_path(config.env_id, config.model, folder / "outputs" if folder.is_dir() else Path("outputs"))
