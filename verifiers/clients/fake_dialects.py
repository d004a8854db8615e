"""HTTP bodies ↔ requests and completions, in the formats of the three APIs that the fake server supports."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from verifiers.clients.protocol import Completion, Request
from verifiers.messages import content_text
from verifiers.types import ChatMessage, Usage

Body = dict[str, Any]
CREATED = 1_700_000_000
_ids = itertools.count(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """How one endpoint's bodies are read and its replies written, and its reply without content."""

    read: Callable[[Body], Request]
    write: Callable[[Completion, Request], Body]
    empty: Body


# --- OpenAI chat and completions ----------------------------------------------------------------------------------


def read_chat(body: Body) -> Request:
    rest = {name: value for name, value in body.items() if name not in ("model", "messages", "tools")}
    return Request(model=body["model"], prompt=body["messages"], tools=body.get("tools"), sampling=rest)


def write_chat(completion: Completion, request: Request) -> Body:
    choice = {"index": 0, "message": completion.message, "finish_reason": completion.finish_reason, "logprobs": None}
    body = _openai_body("chat.completion", completion, request, choice)
    if completion.tokens is not None:
        pairs = zip(completion.tokens.completion_ids, completion.tokens.logprobs, strict=True)
        content: list[Body] = [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in pairs
        ]
        choice["logprobs"] = {"content": content, "refusal": None}
    return body


def read_text(body: Body) -> Request:
    rest = {name: value for name, value in body.items() if name not in ("model", "prompt")}
    return Request(model=body["model"], prompt=body["prompt"], sampling=rest, message_type="completion")


def write_text(completion: Completion, request: Request) -> Body:
    choice = {"index": 0, "text": completion.text, "finish_reason": completion.finish_reason, "logprobs": None}
    body = _openai_body("text_completion", completion, request, choice)
    if completion.tokens is not None:
        names = [f"token_id:{token}" for token in completion.tokens.completion_ids]
        logprobs = {"tokens": names, "token_logprobs": completion.tokens.logprobs}
        choice["logprobs"] = {**logprobs, "top_logprobs": None, "text_offset": []}
    return body


def _openai_body(kind: str, completion: Completion, request: Request, choice: Body) -> Body:
    usage = completion.usage or Usage()
    counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    body: Body = {
        "id": f"fake-{next(_ids)}",
        "object": kind,
        "created": CREATED,
        "model": request.model,
        "choices": [choice],
        "usage": {**counts, "total_tokens": usage.total_tokens},
    }
    if completion.tokens is not None:
        choice["token_ids"] = completion.tokens.completion_ids
        body["prompt_token_ids"] = completion.tokens.prompt_ids
    return body


# --- Anthropic messages -------------------------------------------------------------------------------------------


def read_anthropic(body: Body) -> Request:
    prompt: list[ChatMessage] = []
    if body.get("system"):
        prompt.append({"role": "system", "content": content_text(body["system"])})
    for message in body["messages"]:
        prompt += _from_blocks(message)
    rest = {name: value for name, value in body.items() if name not in ("model", "messages", "tools", "system")}
    return Request(model=body["model"], prompt=prompt, tools=body.get("tools"), sampling=rest)


def _from_blocks(message: Body) -> Iterator[ChatMessage]:
    if isinstance(message["content"], str):
        yield message
        return
    blocks = message["content"]
    for block in blocks:
        if block["type"] == "tool_result":
            text = content_text(block.get("content", ""))
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}
    calls = [
        _tool_call(block["id"], block["name"], msgspec.json.encode(block["input"]).decode())
        for block in blocks
        if block["type"] == "tool_use"
    ]
    rest = [block for block in blocks if block["type"] not in ("tool_use", "tool_result")]
    if rest or calls:
        only_text = all(block["type"] == "text" for block in rest)
        content = content_text(rest) if only_text else rest
        yield {"role": message["role"], "content": content, **({"tool_calls": calls} if calls else {})}


