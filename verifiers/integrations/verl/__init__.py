"""verl: an environment as an agent loop, its rows as parquet files, or only its rubric as a reward function."""

from __future__ import annotations

from verifiers.integrations.verl.export import export_rows
from verifiers.integrations.verl.rewards import compute_score

__all__ = ["compute_score", "export_rows"]
