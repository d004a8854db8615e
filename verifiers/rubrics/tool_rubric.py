"""A completion → the number of calls of each tool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from verifiers.messages import text_of
from verifiers.parsers import Parser, XMLParser
from verifiers.parsers.parser import messages_in
from verifiers.rubrics.rubric import Rubric
from verifiers.tools.protocols import TAG, native_calls, tagged_calls
from verifiers.tools.tool import Tool, as_tool
from verifiers.types import Messages


class ToolRubric(Rubric):
    """Counts tool calls: the metrics ``total_tool_calls`` and ``<tool>_calls``, which are not part of the reward.

    A `ToolEnv` reports both by itself; this is for other environments, and for rewards that use the counts.

    >>> def add(a: int, b: int) -> int: return a + b
    >>> call = {"id": "0", "function": {"name": "add", "arguments": "{}"}}
    >>> ToolRubric([add]).score_rollout_sync("", [{"role": "assistant", "tool_calls": [call]}], "", {})
    {'total_tool_calls': 1.0, 'add_calls': 1.0, 'reward': 0.0}
    """

    def __init__(
        self, tools: Sequence[Callable[..., Any] | Tool] | None = None, parser: Parser | None = None, **kwargs: Any
    ) -> None:
        super().__init__(parser=parser, **kwargs)
        self.tools: list[Callable[..., Any] | Tool] = []
        self.tool_names: list[str] = []
        self.add_metric(self.total_tool_calls)
        for tool in tools or ():
            self.add_tool(tool)

    def add_tool(self, tool: Callable[..., Any] | Tool) -> None:
        """Count one more tool by its name."""
        self.tools.append(tool)
        self.tool_names.append(as_tool(tool).name)
        self.add_metric(self.get_tool_call_count_func(self.tool_names[-1]))

    async def total_tool_calls(self, completion: Messages) -> float:
        """How many tool calls the model made, including failed ones."""
        return float(self._counted(completion).total())

    def get_tool_call_count_func(self, tool_name: str) -> Callable[..., Any]:
        """A function that counts the calls of one tool, for use as a metric or a reward."""

        async def tool_call_count_func(completion: Messages) -> float:
            return float(self._counted(completion)[tool_name])

        tool_call_count_func.__name__ = f"{tool_name}_calls"
        return tool_call_count_func

    def _counted(self, completion: Messages) -> Counter[str]:
        return count_calls(completion, tags=isinstance(self.parser, XMLParser) and hasattr(self.parser.parse(""), TAG))


def count_calls(completion: Any, *, tags: bool = False) -> Counter[str]:
    """How often each name was called in a completion; with ``tags``, calls are read from ``<tool>`` tags.

    >>> count_calls('<tool>{"name": "add"}</tool>', tags=True)
    Counter({'add': 1})
    """
    counted: Counter[str] = Counter()
    for message in Parser().get_assistant_messages(messages_in(completion)):
        found = tagged_calls(text_of(message)).calls if tags else native_calls(message)
        counted.update(call.name for call in found if call.name or not tags)
    return counted
