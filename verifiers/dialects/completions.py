"""``/v1/chat/completions`` and ``/v1/completions``: replies in OpenAI's format, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from verifiers import errors
from verifiers.clients.protocol import Request
from verifiers.dialects.http import EventStream, json_reply, read_body
from verifiers.dialects.replies import Model, Piece, Reply, usage_of
from verifiers.types import MessageType

MOST_CHOICES = 1024  # per request: prompts × n
_END = b"data: [DONE]\n\n"


class Completions:
    """The two endpoints over one model."""

    def __init__(self, model: Model) -> None:
        self._model = model

    async def chat(self, http: web.Request) -> web.StreamResponse:
        body = await read_body(http)
        self._model.check_model(body.pop("model", None))
        messages = body.pop("messages", None)
        if not isinstance(messages, list):
            raise errors.RequestRefusedError("'messages' must be a list of messages")
        if wrong := [one for one in messages if not (isinstance(one, dict) and isinstance(one.get("role"), str))]:
            raise errors.RequestRefusedError(f"a message must be an object with a role, not {wrong[0]!r:.80}")
        for message in messages:
            calls = message.get("tool_calls") or []
            if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
                raise errors.RequestRefusedError(f"a message's 'tool_calls' must be a list of objects: {calls!r:.80}")
        tools = body.pop("tools", None)
        return await self._answer(http, body, [[with_known_role(one) for one in messages]], "chat", tools=tools)

    async def text(self, http: web.Request) -> web.StreamResponse:
        body = await read_body(http)
        self._model.check_model(body.pop("model", None))
        return await self._answer(http, body, _prompts(body.pop("prompt", None)), "completion")

    async def _answer(
        self, http: web.Request, body: dict[str, Any], prompts: list[Any], message_type: MessageType, tools: Any = None
    ) -> web.StreamResponse:
        is_stream, wants_usage = _stream_settings(body)
        given = _with_extra(body)
        choices = _choices(given, prompts)
        asked = [self._model.request(p, body, tools=tools, message_type=message_type) for p in prompts]
        async with self._model.turn(http, choices):
            if is_stream:
                return await self._stream(http, asked, wants_usage=wants_usage)
            replies = await _together([self._model.complete(http, request) for request in asked])
        return json_reply(_merged([reply.raw for reply in replies], with_ids=wants_ids(given.get)))

    # --- streams ------------------------------------------------------------------------------------------------------

    async def _stream(self, http: web.Request, asked: Sequence[Request], *, wants_usage: bool) -> web.StreamResponse:
        streams = [await self._model.stream(http, request) for request in asked]
        events = EventStream(http)
        try:
            for stream in streams:
                stream.start()  # before the headers are sent, so that a full engine can still answer 429
            await events.start()
            try:
                async for chunk in self._chunks(streams, wants_usage=wants_usage):
                    await events.send(chunk)
            except errors.Error as error:
                await events.fail(error)
            return await events.end(mark=_END)
        finally:
            for stream in streams:
                stream.close()

    async def _chunks(self, streams: Sequence[Reply], *, wants_usage: bool) -> AsyncIterator[dict[str, Any]]:
        head = {**streams[0].head, "model": self._model.name}
        seen: set[int] = set()
        async for number, piece in together(streams):
            stream = streams[number]
            index = number * stream.choices + piece.index
            is_first = index not in seen
            seen.add(index)
            more, more_of_all = stream.extras(piece, is_first=is_first)
            choice = {**_delta(head, piece, is_first=is_first), **more, "index": index}
            chunk = {**head, "choices": [choice]}
            (chunk if len(streams) == 1 else choice).update(more_of_all)
            if wants_usage:
                chunk["usage"] = None
            yield chunk
        usages = [usage_of(stream.completion) for stream in streams]
        for usage in usages:
            self._model.count(usage)
        if wants_usage:
            yield {**head, "choices": [], "usage": _total(usages)}


async def together(streams: Sequence[Reply]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of several replies as they arrive, each with the index of its reply."""
    if len(streams) == 1:
        async for piece in streams[0]:
            yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue()

    async def pump(number: int, stream: Reply) -> None:
        try:
            async for piece in stream:
                queue.put_nowait((number, piece))
            queue.put_nowait((number, None))
        except Exception as error:
            queue.put_nowait((number, error))

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            number, arrived = await queue.get()
            if isinstance(arrived, Exception):
                raise arrived
            if arrived is None:
                left -= 1
            else:
                yield number, arrived
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def with_known_role(message: Any) -> Any:
    """Rename the role ``developer`` to ``system``, because templates do not know OpenAI's newer name."""
    is_renamed = isinstance(message, dict) and message.get("role") == "developer"
    return {**message, "role": "system"} if is_renamed else message


