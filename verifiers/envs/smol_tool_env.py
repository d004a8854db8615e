"""Tools of smolagents, used as ours."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from verifiers.envs.tool_env import ToolEnv


class SmolToolEnv(ToolEnv):
    """A `ToolEnv` whose tools are those of smolagents: objects of its ``Tool``, or functions marked ``@tool``.

    Functions may stand beside them. All else is as in `ToolEnv`, both ways of writing calls included.
    """

    def __init__(self, tools: Sequence[Any] | None = None, max_turns: int = 10, **kwargs: Any) -> None:
        if importlib.util.find_spec("smolagents") is None:
            raise ImportError("SmolToolEnv takes tools of smolagents: pip install 'verifiers[tools]'")
        super().__init__(tools=tools, max_turns=max_turns, **kwargs)
