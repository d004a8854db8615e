"""A request → a completion from Anthropic's messages endpoint, both in OpenAI's format."""

from __future__ import annotations

from typing import Any

import msgspec

from verifiers.clients.dialects import arguments_of, refuse_unknown, split_data_url, translated
from verifiers.clients.protocol import Completion, Request
from verifiers.clients.reading import Prices
from verifiers.clients.remote import RemoteClient
from verifiers.errors import BadReplyError, EmptyModelResponseError, RequestRefusedError
from verifiers.messages import content_text
from verifiers.types import ChatMessage

VERSION = "2023-06-01"
MAX_TOKENS = 4096  # the default, because the endpoint requires a value

_STOP_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


class AnthropicClient(RemoteClient):
    """Anthropic's ``{base_url}/v1/messages``, with requests and replies in OpenAI's format.

    >>> AnthropicClient(api_key="sk-ant-secret")
    AnthropicClient('https://api.anthropic.com', api_key='sk-…')
    """

    default_base_url = "https://api.anthropic.com"
    key_variable = "ANTHROPIC_API_KEY"

    def _auth(self, api_key: str) -> dict[str, str]:
        return {"x-api-key": api_key}

    def _fixed_headers(self) -> dict[str, str]:
        return {"anthropic-version": VERSION}

    def _write(self, request: Request, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if request.message_type != "chat" or isinstance(request.prompt, str):
            raise RequestRefusedError("Anthropic's endpoint only takes chats: pass messages and message_type='chat'")
        system, messages = write_messages(request.prompt)
        body = {"model": request.model, "messages": messages, **_write_sampling(args)}
        if system:
            body.setdefault("system", system)
        if request.tools:
            body.setdefault("tools", [_write_tool(tool) for tool in request.tools])
        return "/messages" if self.base_url.endswith("/v1") else "/v1/messages", body

    def _read(self, reply: dict[str, Any], request: Request) -> Completion:
        return read_reply(reply, prices=self.prices)


# --- messages → request -------------------------------------------------------------------------------------------


def write_messages(messages: list[ChatMessage]) -> tuple[Any, list[dict[str, Any]]]:
    """The system prompt and the turns. Consecutive messages of the same role are merged, as Anthropic requires.

    >>> write_messages([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}])
    ('Be brief.', [{'role': 'user', 'content': [{'type': 'text', 'text': '2+2?'}]}])
    """
    start = 0
    while start < len(messages) and messages[start].get("role") in ("system", "developer"):
        start += 1
    turns: list[dict[str, Any]] = []
    for message in messages[start:]:
        role = "assistant" if message.get("role") == "assistant" else "user"
        blocks = _write_message(message)
        if not blocks:
            continue  # the endpoint refuses empty text blocks
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    return _write_system(messages[:start]), turns


def _write_system(messages: list[ChatMessage]) -> Any:
    contents = [message.get("content") for message in messages]
    if any(isinstance(content, list) for content in contents):  # parts may carry cache_control
        return [block for content in contents for block in _write_content(content)]
    return "\n\n".join(content_text(content) for content in contents)


def _write_message(message: ChatMessage) -> list[dict[str, Any]]:
    content = message.get("content")
    if message.get("role") == "tool":
        result = {"type": "tool_result", "tool_use_id": message.get("tool_call_id")}
        blocks = _write_content(content)
        return [{**result, "content": blocks} if blocks else result]
    blocks = _write_content(content)
    if message.get("role") != "assistant":
        return blocks
    thinking = message.get("thinking_blocks") or []
    return [*thinking, *blocks, *(_write_call(call) for call in message.get("tool_calls") or [])]


def _write_content(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    blocks = [{"type": "text", "text": part} if isinstance(part, str) else _write_part(part) for part in content or ()]
    return [block for block in blocks if block.get("type") != "text" or block.get("text")]


def _write_part(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "image_url":
        image = part["image_url"]
        return {"type": "image", "source": _write_source(image if isinstance(image, str) else image["url"])}
    if kind == "file" and "file_data" in part.get("file", {}):
        return {"type": "document", "source": _write_source(part["file"]["file_data"])}
    if kind == "input_audio":
        raise RequestRefusedError("Anthropic's endpoint does not take input_audio parts")
    return part  # text, or a block in Anthropic's format


def _write_source(url: str) -> dict[str, Any]:
    media_type, encoded = split_data_url(url)
    if encoded is None:
        return {"type": "url", "url": url}
    return {"type": "base64", "media_type": media_type, "data": encoded}


def _write_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    return {
        "type": "tool_use",
        "id": call.get("id"),
        "name": function.get("name"),
        "input": arguments_of(function.get("arguments")),
    }


def _write_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type", "function") != "function" or "function" not in tool:
        return tool
    function = tool["function"]
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    written = {"name": function["name"], "description": function.get("description"), "input_schema": schema}
    return {name: value for name, value in written.items() if value is not None}


# --- sampling arguments -------------------------------------------------------------------------------------------


def _write_sampling(args: dict[str, Any]) -> dict[str, Any]:
    refuse_unknown("Anthropic's endpoint", args, but=("response_format",))
    limit, reply_limit = args.pop("max_tokens", None), args.pop("max_completion_tokens", None)
    stop, user = args.pop("stop", None), args.pop("user", None)
    parallel, choice = args.pop("parallel_tool_calls", None), args.pop("tool_choice", None)
    output = {"effort": args.pop("reasoning_effort", None), "format": _write_format(args.pop("response_format", None))}
    written = {"max_tokens": reply_limit or limit or MAX_TOKENS, **args}
    if stop:
        written["stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
    if user:
        written.setdefault("metadata", {"user_id": user})
    if choice is not None or parallel is False:
        written["tool_choice"] = _write_choice(choice or "auto", is_serial=parallel is False)
    if output := {name: value for name, value in output.items() if value is not None}:
        written["output_config"] = {**output, **written.get("output_config", {})}
    return written


def _write_format(wanted: Any) -> dict[str, Any] | None:
    if wanted is None or wanted == {"type": "text"}:
        return None
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        return {"type": "json_schema", "schema": wanted["json_schema"]["schema"]}
    raise RequestRefusedError(f"Anthropic's endpoint only takes a response_format of type json_schema, not {wanted!r}")


def _write_choice(choice: Any, *, is_serial: bool) -> dict[str, Any]:
    if isinstance(choice, str):
        written: dict[str, Any] = {"type": {"required": "any"}.get(choice, choice)}
    elif choice.get("type") == "function":
        written = {"type": "tool", "name": choice["function"]["name"]}
    else:
        written = dict(choice)
    if is_serial and written["type"] != "none":
        written["disable_parallel_tool_use"] = True
    return written


# --- the reply ----------------------------------------------------------------------------------------------------


def read_reply(reply: dict[str, Any], *, prices: Prices | None = None) -> Completion:
    """A reply in OpenAI's format; the original is in ``raw["anthropic"]``.

    >>> reply = {"content": [{"type": "text", "text": "4"}], "stop_reason": "max_tokens"}
    >>> read_reply(reply).finish_reason
    'length'
    """
    blocks = reply.get("content")
    if not isinstance(blocks, list):
        raise EmptyModelResponseError("the endpoint's reply has no content")
    thinking = [block for block in blocks if block.get("type") in ("thinking", "redacted_thinking")]
    calls = [_read_call(block) for block in blocks if block.get("type") == "tool_use"]
    texts = [block.get("text") for block in blocks if block.get("type") == "text"]
    if not all(isinstance(text, str) for text in texts):
        raise BadReplyError("a text block of the reply has no text")
    text = "".join(texts)
    message: ChatMessage = {"role": "assistant", "content": text or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    if thinking:
        message["reasoning_content"] = "".join(block.get("thinking") or "" for block in thinking)
        message["thinking_blocks"] = thinking  # signed; must be sent back with a turn that called tools
    reason = reply.get("stop_reason")
    usage = reply.get("usage") or {}
    kinds = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return translated(
        reply,
        message,
        finish_reason=_STOP_REASONS.get(reason, reason) if isinstance(reason, str) else None,
        tokens=(sum(usage.get(kind) or 0 for kind in kinds), usage.get("output_tokens") or 0) if usage else None,
        prices=prices,
        origin="anthropic",
    )


def _read_call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.get("input") or {}).decode()
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}
