"""HTTP requests ↔ values: bodies, JSON replies, errors in the API's format, streams of events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from verifiers import errors
from verifiers.clients import wire

RETRY_AFTER_S = 1
ANTHROPIC = "/v1/messages"  # in a path: errors there have Anthropic's format


class UnknownModelError(errors.RequestRefusedError):
    """A request names a model that this server does not have."""


# The first match counts: an exception class, and its HTTP status, error type and error code.
_WORDS: tuple[tuple[type[Exception], int, str, str], ...] = (
    (UnknownModelError, 404, "invalid_request_error", "model_not_found"),
    (errors.OverlongPromptError, 400, "invalid_request_error", "context_length_exceeded"),
    (errors.RequestRefusedError, 400, "invalid_request_error", "invalid_request"),
    (errors.RateLimitError, 429, "rate_limit_error", "queue_full"),
    (errors.DeadlineError, 504, "server_error", "deadline_exceeded"),
    (errors.InfraError, 503, "server_error", "unavailable"),
    (errors.Error, 500, "server_error", "model_failed"),
)
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


async def read_body(http: web.Request) -> dict[str, Any]:
    """The body of a request as a JSON object."""
    try:
        body = wire.decode(await http.read())
    except ValueError as error:
        raise errors.RequestRefusedError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise errors.RequestRefusedError("the body is not a JSON object")
    return body


def json_reply(body: Any) -> web.Response:
    return web.Response(body=wire.encode(body), content_type="application/json")


def words_of(error: errors.Error) -> tuple[int, str, str]:
    """The HTTP status, type and code that report an error to a client."""
    return next(words[1:] for words in _WORDS if isinstance(error, words[0]))


def error_reply(http: web.Request, status: int, kind: str, code: str, message: str) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 429 else None
    written = wire.encode(error_body(http, status, kind, code, message))
    return web.Response(body=written, status=status, headers=headers, content_type="application/json")


def error_body(http: web.Request, status: int, kind: str, code: str, message: str) -> dict[str, Any]:
    if ANTHROPIC in http.path:
        named = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": named, "message": message}}
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}


class EventStream:
    """A reply of server-sent events; an error in the middle is sent as a last event."""

    def __init__(self, http: web.Request) -> None:
        self._http = http
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

    async def start(self) -> None:
        await self.response.prepare(self._http)

    async def send(self, body: Mapping[str, Any], *, event: str | None = None) -> None:
        named = b"" if event is None else b"event: " + event.encode() + b"\n"
        await self.response.write(named + b"data: " + wire.encode(body) + b"\n\n")

    async def fail(self, error: errors.Error) -> None:
        """Report an error as an event, because the HTTP status has already been sent."""
        status, kind, code = words_of(error)
        event = "error" if ANTHROPIC in self._http.path else None
        await self.send(error_body(self._http, status, kind, code, str(error)), event=event)

    async def end(self, *, mark: bytes = b"") -> web.StreamResponse:
        if mark:
            await self.response.write(mark)
        await self.response.write_eof()
        return self.response
