"""Tools with arguments that the model does not see, which are filled in from the rollout's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from verifiers.envs.tool_env import Answer, ToolEnv
from verifiers.errors import HookError, wrap
from verifiers.signatures import signature_of
from verifiers.tools.protocols import Call
from verifiers.tools.tool import Tool
from verifiers.types import Messages, State


class StatefulToolEnv(ToolEnv):
    """A `ToolEnv` whose tools have arguments that the model does not pass.

    ``add_tool(tool, args_to_skip=["cart"])`` hides an argument from the model, and ``update_tool_args`` fills it in for
    each call; a hidden ``state`` or ``messages`` is filled in automatically. The calls of a turn run one after another,
    in order, because one tool may change what the next one uses.
    """

    def add_tool(self, tool: Callable[..., Any] | Tool, args_to_skip: Iterable[str] = ()) -> None:
        """Add a tool. The model does not see the arguments to skip."""
        self.toolbox.add(tool, args_to_skip)
        self._tell_endpoint()

    @property
    def skipped_args(self) -> dict[str, list[str]]:
        """The hidden arguments of each tool."""
        return {tool.name: sorted(tool.hidden) for tool in self.toolbox}

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Messages, state: State, **kwargs: Any
    ) -> Any:
        """Override, sync or async: return the arguments of a tool call, given those from the model.

        It is called before the arguments are checked, so that it may add missing ones.
        """
        return tool_args

    async def answer_all(self, found: Sequence[Call], messages: Messages, state: State) -> list[Answer]:
        return [await self.answer_one(call, messages, state) for call in found]

    async def fill_in(self, tool: Tool, arguments: dict[str, Any], messages: Messages, state: State) -> dict[str, Any]:
        # For a tool with **kwargs, the model must not be able to pass a hidden argument.
        given = {name: value for name, value in arguments.items() if not (tool.takes_more and name in tool.hidden)}
        arguments = given
        if type(self).update_tool_args is not StatefulToolEnv.update_tool_args:
            arguments = await self._updated(tool, dict(given), messages, state)
        added = {name: value for name, value in arguments.items() if name not in given}
        checked = tool.check({name: arguments[name] for name in given if name in arguments}, filled_in=added)
        known = self.known_args(messages, state)
        filled = {name: value for name, value in known.items() if name in tool.hidden and name not in added}
        arguments = {**checked, **added, **filled}
        try:
            signature_of(tool.function).bind(**arguments)
        except TypeError as error:
            raise HookError(f"update_tool_args returned invalid arguments for {tool.name}: {error}") from error
        return arguments

    def known_args(self, messages: Messages, state: State) -> dict[str, Any]:
        """Hidden arguments that are filled in automatically, by name."""
        return {"state": state, "messages": messages}

    async def _updated(self, tool: Tool, arguments: dict[str, Any], messages: Messages, state: State) -> dict[str, Any]:
        hook = self._hook("update_tool_args")
        assert hook is not None
        try:
            updated = await hook(tool.name, arguments, messages, state)
        except Exception as error:  # foreign code of the environment, so it is not the model's fault
            raise wrap(error, HookError, "update_tool_args") from error
        if not isinstance(updated, dict):
            raise HookError(f"update_tool_args returned {updated!r:.100} for {tool.name}; it must return a dict")
        return updated
