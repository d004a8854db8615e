"""The schema of an environment's actions → tools; its observations → text for the model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verifiers.tools.tool import Tool, from_schema, usable_name

Act = Callable[..., Any]
"""Executes an action: gets the model's arguments by name, and is bound to the action's fixed fields."""


def is_mcp(schema: Mapping[str, Any]) -> bool:
    """Are the actions calls of MCP tools, which the environment lists itself?"""
    return {"tool_name", "arguments"} <= (schema.get("properties") or {}).keys()


def mcp_tools(listed: Sequence[Mapping[str, Any]], make: Callable[[dict[str, Any]], Act]) -> list[Tool]:
    return [
        from_schema(
            usable_name(str(tool["name"])),
            make({"type": "call_tool", "tool_name": tool["name"]}),
            tool.get("input_schema") or tool.get("inputSchema") or {},
            description=str(tool.get("description") or ""),
            sequential=True,
        )
        for tool in listed
    ]


def action_tools(schema: Mapping[str, Any], make: Callable[[dict[str, Any]], Act]) -> list[Tool]:
    """One tool for each kind of action; a schema without ``oneOf`` or ``anyOf`` is one kind.

    >>> echo = {"title": "EchoAction", "properties": {"message": {"type": "string"}, "metadata": {"type": "object"}}}
    >>> (tool,) = action_tools(echo, lambda fixed: print)
    >>> tool.name, list(tool.schema["function"]["parameters"]["properties"])
    ('echo', ['message'])
    """
    defined = schema.get("$defs") or {}
    choices = schema.get("oneOf") or schema.get("anyOf")
    if not choices:
        return [_action_tool(schema, defined, make)]
    return [_action_tool(_found(choice, defined), defined, make) for choice in choices]


def _found(schema: Mapping[str, Any], defined: Mapping[str, Any]) -> Mapping[str, Any]:
    found = defined.get(str(schema.get("$ref", "")).rpartition("/")[2], schema)
    return found if isinstance(found, Mapping) else schema


def _action_tool(schema: Mapping[str, Any], defined: Mapping[str, Any], make: Callable[[dict[str, Any]], Act]) -> Tool:
    properties = {name: one for name, one in (schema.get("properties") or {}).items() if name != "metadata"}
    fixed = {name: one["const"] for name, one in properties.items() if "const" in one}
    shown = {name: one for name, one in properties.items() if name not in fixed}
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": shown,
        "required": [name for name in schema.get("required") or () if name in shown],
    }
    if defined:
        parameters["$defs"] = dict(defined)
    title = str(fixed.get("type") or schema.get("title") or "act")
    return from_schema(
        usable_name(_snake(title)), make(fixed), parameters, description=_described(schema), sequential=True
    )


def _described(schema: Mapping[str, Any]) -> str:
    return " ".join(str(schema.get("description") or "Take this action.").split())


def _snake(title: str) -> str:
    """
    >>> _snake("MoveUpAction"), _snake("call_tool"), _snake("Action")
    ('move_up', 'call_tool', 'action')
    """
    short = title.removesuffix("Action") or title
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", short).lower()


def as_text(observation: Any) -> str:
    """An observation as the model reads it: its text if it has nothing else, otherwise its fields as JSON.

    >>> as_text({"board": "X.O", "metadata": {}}), as_text({"score": 1, "text": "go on"})
    ('X.O', '{"score": 1, "text": "go on"}')
    """
    if observation is None:
        return ""
    if not isinstance(observation, Mapping):
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
    told = {
        name: value for name, value in observation.items() if name != "metadata" and value not in (None, "", [], {})
    }
    if "tool_name" in told:  # the result of an MCP tool
        return as_text(_result(told.get("error") or told.get("result", "")))
    if len(told) == 1 and isinstance(only := next(iter(told.values())), str):
        return only
    return json.dumps(told, ensure_ascii=False)


def _result(result: Any) -> Any:
    """The value in an MCP result, or the texts of its content."""
    if not isinstance(result, Mapping):
        return result
    if result.get("data") is not None:
        return result["data"]
    texts = [part.get("text") for part in result.get("content") or () if isinstance(part, Mapping)]
    return "\n".join(text for text in texts if isinstance(text, str)) if any(texts) else dict(result)
