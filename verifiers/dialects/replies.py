"""The interface between the endpoints and a model: requests, and replies that arrive in pieces."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web

from verifiers.chat.tool_calls import ToolCall
from verifiers.clients.openai_objects import fields_of
from verifiers.clients.protocol import Completion, Request
from verifiers.types import MessageType, VersionSpan, unique_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The next part of one choice: the text and tokens sampled since the last piece."""

    index: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: Sequence[Any] = ()
    calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | None = None
    weight_versions: Sequence[VersionSpan] = ()  # of the whole choice; in its last piece only


class Reply(Protocol):
    """A reply, piece by piece; ``completion`` is the whole reply after the last piece."""

    completion: Completion | None

    @property
    def head(self) -> dict[str, Any]: ...  # id, object, created and model of every chunk
    @property
    def choices(self) -> int: ...  # the number of choices requested
    @property
    def prompt_tokens(self) -> int: ...
    def start(self) -> None: ...  # raises if the engine is full
    def extras(self, piece: Piece, *, is_first: bool) -> tuple[dict[str, Any], dict[str, Any]]: ...
    def __aiter__(self) -> AsyncIterator[Piece]: ...
    def close(self) -> None: ...


class Model(Protocol):
    """What answers the requests of an endpoint."""

    name: str

    def check_model(self, name: Any) -> None: ...
    def request(
        self, prompt: Any, sampling: Mapping[str, Any], *, tools: Any = None, message_type: MessageType = "chat"
    ) -> Request: ...
    def turn(self, http: web.Request, replies: int = 1) -> AbstractAsyncContextManager[None]: ...
    async def complete(self, http: web.Request, request: Request) -> Completion: ...
    async def stream(self, http: web.Request, request: Request) -> Reply: ...
    async def prompt_ids(self, request: Request) -> list[int]: ...
    def count(self, usage: Mapping[str, Any]) -> None: ...


def usage_of(completion: Completion | None) -> dict[str, Any]:
    """The token usage of a complete reply."""
    usage: dict[str, Any] = completion.raw["usage"] if completion is not None else {}
    return usage


def with_openai_fields(completion: Completion, request: Request, model: str) -> dict[str, Any]:
    """The completion of any client in OpenAI's format: with an id, a time, a finish reason and a usage.

    >>> said = Completion(message={"role": "assistant", "content": "4"})
    >>> body = with_openai_fields(said, Request(model="m", prompt=[]), "m")
    >>> body["choices"][0]["finish_reason"], body["usage"]["total_tokens"]
    ('stop', 0)
    """
    is_chat = request.message_type == "chat"
    body = fields_of(completion, request.message_type)
    body["id"] = body.get("id") or f"{'chatcmpl' if is_chat else 'cmpl'}-{unique_id()}"
    body["created"] = body.get("created") or int(time.time())
    body["model"] = model
    usage = body.get("usage") or {}
    counted = {name: usage.get(name) or 0 for name in ("prompt_tokens", "completion_tokens")}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    body["usage"] = {
        **counted,
        "total_tokens": sum(counted.values()),
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    body["choices"] = [_choice(choice, index) for index, choice in enumerate(body["choices"])]
    return body


def _choice(choice: Mapping[str, Any], index: int) -> dict[str, Any]:
    message = choice.get("message") or {}
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return {"logprobs": None, **choice, "index": index, "finish_reason": choice.get("finish_reason") or reason}


class WholeReply:
    """A complete reply as a stream of one piece per choice, for clients that cannot stream.

    ``completion.raw`` has OpenAI's format (`with_openai_fields`).
    """

    def __init__(self, completion: Completion) -> None:
        self.completion: Completion | None = completion
        self._raw: dict[str, Any] = completion.raw

    @property
    def head(self) -> dict[str, Any]:
        kind = self._raw["object"]
        named = {name: self._raw[name] for name in ("id", "created", "model")}
        return {**named, "object": f"{kind}.chunk" if kind == "chat.completion" else kind}

    @property
    def choices(self) -> int:
        return len(self._raw["choices"])

    @property
    def prompt_tokens(self) -> int:
        tokens: int = self._raw["usage"]["prompt_tokens"]
        return tokens

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def extras(self, piece: Piece, *, is_first: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        choice = self._raw["choices"][piece.index]
        names = ("logprobs", "token_ids", "weight_versions")
        kept = {name: choice[name] for name in names if choice.get(name) is not None}
        whole = {"prompt_token_ids": self._raw["prompt_token_ids"]} if "prompt_token_ids" in self._raw else {}
        return kept, whole

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for index, choice in enumerate(self._raw["choices"]):
            message = choice.get("message") or {"content": choice.get("text")}
            yield Piece(
                index=index,
                text=message.get("content") or "",
                calls=list(message.get("tool_calls") or ()),
                finish_reason=choice["finish_reason"],
                stop=choice.get("stop_reason") if isinstance(choice.get("stop_reason"), str) else None,
            )
