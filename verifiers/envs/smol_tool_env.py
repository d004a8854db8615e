"""An environment with tools of smolagents."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from verifiers.envs.tool_env import ToolEnv


class SmolToolEnv(ToolEnv):
    """A `ToolEnv` with tools of smolagents: objects of its ``Tool``, or functions decorated with ``@tool``.

    Plain functions are allowed too. All else is as in `ToolEnv`, including both protocols for tool calls.
    """

    def __init__(self, tools: Sequence[Any] | None = None, max_turns: int = 10, **kwargs: Any) -> None:
        if importlib.util.find_spec("smolagents") is None:
            raise ImportError("SmolToolEnv needs smolagents: pip install 'verifiers[tools]'")
        super().__init__(tools=tools, max_turns=max_turns, **kwargs)
