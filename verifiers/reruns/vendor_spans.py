"""Span attributes of OpenInference and of Vercel's AI SDK → those of the GenAI semantic conventions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verifiers.reruns.json_values import json_value

_MESSAGE = re.compile(r"llm\.(input|output)_messages\.(\d+)\.message\.(.+)")
_TOOL_CALL = re.compile(r"tool_calls\.(\d+)\.tool_call\.(?:function\.)?(id|name|arguments)")
_PART = re.compile(r"contents\.(\d+)\.message_content\.text")
_TOOL = re.compile(r"llm\.tools\.(\d+)\.tool\.json_schema")
_SIDES = {"input": "gen_ai.prompt", "output": "gen_ai.completion"}
_SAME = {
    "llm.model_name": "gen_ai.request.model",
    "llm.token_count.prompt": "gen_ai.usage.input_tokens",
    "llm.token_count.completion": "gen_ai.usage.output_tokens",
    "ai.model.id": "gen_ai.request.model",
    "ai.usage.promptTokens": "gen_ai.usage.input_tokens",
    "ai.usage.completionTokens": "gen_ai.usage.output_tokens",
}


def in_conventions(about: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a span, with those of a vendor added under the names of the conventions.

    >>> found = in_conventions({"openinference.span.kind": "LLM", "llm.input_messages.0.message.content": "2+2?"})
    >>> found["gen_ai.operation.name"], found["gen_ai.prompt.0.content"]
    ('chat', '2+2?')
    """
    if about.get("openinference.span.kind") == "LLM":
        found = _of_openinference(about)
    elif str(about.get("ai.operationId", "")).endswith((".doGenerate", ".doStream")):
        found = _of_vercel(about)
    else:
        return about
    same = {theirs: about[ours] for ours, theirs in _SAME.items() if ours in about}
    return {"gen_ai.operation.name": "chat", **same, **found, **about}


def _of_openinference(about: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    texts: dict[str, dict[int, str]] = {}
    tools: dict[int, Any] = {}
    for name, value in about.items():
        if tool := _TOOL.fullmatch(name):
            tools[int(tool[1])] = json_value(value)
        if not (message := _MESSAGE.fullmatch(name)):
            continue
        place, key = f"{_SIDES[message[1]]}.{message[2]}", message[3]
        if part := _PART.fullmatch(key):
            texts.setdefault(place, {})[int(part[1])] = str(value)
        elif call := _TOOL_CALL.fullmatch(key):
            found[f"{place}.tool_calls.{call[1]}.{call[2]}"] = value
        else:
            found[f"{place}.{key}"] = value
    for place, parts in texts.items():
        found[f"{place}.content"] = "\n".join(text for _, text in sorted(parts.items()))
    if tools:
        found["gen_ai.tool.definitions"] = [tool for _, tool in sorted(tools.items())]
    return found


def _of_vercel(about: Mapping[str, Any]) -> dict[str, Any]:
    asked = json_value(about.get("ai.prompt.messages"))
    calls = json_value(about.get("ai.response.toolCalls"))
    parts = [{"type": "text", "content": about.get("ai.response.text")}] if about.get("ai.response.text") else []
    parts += (
        [_part({"type": "tool-call", **one}) for one in calls if isinstance(one, dict)]
        if isinstance(calls, list)
        else []
    )
    found: dict[str, Any] = {
        "gen_ai.input.messages": [_message(one) for one in asked if isinstance(one, dict)]
        if isinstance(asked, list)
        else []
    }
    if parts:
        reason = {"finish_reason": str(about.get("ai.response.finishReason") or "stop").replace("-", "_")}
        found["gen_ai.output.messages"] = [{"role": "assistant", "parts": parts, **reason}]
    return found


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    return {"role": message.get("role"), "parts": [_part(one) for one in parts if isinstance(one, dict)]}


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind, called = part.get("type"), part.get("toolCallId")
    if kind == "tool-call":
        arguments = part.get("input", part.get("args"))
        return {"type": "tool_call", "id": called, "name": part.get("toolName"), "arguments": arguments}
    if kind == "tool-result":
        return {"type": "tool_call_response", "id": called, "response": part.get("output", part.get("result"))}
    return {"type": kind, "content": part.get("text")}
