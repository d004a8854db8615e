"""The model calls made during a rollout → a list with the exact tokens of each reply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from verifiers.clients.protocol import Completion, Request, Tokens
from verifiers.clients.reading import read_message, read_tokens
from verifiers.types import ChatMessage


@dataclass(frozen=True, kw_only=True, slots=True)
class CallReply:
    """One of the replies to a call, with its tokens if they are known."""

    message: ChatMessage
    tokens: Tokens | None
    is_truncated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCall:
    """One request that a client answered, with one reply or (``n``) several."""

    client: Any
    request: Request
    replies: Sequence[CallReply]


_recording: ContextVar[tuple[list[ModelCall], ...]] = ContextVar("recorded_calls", default=())


@contextmanager
def recorded_calls() -> Iterator[list[ModelCall]]:
    """Collect the calls made within this block: here, in tasks started here, and in sync hooks that the library calls.

    Calls from threads that user code starts itself are not recorded.
    """
    recorded: list[ModelCall] = []
    before = _recording.set((*_recording.get(), recorded))
    try:
        yield recorded
    finally:
        _recording.reset(before)


def is_recording() -> bool:
    """Is this inside a `recorded_calls` block?"""
    return bool(_recording.get())


def record(client: Any, request: Request, replies: Sequence[CallReply]) -> None:
    """Record a completed call. The list of messages is copied, because the caller may append to it."""
    prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
    call = ModelCall(client=client, request=replace(request, prompt=prompt), replies=replies)
    for calls in _recording.get():
        calls.append(call)


def record_completion(client: Any, request: Request, completion: Completion) -> Completion:
    """Record the call of a completion with all its choices; returns the completion."""
    if _recording.get():
        record(client, request, replies_of(request, completion))
    return completion


def replies_of(request: Request, completion: Completion) -> list[CallReply]:
    """Every reply of a completion: one, or as many as the request asked for."""
    first = CallReply(message=completion.message, tokens=completion.tokens, is_truncated=completion.is_truncated)
    choices = completion.raw.get("choices") if isinstance(completion.raw, dict) else None
    others = [_read(completion.raw, choice, request) for choice in (choices or [])[1:] if isinstance(choice, dict)]
    return [first, *others]


def _read(response: dict[str, Any], choice: dict[str, Any], request: Request) -> CallReply:
    is_chat = request.message_type == "chat"
    said = choice.get("message") or {} if is_chat else {"role": "assistant", "content": choice.get("text")}
    is_truncated = choice.get("finish_reason") == "length"
    return CallReply(message=read_message(said), tokens=read_tokens(response, choice), is_truncated=is_truncated)


def is_asked_through(client: Any, asked: Any, depth: int = 3) -> bool:
    """Is ``client`` the one that was called, or a wrapper that holds it?

    >>> class Logged:
    ...     def __init__(self, inner): self.inner = inner
    >>> inner = object()
    >>> is_asked_through(Logged(inner), inner), is_asked_through(Logged(object()), inner)
    (True, False)
    """
    if client is asked:
        return True
    if not depth:
        return False
    held = client if isinstance(client, (list, tuple)) else list(getattr(client, "__dict__", {}).values())
    return any(is_asked_through(one, asked, depth - 1) for one in held)
