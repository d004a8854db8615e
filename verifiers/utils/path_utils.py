"""Classic import path: where the results of an evaluation go."""

from __future__ import annotations

from pathlib import Path

from verifiers.envs.host_calls import get_results_path
from verifiers.types import EvalConfig

__all__ = ["get_eval_results_path", "get_results_path"]


def get_eval_results_path(config: EvalConfig) -> Path:
    """Inside the environment's own folder if it exists, else under ``outputs/``."""
    folder = Path(config.env_dir_path) / config.env_id.replace("-", "_")
    return get_results_path(config.env_id, config.model, folder / "outputs" if folder.is_dir() else Path("outputs"))
