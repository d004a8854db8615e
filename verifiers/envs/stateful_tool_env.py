"""Tools that know their rollout: arguments that the model never sees are filled in from its state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from verifiers.envs.tool_env import Answer, ToolEnv
from verifiers.errors import HookError, wrap
from verifiers.tools.protocols import Call
from verifiers.tools.tool import Tool
from verifiers.types import Messages, State


class StatefulToolEnv(ToolEnv):
    """A `ToolEnv` whose tools take more than the model gives.

    ``add_tool(tool, args_to_skip=["cart"])`` hides an argument from the model, and ``update_tool_args`` fills it in for
    each call; a hidden ``state`` or ``messages`` is filled in without it. The calls of a turn run one after another, in
    order: a tool may change what the next one works on.
    """

    def add_tool(self, tool: Callable[..., Any] | Tool, args_to_skip: Iterable[str] = ()) -> None:
        """Offer another tool; the model is not shown the arguments to skip."""
        self.toolbox.add(tool, args_to_skip)
        self._tell_endpoint()

    @property
    def skipped_args(self) -> dict[str, list[str]]:
        """The arguments of each tool that the model is not shown."""
        return {tool.name: sorted(tool.hidden) for tool in self.toolbox}

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Messages, state: State, **kwargs: Any
    ) -> Any:
        """Override, sync or async: the arguments that a tool is called with, made from those that the model gave.

        It is asked before the arguments are checked, so that it may add what the model left out.
        """
        return tool_args

    async def answer_all(self, found: Sequence[Call], messages: Messages, state: State) -> list[Answer]:
        return [await self.answer_one(call, messages, state) for call in found]

    async def fill_in(self, tool: Tool, arguments: dict[str, Any], messages: Messages, state: State) -> dict[str, Any]:
        # A tool that takes any name must not be given a hidden one by the model.
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
            inspect.signature(tool.function).bind(**arguments)
        except TypeError as error:
            raise HookError(f"update_tool_args gave {tool.name} arguments that do not fit: {error}") from error
        return arguments

    def known_args(self, messages: Messages, state: State) -> dict[str, Any]:
        """Hidden arguments that are filled in by their names."""
        return {"state": state, "messages": messages}

    async def _updated(self, tool: Tool, arguments: dict[str, Any], messages: Messages, state: State) -> dict[str, Any]:
        hook = self._hook("update_tool_args")
        assert hook is not None
        try:
            updated = await hook(tool.name, arguments, messages, state)
        except Exception as error:  # foreign code: it is the environment's, so the model is not told
            raise wrap(error, HookError, "update_tool_args") from error
        if not isinstance(updated, dict):
            raise HookError(f"update_tool_args returned {updated!r:.100} for {tool.name}; it must return a dict")
        return updated
