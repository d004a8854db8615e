"""``/v1/responses``, OpenAI's newer endpoint: items in, items or events out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from aiohttp import web

from verifiers import errors
from verifiers.chat.tool_calls import ToolCall
from verifiers.dialects.http import EventStream, json_reply, read_body, words_of
from verifiers.dialects.replies import Model, Reply, usage_of
from verifiers.dialects.response_items import read_body as read_response
from verifiers.dialects.response_items import write_call, write_message, write_response
from verifiers.messages import chars_in
from verifiers.types import unique_id

KEPT_CHARS = 16 << 20  # of conversations that a later request may continue


class Conversations:
    """The latest conversations by response id; the oldest are dropped when their total size exceeds the limit."""

    def __init__(self, kept_chars: int = KEPT_CHARS) -> None:
        self._kept_chars = kept_chars
        self._chars = 0
        self._kept: OrderedDict[str, tuple[int, list[Any]]] = OrderedDict()

    def find(self, response_id: Any) -> list[Any]:
        found = self._kept.get(response_id) if isinstance(response_id, str) else None
        if found is None:
            raise errors.RequestRefusedError(
                f"previous_response_id {response_id!r:.100} is unknown: responses are only kept in memory for a while, "
                "and not with store=false; send the whole conversation instead"
            )
        return found[1]

    def keep(self, response_id: str, messages: list[Any]) -> None:
        chars = chars_in(messages, stop_after=self._kept_chars)
        if chars > self._kept_chars:
            return
        self._kept[response_id] = chars, messages
        self._chars += chars
        while self._chars > self._kept_chars:
            _, (gone, _) = self._kept.popitem(last=False)
            self._chars -= gone


class Responses:
    """The endpoint over one model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._conversations = Conversations()

    async def create(self, http: web.Request) -> web.StreamResponse:
        body = await read_body(http)
        self._model.check_model(body.get("model"))
        asked = read_response(body)
        messages = asked.messages
        if asked.previous_id is not None:
            messages = [*self._conversations.find(asked.previous_id), *messages]
        whole = [{"role": "system", "content": asked.instructions}, *messages] if asked.instructions else messages
        request = self._model.request(whole, asked.sampling, tools=asked.tools)
        response = {
            **asked.described,
            "id": f"resp_{unique_id()}",
            "model": self._model.name,
        }
        async with self._model.turn(http):
            if asked.is_stream:
                stream = await self._model.stream(http, request)
                written = await self._stream(http, stream, response)
                message = None if stream.completion is None else stream.completion.message
            else:
                completion = await self._model.complete(http, request)
                message = completion.message
                choice = completion.raw["choices"][0]
                output = _output(message, is_cut=completion.is_truncated, logprobs=choice["logprobs"])
                usage, reason = completion.raw["usage"], completion.finish_reason
                written = json_reply(write_response(response, output, usage, finish_reason=reason))
        if asked.is_stored and message is not None:
            self._conversations.keep(response["id"], [*messages, message])
        return written

    # --- streams ------------------------------------------------------------------------------------------------------

    async def _stream(self, http: web.Request, stream: Reply, response: Mapping[str, Any]) -> web.StreamResponse:
        events, number = EventStream(http), 0
        try:
            stream.start()  # before the headers are sent, so that a full engine can still answer 429
            await events.start()
            try:
                async for event in _events(stream, response):
                    await events.send({**event, "sequence_number": number}, event=event["type"])
                    number += 1
                self._model.count(usage_of(stream.completion))
            except errors.Error as error:
                _, _, code = words_of(error)
                failed = {**response, "status": "failed", "error": {"code": code, "message": str(error)}, "output": []}
                event = {"type": "response.failed", "response": failed, "sequence_number": number}
                await events.send(event, event="response.failed")
            return await events.end()
        finally:
            stream.close()


async def _events(stream: Reply, response: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    text, item_id, is_open = "", f"msg_{unique_id()}", False
    place = {"item_id": item_id, "output_index": 0, "content_index": 0}
    calls: list[ToolCall] = []
    reason: str | None = None
    async for piece in stream:
        reason, calls = piece.finish_reason or reason, piece.calls or calls
        if not is_open and (piece.text or (reason is not None and not calls)):
            is_open = True
            item = write_message(item_id, None, status="in_progress")
            yield {"type": "response.output_item.added", "output_index": 0, "item": item}
            yield {"type": "response.content_part.added", **place, "part": _part("")}
        if piece.text:
            text += piece.text
            yield {"type": "response.output_text.delta", **place, "delta": piece.text, "logprobs": []}
    status = "incomplete" if reason == "length" else "completed"
    output: list[dict[str, Any]] = []
    if is_open:
        yield {"type": "response.output_text.done", **place, "text": text, "logprobs": []}
        yield {"type": "response.content_part.done", **place, "part": _part(text)}
        output.append(write_message(item_id, text, status=status))
        yield {"type": "response.output_item.done", "output_index": 0, "item": output[0]}
    for call in calls:
        for event in _call_events(call, len(output)):
            yield event
        output.append(write_call(call))
    usage = usage_of(stream.completion)
    yield {"type": f"response.{status}", "response": write_response(response, output, usage, finish_reason=reason)}


def _call_events(call: ToolCall, index: int) -> list[dict[str, Any]]:
    """The events of a function call, which is sent whole, because it is only recognised once it is complete."""
    item = write_call(call)
    place = {"item_id": item["id"], "output_index": index}
    begun = {**item, "arguments": "", "status": "in_progress"}
    arguments = item["arguments"]
    return [
        {"type": "response.output_item.added", "output_index": index, "item": begun},
        {"type": "response.function_call_arguments.delta", **place, "delta": arguments},
        {"type": "response.function_call_arguments.done", **place, "name": item["name"], "arguments": arguments},
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _output(message: Mapping[str, Any], *, is_cut: bool, logprobs: Any) -> list[dict[str, Any]]:
    calls: Sequence[ToolCall] = message.get("tool_calls") or ()
    status = "incomplete" if is_cut else "completed"
    text = message.get("content")
    said = [] if calls and not text else [write_message(f"msg_{unique_id()}", text or "", status=status)]
    for item in said:
        item["content"][0]["logprobs"] = (logprobs or {}).get("content") or []
    return [*said, *map(write_call, calls)]
