"""Tools that models can call: made from functions, called safely; a few are ready-made."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Corpus": "corpus",
    "MCPServer": "mcp_server",
    "MCPServerConfig": "mcp_server",
    "Tool": "tool",
    "ToolBox": "calling",
    "as_tool": "tool",
    "ask": "asking",
    "bash": "programs",
    "calculator": "arithmetic",
    "convert_func_to_oai_tool": "tool",
    "from_schema": "tool",
    "python": "programs",
    "python_executor": "programs",
    "search": "corpus",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'verifiers.tools' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"verifiers.tools.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
