"""The body of a request to ``/v1/responses`` → chat messages and sampling arguments; a reply → items."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verifiers import errors
from verifiers.chat.tool_calls import ToolCall

# Fields of this endpoint only that have no effect here; those of the chat are in `options.WITHOUT_EFFECT`.
WITHOUT_EFFECT = frozenset(("include", "max_tool_calls", "reasoning", "stream_options"))
_ONLY: dict[str, tuple[Any, ...]] = {"background": (False,), "truncation": ("disabled",)}
_TEXT_PARTS = ("input_text", "output_text", "text")
_LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request in the format of the chat endpoint."""

    messages: list[dict[str, Any]]
    instructions: str
    tools: list[dict[str, Any]] | None
    sampling: dict[str, Any]
    previous_id: Any
    is_stream: bool
    is_stored: bool
    described: dict[str, Any]


def read_body(body: Mapping[str, Any]) -> Asked:
    """Read a request; unsupported features are refused by name."""
    rest = {name: value for name, value in body.items() if value is not None and name not in WITHOUT_EFFECT}
    for name, allowed in _ONLY.items():
        if rest.pop(name, allowed[0]) not in allowed:
            raise errors.RequestRefusedError(f"{name}={body[name]!r} is not supported; leave it out")
    if "input" not in rest and "previous_response_id" not in rest:
        raise errors.RequestRefusedError("'input' is missing: a text or a list of items")
    instructions = rest.pop("instructions", "")
    if not isinstance(instructions, str):
        raise errors.RequestRefusedError("'instructions' must be a text")
    messages, tools = read_items(rest.pop("input", [])), _read_tools(rest.pop("tools", None))
    previous, is_stream, is_stored = (
        rest.pop(name, default)
        for name, default in (("previous_response_id", None), ("stream", False), ("store", True))
    )
    rest.pop("model", None)
    return Asked(
        messages=messages,
        instructions=instructions,
        tools=tools,
        sampling=_read_sampling(rest, body),
        previous_id=previous,
        is_stream=is_stream is True,
        is_stored=is_stored is not False,
        described=_described(body),
    )


def _read_sampling(rest: dict[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    text, choice = rest.pop("text", {}), rest.pop("tool_choice", None)
    if not isinstance(text, Mapping):
        raise errors.RequestRefusedError("'text' must be an object with a format")
    if "max_output_tokens" in rest:
        limit = rest.pop("max_output_tokens")
        if rest.get("max_tokens", limit) != limit:
            raise errors.RequestRefusedError("max_output_tokens and max_tokens differ but mean the same: send only one")
        rest["max_tokens"] = limit
    if (wanted := text.get("format")) is not None:
        rest["response_format"] = _read_format(wanted)
    if choice is not None:
        is_named = isinstance(choice, Mapping) and choice.get("type") == "function" and "name" in choice
        rest["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}} if is_named else choice
    include = body.get("include") or []
    if not isinstance(include, list):
        raise errors.RequestRefusedError("'include' must be a list of names")
    if rest.get("top_logprobs") or _LOGPROBS in include:
        rest["logprobs"] = True
    return rest


def _read_format(wanted: Any) -> Any:
    if isinstance(wanted, Mapping) and wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {key: value for key, value in wanted.items() if key != "type"}}
    return wanted


def _read_tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise errors.RequestRefusedError("'tools' must be a list of tools")
    for tool in tools:
        if tool.get("type") != "function":
            raise errors.RequestRefusedError(
                f"tools of type {tool.get('type')!r:.80} are not supported, only functions"
            )
    kept = ("name", "description", "parameters", "strict")
    return [
        {"type": "function", "function": {name: tool[name] for name in kept if tool.get(name) is not None}}
        for tool in tools
    ]


# --- items --------------------------------------------------------------------------------------------------------


def read_items(items: Any) -> list[dict[str, Any]]:
    """A text or a list of items as chat messages; consecutive calls belong to one message.

    >>> read_items([{"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]}])
    [{'role': 'user', 'content': '2+2?'}]
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise errors.RequestRefusedError(f"'input' must be a text or a list of items, not {items!r:.80}")
    messages: list[dict[str, Any]] = []
    for item in items:
        _add_item(messages, item)
    return messages


def _add_item(messages: list[dict[str, Any]], item: Any) -> None:
    if not isinstance(item, Mapping):
        raise errors.RequestRefusedError(f"an item of 'input' must be an object, not {item!r:.80}")
    kind = item.get("type") or "message"
    if kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        messages.append({"role": role, "content": _text(item.get("content"))})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        answer = {"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"))}
        messages.append(answer)
    elif kind != "reasoning":  # earlier reasoning is not shown to the model again
        raise errors.RequestRefusedError(f"items of type {kind!r:.80} are not supported")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise errors.RequestRefusedError(f"content must be a text or a list of parts, not {content!r:.80}")
    for part in content:
        if (
            not isinstance(part, Mapping)
            or part.get("type") not in _TEXT_PARTS
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise errors.RequestRefusedError(f"the model only reads text; a part of type {kind!r:.80} is not supported")
    return "".join(part["text"] for part in content)


# --- the reply ----------------------------------------------------------------------------------------------------


def write_message(item_id: str, text: str | None, *, status: str) -> dict[str, Any]:
    """A message as an item; without a text, an empty one that a stream will fill."""
    content = [] if text is None else [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def write_call(call: ToolCall) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": f"fc_{call['id']}",
        "type": "function_call",
        "status": "completed",
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
    }


def write_response(
    response: Mapping[str, Any], output: list[dict[str, Any]], usage: Mapping[str, Any], *, finish_reason: str | None
) -> dict[str, Any]:
    is_cut = finish_reason == "length"
    return {
        **response,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _described(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a response that repeat its request."""
    text = body.get("text") or {}
    return {
        "object": "response",
        "created_at": int(time.time()),
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "store": body.get("store") is not False,
        "temperature": body.get("temperature") if body.get("temperature") is not None else 1.0,
        "text": {**text, "format": text.get("format") or {"type": "text"}} if isinstance(text, Mapping) else {},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p") if body.get("top_p") is not None else 1.0,
        "truncation": "disabled",
        "user": body.get("user"),
    }