def _prompts(prompt: Any) -> list[Any]:
    """The prompts of a completion request: a text, a list of token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise errors.RequestRefusedError("'prompt' must be a text, a list of token ids, or a list of either")
    prompts = [prompt] if type(prompt[0]) is int else prompt
    for one in prompts:
        if not isinstance(one, str) and not (isinstance(one, list) and all(type(token) is int for token in one)):
            raise errors.RequestRefusedError(
                f"'prompt' must be a text, a list of token ids, or a list of either, not {one!r:.80}"
            )
    return prompts


def _with_extra(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of a body, including those in its ``extra_body``."""
    further = body.get("extra_body")
    if not isinstance(further, Mapping):
        return body
    return {**further, **{name: value for name, value in body.items() if value is not None}}


def _choices(body: Mapping[str, Any], prompts: list[Any]) -> int:
    """How many replies a request asks for. Too many are refused before any work is done."""
    n = body.get("n")
    wanted = len(prompts) * (n if type(n) is int and n > 0 else 1)
    if wanted > MOST_CHOICES:
        each = "" if n is None else f" × n={n}"
        raise errors.RequestRefusedError(f"{len(prompts)} prompts{each} in one request; at most {MOST_CHOICES} replies")
    return wanted


def _stream_settings(body: dict[str, Any]) -> tuple[bool, bool]:
    settings = body.pop("stream_options", None) or {}
    is_stream = body.pop("stream", None) or False
    if not isinstance(is_stream, bool) or not isinstance(settings, dict):
        raise errors.RequestRefusedError("'stream' must be true or false, and 'stream_options' an object")
    return is_stream, bool(settings.get("include_usage"))


def wants_ids(read: Callable[[str], Any]) -> bool:
    """Return token ids? Yes with ``return_token_ids``, and with logprobs unless ``return_token_ids`` is false."""
    wanted = read("return_token_ids")
    logprobs = read("logprobs")
    return bool(wanted) if wanted is not None else logprobs is not None and logprobs is not False


async def _together(waiting: list[Any]) -> list[Any]:
    """Await all; if one fails, cancel the others."""
    if len(waiting) == 1:
        return [await waiting[0]]
    tasks = [asyncio.ensure_future(one) for one in waiting]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _merged(raws: list[dict[str, Any]], *, with_ids: bool) -> dict[str, Any]:
    """Merge the responses of one or several prompts into one."""
    response = dict(raws[0])
    if len(raws) > 1:
        choices = [
            dict(choice, prompt_token_ids=raw.get("prompt_token_ids")) for raw in raws for choice in raw["choices"]
        ]
        response["choices"] = [dict(choice, index=index) for index, choice in enumerate(choices)]
        response["usage"] = _total([raw["usage"] for raw in raws])
        response.pop("prompt_token_ids", None)
    if not with_ids:
        response.pop("prompt_token_ids", None)
        hidden = ("token_ids", "prompt_token_ids")
        response["choices"] = [
            {key: value for key, value in choice.items() if key not in hidden} for choice in response["choices"]
        ]
    return response


def _total(usages: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return {
        **{name: sum(usage[name] for usage in usages) for name in names},
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _delta(head: Mapping[str, Any], piece: Piece, *, is_first: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"finish_reason": piece.finish_reason, "logprobs": None}
    if head["object"] == "text_completion":
        return {**choice, "text": piece.text}
    delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
    if piece.text or is_first:
        delta["content"] = piece.text
    if piece.calls:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(piece.calls)]
    return {**choice, "delta": delta}
