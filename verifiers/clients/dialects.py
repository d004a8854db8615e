"""Helpers shared by the clients of other APIs than OpenAI's chat: OpenAI's format ↔ theirs."""

from __future__ import annotations

from typing import Any

import msgspec

from verifiers.clients.protocol import Completion
from verifiers.clients.reading import Prices, read_usage
from verifiers.errors import RequestRefusedError
from verifiers.types import ChatMessage

# Arguments of OpenAI's chat that other endpoints lack, each with the values that have no effect.
_CHAT_ONLY: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": (),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "seed": (),
    "stream": (False,),
    "stream_options": (),
    "suffix": (),
    "top_logprobs": (0,),
}


def refuse_unknown(
    endpoint: str, args: dict[str, Any], *, also: tuple[str, ...] = (), but: tuple[str, ...] = ()
) -> None:
    """Drop arguments of OpenAI's chat that have no effect; raise for those that the endpoint does not support.

    >>> args = {"n": 1, "temperature": 0.5}
    >>> refuse_unknown("this endpoint", args); args
    {'temperature': 0.5}
    """
    refused = []
    for name in [name for name in args if (name in _CHAT_ONLY or name in also) and name not in but]:
        if args[name] in _CHAT_ONLY.get(name, ()):
            del args[name]
        else:
            refused.append(name)
    if refused:
        raise RequestRefusedError(
            f"{endpoint} does not support the sampling argument{'s' if len(refused) > 1 else ''} "
            f"{', '.join(refused)}; leave out, or send the endpoint's own arguments in extra_body"
        )


def split_data_url(url: str) -> tuple[str, str | None]:
    """The media type and the base64 text of a ``data:`` URL; the text is None for any other URL.

    >>> split_data_url("data:image/png;base64,aGk="), split_data_url("https://host/cat.png")
    (('image/png', 'aGk='), ('', None))
    """
    head, comma, encoded = url.partition(",")
    if not comma or not head.startswith("data:"):
        return "", None
    return head.removeprefix("data:").partition(";")[0], encoded


def arguments_of(text: Any) -> dict[str, Any]:
    """The arguments of a tool call as an object. Invalid JSON is kept as text under ``arguments``.

    >>> arguments_of('{"x": 1}'), arguments_of('{"x": ')
    ({'x': 1}, {'arguments': '{"x": '})
    """
    if isinstance(text, dict):
        return text
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, UnicodeError, TypeError):
        value = None
    return value if isinstance(value, dict) else {"arguments": str(text)}


def translated(
    reply: dict[str, Any],
    message: ChatMessage,
    *,
    finish_reason: str | None,
    tokens: tuple[int, int] | None,
    prices: Prices | None,
    origin: str,
) -> Completion:
    """The completion of a reply in another API's format; ``raw`` has OpenAI's format, with the original inside.

    ``tokens`` are those of the prompt and of the completion, or None if the reply does not say.
    """
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    usage = None if tokens is None else dict(zip(names, (*tokens, sum(tokens)), strict=True))
    raw = {
        "id": reply.get("id"),
        "object": "chat.completion",
        "created": int(reply.get("created_at") or 0),
        "model": reply.get("model"),
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}],
        "usage": usage,
        origin: reply,
    }
    return Completion(
        message=message,
        finish_reason=finish_reason,
        usage=read_usage(usage, prices),
        model=str(reply.get("model") or ""),
        raw=raw,
    )
