"""Classic import path: example data sets and answer extraction."""

from verifiers.envs.example_data import load_example_dataset
from verifiers.parsers import (
    BOXED_SYSTEM_PROMPT,
    THINK_BOXED_SYSTEM_PROMPT,
    extract_boxed_answer,
    extract_hash_answer,
    strip_non_numeric,
)

__all__ = [
    "BOXED_SYSTEM_PROMPT",
    "THINK_BOXED_SYSTEM_PROMPT",
    "extract_boxed_answer",
    "extract_hash_answer",
    "load_example_dataset",
    "strip_non_numeric",
]
