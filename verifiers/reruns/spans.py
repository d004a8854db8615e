"""Files of OpenTelemetry spans → the model calls in them, by the old and new GenAI semantic conventions.

`vendor_spans` translates the attributes of OpenInference and of Vercel's AI SDK. Files may contain OTLP/JSON (one
value, or one object per line, as collectors write it) or the JSON that OpenTelemetry SDKs write for single spans.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers.messages import as_messages, called_functions, text_of
from verifiers.reruns.json_values import json_value
from verifiers.reruns.vendor_spans import in_conventions
from verifiers.types import ChatMessage

_CALLS = ("chat", "completion", "generate_content", "text_completion")
_INDEXED = {"input": ("gen_ai.prompt.", "llm.prompts."), "output": ("gen_ai.completion.", "llm.completions.")}
_KINDS = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One span, whatever format it was read from."""

    trace: str
    id: str
    parent: str
    name: str
    start: float | str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One model call; ``reply`` is None if there was none, or if the trace was recorded without content."""

    span: Span
    prompt: list[ChatMessage]
    reply: ChatMessage | None
    finish_reason: str | None
    tools: list[dict[str, Any]] | None


# --- spans --------------------------------------------------------------------------------------------------------


def read_spans(text: str) -> list[Span]:
    """All spans in the text of a file."""
    return [span for value in _values(text) for span in _spans_in(value)]


def calls_in(spans: Sequence[Span]) -> list[Call]:
    """The model calls in a trace, without duplicates.

    A span that an exporter sent twice counts once. If a framework and the SDK below it both recorded a call, so that
    two nested spans have the same reply, only the inner one counts.
    """
    by_id = {span.id if span.id not in ("", "None") else f"#{i}": span for i, span in enumerate(spans)}
    found = {key: call for key, span in by_id.items() if (call := call_in(span)) is not None}
    for call in list(found.values()):
        parent, seen = call.span.parent, set[str]()
        while parent in by_id and parent not in seen:
            seen.add(parent)
            if parent in found and _reply(found[parent]) == _reply(call):
                del found[parent]
            parent = by_id[parent].parent
    return list(found.values())


def _reply(call: Call) -> tuple[str, str]:
    reply = call.reply or {}
    return text_of(reply).strip(), repr([(one.get("name"), one.get("arguments")) for one in called_functions(reply)])


def _values(text: str) -> Iterator[Any]:
    """The JSON values of a file, which may be one value, one per line, or several in sequence."""
    decoder, at = json.JSONDecoder(), 0
    while True:
        while at < len(text) and text[at] in " \t\r\n,\ufeff":
            at += 1
        if at == len(text):
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            line = text.count("\n", 0, at) + 1
            raise ValueError(f"line {line} is not JSON: {error}") from error
        yield value


def _spans_in(value: Any) -> Iterator[Span]:
    if isinstance(value, list):
        for one in value:
            yield from _spans_in(one)
        return
    if not isinstance(value, dict):
        raise ValueError(f"a span must be an object, not {value!r:.80}")
    if "resourceSpans" in value:
        for resource in value["resourceSpans"]:
            for scope in resource.get("scopeSpans") or resource.get("instrumentationLibrarySpans") or ():
                yield from map(_of_otlp, scope.get("spans") or ())
    elif "spanId" in value:
        yield _of_otlp(value)
    elif isinstance(value.get("context"), dict) and "trace_id" in value["context"]:
        yield _of_sdk(value)
    else:
        raise ValueError(f"an object with {', '.join(list(value)[:5]) or 'no keys'} is neither OTLP/JSON nor a span")


def _of_otlp(span: Mapping[str, Any]) -> Span:
    status = span.get("status") or {}
    return Span(
        trace=str(span.get("traceId")),
        id=str(span.get("spanId")),
        parent=str(span.get("parentSpanId") or ""),
        name=str(span.get("name") or ""),
        start=float(span.get("startTimeUnixNano") or 0),
        attributes=in_conventions(_attributes(span.get("attributes"))),
        events=[(str(one.get("name")), _attributes(one.get("attributes"))) for one in span.get("events") or ()],
        error=(status.get("message") or "it failed") if status.get("code") in (2, "STATUS_CODE_ERROR") else None,
    )


def _of_sdk(span: Mapping[str, Any]) -> Span:
    status = span.get("status") or {}
    return Span(
        trace=str(span["context"]["trace_id"]),
        id=str(span["context"].get("span_id")),
        parent=str(span.get("parent_id") or ""),
        name=str(span.get("name") or ""),
        start=str(span.get("start_time") or ""),
        attributes=in_conventions(dict(span.get("attributes") or {})),
        events=[(str(one.get("name")), dict(one.get("attributes") or {})) for one in span.get("events") or ()],
        error=(status.get("description") or "it failed") if status.get("status_code") == "ERROR" else None,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    """OTLP's list of attributes as a dict.

    >>> _attributes([{"key": "n", "value": {"intValue": "4"}}, {"key": "who", "value": {"stringValue": "me"}}])
    {'n': 4, 'who': 'me'}
    """
    return {str(pair["key"]): _value(pair.get("value") or {}) for pair in pairs or ()}


def _value(value: Mapping[str, Any]) -> Any:
    for kind, inner in value.items():
        if kind == "intValue":
            return int(inner)
        if kind == "arrayValue":
            return [_value(one) for one in inner.get("values") or ()]
        return _attributes(inner.get("values")) if kind == "kvlistValue" else inner
    return None


# --- calls --------------------------------------------------------------------------------------------------------


def call_in(span: Span) -> Call | None:
    """The model call that a span records; None for other spans (tools, agents, HTTP)."""
    about = dict(span.attributes)
    for name, attributes in span.events:
        if name == "gen_ai.client.inference.operation.details":
            about |= attributes
    is_named = about.get("gen_ai.operation.name") in _CALLS or "llm.request.type" in about
    if not is_named and not any(name.startswith(("gen_ai.prompt.", "gen_ai.completion.")) for name in about):
        return None
    prompt = [*_instructions(about), *_messages(about, span, "input")]
    replies = [one for one in _messages(about, span, "output") if one.get("role") == "assistant"]
    stated = json_value(about.get("gen_ai.response.finish_reasons"))
    reasons = stated if isinstance(stated, list) and stated else [one.get("finish_reason") for one in replies]
    for message in (*prompt, *replies):
        message.pop("finish_reason", None)
    return Call(
        span=span,
        prompt=prompt,
        reply=replies[0] if replies else None,
        finish_reason=_reason(reasons[0] if reasons else None),
        tools=_tools(about.get("gen_ai.tool.definitions")),
    )


def _reason(reason: Any) -> str | None:
    return {"tool_call": "tool_calls", "max_tokens": "length"}.get(str(reason), str(reason)) if reason else None


def _messages(about: Mapping[str, Any], span: Span, side: str) -> list[ChatMessage]:
    """The input or output messages of a call: from the messages attribute, else events, else indexed attributes."""
    stated = json_value(about.get(f"gen_ai.{side}.messages"))
    if isinstance(stated, list):
        return [message for one in stated for message in _of_parts(one)]
    events = list(_of_events(span, side))
    return events or _of_indexes(about, _INDEXED[side])


def _instructions(about: Mapping[str, Any]) -> list[ChatMessage]:
    stated = json_value(about.get("gen_ai.system_instructions"))
    parts = stated if isinstance(stated, list) else [{"type": "text", "content": stated}] if stated else []
    text = "\n".join(str(part.get("content")) for part in parts if part.get("content"))
    return [{"role": "system", "content": text}] if text else []


def _of_parts(message: Any) -> Iterator[ChatMessage]:
    """A message of the conventions (a role and parts) as chat messages.

    >>> list(_of_parts({"role": "user", "parts": [{"type": "text", "content": "2+2?"}]}))
    [{'role': 'user', 'content': '2+2?'}]
    """
    if not isinstance(message, dict):
        return
    if "parts" not in message:
        yield from as_messages(message)
        return
    parts = [part for part in message["parts"] if isinstance(part, dict)]
    for part in parts:
        if part.get("type") == "tool_call_response":
            answer = part.get("response", part.get("result"))
            yield {"role": "tool", "tool_call_id": part.get("id"), "content": _text(answer)}
    text = "".join(str(part.get("content") or "") for part in parts if part.get("type") == "text")
    calls = [_call(part) for part in parts if part.get("type") == "tool_call"]
    if text or calls or not parts:
        found: ChatMessage = {"role": message.get("role"), "content": text}
        found |= {"tool_calls": calls} if calls else {}
        yield found | ({"finish_reason": message["finish_reason"]} if message.get("finish_reason") else {})


def _of_events(span: Span, side: str) -> Iterator[ChatMessage]:
    """Messages from one event each, the earlier form of the conventions."""
    for name, about in span.events:
        if side == "output" and name == "gen_ai.choice":
            value = json_value(about.get("message"))
            message = value if isinstance(value, dict) else {"content": about.get("content") or value}
            reason = {"finish_reason": about["finish_reason"]} if about.get("finish_reason") else {}
            yield {"role": "assistant", **_chat_fields(message), **reason}
        elif side == "input" and name.startswith("gen_ai.") and name.endswith(".message"):
            role = _KINDS.get(name.split(".")[1])
            if role is not None:
                called = {"tool_call_id": about["id"]} if role == "tool" and "id" in about else {}
                yield {"role": role, **_chat_fields(about), **called}


def _of_indexes(about: Mapping[str, Any], prefixes: tuple[str, ...]) -> list[ChatMessage]:
    """Messages from one attribute per field (``gen_ai.prompt.0.content``), as OpenLLMetry writes them."""
    found: dict[int, dict[str, Any]] = {}
    for name, value in about.items():
        prefix = next((one for one in prefixes if name.startswith(one)), None)
        number, _, key = name.removeprefix(prefix or "").partition(".")
        if prefix is not None and number.isdigit() and key:
            found.setdefault(int(number), {})[key] = value
    messages = []
    for _, fields in sorted(found.items()):
        calls: dict[str, dict[str, Any]] = {}
        for key, value in fields.items():
            if key.startswith("tool_calls."):
                _, number, part = key.split(".", 2)
                calls.setdefault(number, {})[part] = value
        message: ChatMessage = {
            "role": fields.get("role") or "assistant",
            "content": _text(fields.get("content") or ""),
        }
        message |= {"tool_calls": [_call(calls[number]) for number in sorted(calls, key=int)]} if calls else {}
        named = ("tool_call_id", "finish_reason")
        messages.append({**message, **{name: fields[name] for name in named if fields.get(name)}})
    return messages


def _chat_fields(about: Mapping[str, Any]) -> ChatMessage:
    content, calls = json_value(about.get("content")), json_value(about.get("tool_calls"))
    text = content if isinstance(content, str) else text_of({"content": content}) or _text(content or "")
    return {"content": text, **({"tool_calls": [_call(one) for one in calls]} if isinstance(calls, list) else {})}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    about = call.get("function") or call
    arguments = _text(about.get("arguments") or "{}")
    return {"id": call.get("id"), "type": "function", "function": {"name": about.get("name"), "arguments": arguments}}


def _tools(stated: Any) -> list[dict[str, Any]] | None:
    tools = json_value(stated)
    if not isinstance(tools, list) or not tools:
        return None
    kept = ("name", "description", "parameters")
    return [
        tool if "function" in tool else {"type": "function", "function": {k: tool[k] for k in kept if k in tool}}
        for tool in tools
        if isinstance(tool, dict)
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
