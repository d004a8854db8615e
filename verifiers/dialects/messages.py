"""``/v1/messages``, Anthropic's endpoint: content blocks in, blocks or events out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from aiohttp import web

from verifiers import errors
from verifiers.clients.dialects import arguments_of
from verifiers.clients.protocol import Request
from verifiers.dialects.http import EventStream, json_reply, read_body
from verifiers.dialects.message_blocks import read_request
from verifiers.dialects.replies import Model, Reply, usage_of
from verifiers.types import unique_id

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class Messages:
    """The endpoint over one model, and its token counting endpoint."""

    def __init__(self, model: Model) -> None:
        self._model = model

    async def create(self, http: web.Request) -> web.StreamResponse:
        body = await read_body(http)
        is_stream = body.pop("stream", None) is True
        request = self._request(body)
        async with self._model.turn(http):
            if is_stream:
                return await self._stream(http, await self._model.stream(http, request))
            completion = await self._model.complete(http, request)
        choice = completion.raw["choices"][0]
        blocks = _blocks(completion.text, completion.message.get("tool_calls") or ())
        return json_reply(
            {
                **self._head(),
                "content": blocks,
                **_end(completion.finish_reason, choice.get("stop_reason")),
                "usage": _usage(completion.raw["usage"]),
            }
        )

    async def count_tokens(self, http: web.Request) -> web.Response:
        request = self._request(await read_body(http), needs_limit=False)
        async with self._model.turn(http):
            ids = await self._model.prompt_ids(request)
        return json_reply({"input_tokens": len(ids)})

    def _request(self, body: dict[str, Any], *, needs_limit: bool = True) -> Request:
        self._model.check_model(body.pop("model", None))
        if needs_limit and "max_tokens" not in body:
            raise errors.RequestRefusedError("'max_tokens' is missing: the maximum length of the reply")
        messages, tools, sampling = read_request(body)
        return self._model.request(messages, sampling, tools=tools)

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"msg_{unique_id()}",
            "type": "message",
            "role": "assistant",
            "model": self._model.name,
        }

    # --- streams ------------------------------------------------------------------------------------------------------

    async def _stream(self, http: web.Request, stream: Reply) -> web.StreamResponse:
        events = EventStream(http)
        try:
            stream.start()  # before the headers are sent, so that a full engine can still answer 429
            await events.start()
            try:
                async for event in _events(stream, self._head()):
                    await events.send(event, event=event["type"])
                self._model.count(usage_of(stream.completion))
            except errors.Error as error:
                await events.fail(error)
            return await events.end()
        finally:
            stream.close()


async def _events(stream: Reply, head: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    usage = {"input_tokens": stream.prompt_tokens, "output_tokens": 0}
    begun = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield {"type": "message_start", "message": begun}
    index, last = 0, None
    async for piece in stream:
        last = piece
        if piece.text and index == 0:
            index = 1
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        if piece.text:
            delta = {"type": "text_delta", "text": piece.text}
            yield {"type": "content_block_delta", "index": 0, "delta": delta}
    if index:
        yield {"type": "content_block_stop", "index": 0}
    for call in last.calls if last is not None else ():
        block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
        written = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
        yield {"type": "content_block_start", "index": index, "content_block": block}
        yield {"type": "content_block_delta", "index": index, "delta": written}
        yield {"type": "content_block_stop", "index": index}
        index += 1
    ended = _end(None if last is None else last.finish_reason, None if last is None else last.stop)
    yield {"type": "message_delta", "delta": ended, "usage": _usage(usage_of(stream.completion))}
    yield {"type": "message_stop"}


def _blocks(text: str, calls: Any) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text or not calls else []
    for call in calls:
        function = call["function"]
        made = {"id": call["id"], "name": function["name"], "input": arguments_of(function["arguments"])}
        blocks.append({"type": "tool_use", **made})
    return blocks


def _end(finish_reason: str | None, stop: str | None) -> dict[str, Any]:
    reason = "stop_sequence" if stop is not None else _STOP_REASONS.get(finish_reason or "", "end_turn")
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
