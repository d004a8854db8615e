"""The body of a request to ``/v1/messages`` → chat messages, tools and sampling arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from verifiers.errors import RequestRefusedError

# Fields of this endpoint only that have no effect here; those of the chat are in `options.WITHOUT_EFFECT`.
WITHOUT_EFFECT = frozenset(("cache_control", "context_management", "inference_geo", "thinking"))
_THOUGHTS = ("thinking", "redacted_thinking")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

Messages = list[dict[str, Any]]


def read_request(body: Mapping[str, Any]) -> tuple[Messages, list[dict[str, Any]] | None, dict[str, Any]]:
    """Read a request; unsupported features are refused by name."""
    rest = {name: value for name, value in body.items() if value is not None and name not in WITHOUT_EFFECT}
    said, system = rest.pop("messages", None), rest.pop("system", "")
    if not isinstance(said, list) or not said:
        raise RequestRefusedError("'messages' must be a non-empty list of messages")
    messages: Messages = [{"role": "system", "content": _text(system)}] if system else []
    for message in said:
        messages += _read_message(message)
    tools = _read_tools(rest.pop("tools", None))
    if "stop_sequences" in rest:
        rest["stop"] = rest.pop("stop_sequences") or None
    if "tool_choice" in rest:
        rest["tool_choice"] = _read_choice(rest["tool_choice"])
    return messages, tools, _with_format(rest)


def _with_format(rest: dict[str, Any]) -> dict[str, Any]:
    """Convert the format of structured output, from ``output_config.format`` or the older ``output_format``."""
    settings = rest.pop("output_config", {})
    if not isinstance(settings, Mapping):
        raise RequestRefusedError("'output_config' must be an object with a format")
    wanted = [one for one in (rest.pop("output_format", None), settings.get("format")) if one is not None]
    if not wanted:
        return rest
    if len(wanted) > 1 and wanted[0] != wanted[1]:
        raise RequestRefusedError("output_format and output_config.format differ but mean the same: send only one")
    schema = wanted[0].get("schema") if isinstance(wanted[0], Mapping) else None
    if not isinstance(schema, Mapping) or wanted[0].get("type") != "json_schema":
        raise RequestRefusedError('a format must be {"type": "json_schema", "schema": …}')
    written = {"name": "output", "schema": schema, "strict": True}
    return {**rest, "response_format": {"type": "json_schema", "json_schema": written}}


def _read_choice(choice: Any) -> Any:
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise RequestRefusedError(f"'tool_choice' must be an object of type auto, any, tool or none: {choice!r:.80}")
    return _CHOICES[kind]


def _read_tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestRefusedError("'tools' must be a list of tools")
    if hosted := [tool["type"] for tool in tools if tool.get("type") not in (None, "custom")]:
        raise RequestRefusedError(
            f"tools of type {hosted[0]!r:.80} are not supported; define a tool by a name and an input_schema"
        )
    return [_read_tool(tool) for tool in tools]


def _read_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema"), "strict": tool.get("strict")}
    described = {"description": tool.get("description"), **function}
    return {"type": "function", "function": {name: value for name, value in described.items() if value is not None}}


# --- messages -----------------------------------------------------------------------------------------------------


def _read_message(message: Any) -> Iterator[dict[str, Any]]:
    """The chat messages of one turn: a turn may contain tool results and user text, which are separate messages."""
    if not isinstance(message, Mapping):
        raise RequestRefusedError(f"a message must be an object with a role and content, not {message!r:.80}")
    content = message.get("content")
    if isinstance(content, str):
        yield {"role": message.get("role"), "content": content}
        return
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise RequestRefusedError(f"content must be a text or a list of blocks, not {content!r:.80}")
    for block in content:
        if block.get("type") == "tool_result":
            result = _text(block.get("content") or "")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
    calls = [_read_call(block) for block in content if block.get("type") == "tool_use"]
    skipped = ("tool_use", "tool_result", *_THOUGHTS)
    rest = [block for block in content if block.get("type") not in skipped]
    if rest or calls:
        said: dict[str, Any] = {"role": message.get("role"), "content": _text(rest)}
        yield {**said, "tool_calls": calls} if calls else said


def _read_call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False)}
    return {"id": block.get("id"), "type": "function", "function": function}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRefusedError(f"content must be a text or a list of blocks, not {content!r:.80}")
    for block in content:
        if not isinstance(block, Mapping) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
            raise RequestRefusedError(f"the model only reads text; a block of type {kind!r:.80} is not supported")
    return "".join(block["text"] for block in content)
