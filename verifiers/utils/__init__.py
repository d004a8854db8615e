"""Import paths of classic 0.1.x; these modules only re-export names from elsewhere in the package."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = frozenset(
    (
        "async_utils",
        "client_utils",
        "config_utils",
        "data_utils",
        "decorators",
        "env_utils",
        "error_utils",
        "eval_utils",
        "logging_utils",
        "message_utils",
        "model_utils",
        "path_utils",
        "processing_utils",
        "response_utils",
        "save_utils",
        "tool_utils",
        "tools",
    )
)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'verifiers.utils' has no attribute {name!r}")
    return importlib.import_module(f"verifiers.utils.{name}")
