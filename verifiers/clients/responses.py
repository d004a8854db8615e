"""A request → a completion from OpenAI's responses endpoint, both in the format of its chat endpoint."""

from __future__ import annotations

from typing import Any

from verifiers.clients.dialects import refuse_unknown, translated
from verifiers.clients.protocol import Completion, Request
from verifiers.clients.reading import Prices
from verifiers.clients.remote import RemoteClient
from verifiers.errors import BadReplyError, EmptyModelResponseError, RequestRefusedError, ServerError
from verifiers.messages import content_text
from verifiers.types import ChatMessage

_SYSTEM = ("system", "developer")


class ResponsesClient(RemoteClient):
    """OpenAI's ``{base_url}/responses``, with requests and replies in the format of its chat endpoint.

    >>> ResponsesClient(api_key="sk-secret")
    ResponsesClient('https://api.openai.com/v1', api_key='sk-…')
    """

    def _write(self, request: Request, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if request.message_type != "chat" or isinstance(request.prompt, str):
            raise RequestRefusedError("the responses endpoint only takes chats: pass messages and message_type='chat'")
        instructions, items = write_items(request.prompt)
        body = {"model": request.model, "input": items, **_write_sampling(args)}
        if instructions:
            body.setdefault("instructions", instructions)
        if request.tools:
            body.setdefault("tools", [_write_tool(tool) for tool in request.tools])
        return "/responses", body

    def _read(self, reply: dict[str, Any], request: Request) -> Completion:
        return read_reply(reply, prices=self.prices)


# --- messages → request -------------------------------------------------------------------------------------------


def write_items(messages: list[ChatMessage]) -> tuple[str, list[dict[str, Any]]]:
    """The instructions and the input items of a conversation.

    >>> write_items([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}])
    ('Be brief.', [{'role': 'user', 'content': '2+2?'}])
    """
    start = 0
    while start < len(messages) and messages[start].get("role") in _SYSTEM:
        start += 1
    instructions = "\n\n".join(content_text(message.get("content")) for message in messages[:start])
    return instructions, [item for message in messages[start:] for item in _write_message(message)]


def _write_message(message: ChatMessage) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role == "tool":
        output = content if isinstance(content, str) else _write_parts(content)
        return [{"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": output}]
    if role == "assistant":
        text = content_text(content)
        said = [{"role": "assistant", "content": text}] if text else []
        calls = [_write_call(call) for call in message.get("tool_calls") or []]
        return [*(message.get("reasoning_items") or []), *said, *calls]
    return [{"role": role, "content": content if isinstance(content, str) else _write_parts(content)}]


def _write_parts(parts: Any) -> list[Any]:
    return [_write_part(part) for part in parts or ()]


def _write_part(part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    kind = part.get("type")
    if kind == "text":
        return {"type": "input_text", "text": part["text"]}
    if kind == "image_url":
        image = part["image_url"] if isinstance(part["image_url"], dict) else {"url": part["image_url"]}
        return {"type": "input_image", "image_url": image["url"], "detail": image.get("detail") or "auto"}
    if kind == "file":
        return {"type": "input_file", **part["file"]}
    if kind == "input_audio":
        raise RequestRefusedError("the responses endpoint does not take input_audio parts")
    return part  # already in this endpoint's format


def _write_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    return {
        "type": "function_call",
        "call_id": call.get("id"),
        "name": function.get("name"),
        "arguments": function.get("arguments") or "{}",
    }


def _write_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type", "function") != "function" or "function" not in tool:
        return tool
    # Explicit, because this endpoint's default is strict, unlike the chat endpoint's.
    return {"type": "function", "parameters": {"type": "object", "properties": {}}, "strict": False, **tool["function"]}


# --- sampling arguments -------------------------------------------------------------------------------------------


def _write_sampling(args: dict[str, Any]) -> dict[str, Any]:
    refuse_unknown("the responses endpoint", args, also=("stop",), but=("response_format",))
    limit, reply_limit = args.pop("max_tokens", None), args.pop("max_completion_tokens", None)
    effort, choice = args.pop("reasoning_effort", None), args.pop("tool_choice", None)
    text = {"format": _write_format(args.pop("response_format", None)), "verbosity": args.pop("verbosity", None)}
    written = dict(args)
    if reply_limit or limit:
        written.setdefault("max_output_tokens", reply_limit or limit)
    if effort is not None:
        written["reasoning"] = {"effort": effort, **written.get("reasoning", {})}
    if choice is not None:
        is_named = isinstance(choice, dict) and "function" in choice
        written["tool_choice"] = {"type": "function", "name": choice["function"]["name"]} if is_named else choice
    if text := {name: value for name, value in text.items() if value is not None}:
        written["text"] = {**text, **written.get("text", {})}
    return written


def _write_format(wanted: Any) -> Any:
    if isinstance(wanted, dict) and "json_schema" in wanted:
        return {"type": "json_schema", **wanted["json_schema"]}
    return wanted


# --- the reply ----------------------------------------------------------------------------------------------------


def read_reply(reply: dict[str, Any], *, prices: Prices | None = None) -> Completion:
    """A reply in the format of the chat endpoint; the original is in ``raw["responses"]``.

    >>> text = {"type": "message", "content": [{"type": "output_text", "text": "4"}]}
    >>> read_reply({"status": "completed", "output": [text]}).text
    '4'
    """
    items, status = reply.get("output"), reply.get("status")
    if status in ("failed", "cancelled"):
        raise ServerError(f"the response is {status}")
    if status in ("queued", "in_progress"):
        raise BadReplyError(f"the response is only {status}; leave out 'background'")
    if not isinstance(items, list) or (not items and status != "incomplete"):
        raise EmptyModelResponseError("the endpoint's reply has no output")
    message = _read_message(items)
    usage = reply.get("usage") or {}
    return translated(
        reply,
        message,
        finish_reason=_finish_reason(reply, message),
        tokens=(usage.get("input_tokens") or 0, usage.get("output_tokens") or 0) if usage else None,
        prices=prices,
        origin="responses",
    )


def _read_message(items: list[dict[str, Any]]) -> ChatMessage:
    parts = [part for item in items if item.get("type") == "message" for part in item.get("content") or ()]
    texts = [part.get("text") for part in parts if part.get("type") == "output_text"]
    if not all(isinstance(text, str) for text in texts):
        raise BadReplyError("an output_text part of the reply has no text")
    text = "".join(texts)
    refusal = "".join(part.get("refusal") or "" for part in parts if part.get("type") == "refusal")
    calls = [_read_call(item) for item in items if item.get("type") == "function_call"]
    reasoning = [item for item in items if item.get("type") == "reasoning"]
    thoughts = [part for item in reasoning for part in item.get("content") or item.get("summary") or ()]
    message: ChatMessage = {"role": "assistant", "content": text or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    if refusal:
        message["refusal"] = refusal
    if thoughts:
        message["reasoning_content"] = "\n\n".join(part.get("text") or "" for part in thoughts)
    if sealed := [item for item in reasoning if item.get("encrypted_content")]:
        message["reasoning_items"] = sealed  # requested by the caller, to be sent back with the next turn
    return message


def _read_call(item: dict[str, Any]) -> dict[str, Any]:
    function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
    return {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}


def _finish_reason(reply: dict[str, Any], message: ChatMessage) -> str:
    if reply.get("status") == "incomplete":
        reason = (reply.get("incomplete_details") or {}).get("reason")
        return "length" if reason in (None, "max_output_tokens") else str(reason)
    return "tool_calls" if message.get("tool_calls") else "stop"