def write_anthropic(completion: Completion, request: Request) -> Body:
    usage = completion.usage or Usage()
    blocks: list[Body] = [{"type": "text", "text": completion.text}] if completion.text else []
    for call in completion.message.get("tool_calls") or ():
        function = call["function"]
        arguments = msgspec.json.decode(function["arguments"] or "{}")
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    return {
        "id": f"msg-fake-{next(_ids)}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": blocks,
        "stop_reason": reasons.get(completion.finish_reason or "", "end_turn"),
        "stop_sequence": None,
        "usage": {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens},
    }


# --- OpenAI responses ---------------------------------------------------------------------------------------------


def read_responses(body: Body) -> Request:
    prompt: list[ChatMessage] = []
    if body.get("instructions"):
        prompt.append({"role": "system", "content": body["instructions"]})
    if isinstance(body["input"], str):
        prompt.append({"role": "user", "content": body["input"]})
    else:
        prompt += [_from_item(item) for item in body["input"]]
    rest = {name: value for name, value in body.items() if name not in ("model", "input", "tools", "instructions")}
    return Request(model=body["model"], prompt=prompt, tools=body.get("tools"), sampling=rest)


def _from_item(item: Body) -> ChatMessage:
    kind = item.get("type", "message")
    if kind == "function_call":
        call = _tool_call(item["call_id"], item["name"], item["arguments"])
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": content_text(item["output"])}
    content = item.get("content")
    only_text = isinstance(content, str) or all("text" in part for part in content or ())
    return {"role": item.get("role", "assistant"), "content": content_text(content) if only_text else content}


def write_responses(completion: Completion, request: Request) -> Body:
    usage = completion.usage or Usage()
    number, output = next(_ids), []
    if completion.text:
        text = {"type": "output_text", "text": completion.text, "annotations": []}
        message = {"type": "message", "id": f"msg-fake-{number}", "role": "assistant", "status": "completed"}
        output.append({**message, "content": [text]})
    for call in completion.message.get("tool_calls") or ():
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        output.append({"type": "function_call", "id": f"fc-{call['id']}", "call_id": call["id"], **function})
    counts = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
    return {
        "id": f"resp-fake-{number}",
        "object": "response",
        "created_at": CREATED,
        "model": request.model,
        "status": "incomplete" if completion.is_truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if completion.is_truncated else None,
        "error": None,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {**counts, "total_tokens": usage.total_tokens},
    }


def _tool_call(call_id: str, name: str, arguments: str) -> Body:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


DIALECTS = {
    "/chat/completions": Dialect(
        read=read_chat, write=write_chat, empty={"id": "fake", "object": "chat.completion", "choices": []}
    ),
    "/completions": Dialect(
        read=read_text, write=write_text, empty={"id": "fake", "object": "text_completion", "choices": []}
    ),
    "/messages": Dialect(
        read=read_anthropic,
        write=write_anthropic,
        empty={"id": "fake", "type": "message", "role": "assistant", "content": [], "stop_reason": "end_turn"},
    ),
    "/responses": Dialect(
        read=read_responses,
        write=write_responses,
        empty={"id": "fake", "object": "response", "status": "completed", "output": []},
    ),
}


def without_texts(value: Any) -> Any:
    """A reply with its texts replaced by null, as some faulty proxies return it.

    >>> without_texts({"message": {"role": "assistant", "content": "4"}})
    {'message': {'role': 'assistant', 'content': None}}
    """
    if isinstance(value, list):
        return [without_texts(item) for item in value]
    if not isinstance(value, dict):
        return value
    lost = {name: None for name in ("content", "text") if isinstance(value.get(name), str)}
    return {name: without_texts(item) for name, item in value.items()} | lost


def dialect_of(path: str) -> Dialect | None:
    """The dialect of an endpoint, by the end of its path.

    >>> dialect_of("/v1/chat/completions").empty["object"]
    'chat.completion'
    """
    return next((dialect for ending, dialect in DIALECTS.items() if path.endswith(ending)), None)
