"""HTTP requests → the replies of a local model in the words of OpenAI: whole, as a stream; and doors for a trainer."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from verifiers import errors
from verifiers.clients import wire
from verifiers.clients.hosts import is_own_host
from verifiers.clients.protocol import Request
from verifiers.engine.engine import EngineFullError
from verifiers.engine.local_model import SHORT_CHARS, LocalModel
from verifiers.engine.server.shares import Shares
from verifiers.engine.text.replies import Prompt, envelope, usage_of_completion, write_logprobs
from verifiers.engine.text.streams import Piece, ReplyStream
from verifiers.types import MessageType

logger = logging.getLogger("verifiers.engine")

MOST_BYTES = 8 << 20  # of a request: ten times a context of 128,000 tokens
MOST_CHOICES = 1024  # of a request: prompts × n
WORK_BYTES = 64 << 10  # of a request's body, that count as much as one reply
QUEUED = 2  # times the rows of the engine: enough for it never to wait
RETRY_AFTER_S = 1

# The first that fits: what an error is to a client, as a status, a type and a code.
_WORDS: tuple[tuple[type[Exception], int, str, str], ...] = (
    (errors.OverlongPromptError, 400, "invalid_request_error", "context_length_exceeded"),
    (errors.RequestRefusedError, 400, "invalid_request_error", "invalid_request"),
    (EngineFullError, 429, "rate_limit_error", "queue_full"),
    (errors.DeadlineError, 504, "server_error", "deadline_exceeded"),
    (errors.InfraError, 503, "server_error", "unavailable"),
    (errors.Error, 500, "server_error", "model_failed"),
)


class ServedModel:
    """The endpoints over one model; `app` is what aiohttp runs."""

    def __init__(
        self,
        model: LocalModel,
        *,
        api_key: str | None = None,
        host: str = "127.0.0.1",
        allow_hosts: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.api_key = api_key
        self.host = host
        self.allow_hosts = tuple(allow_hosts)
        self._shares: Shares | None = None
        self.counts: Counter[str] = Counter()
        self.started = int(time.time())

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._model),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completions),
                web.post("/update_weights", self._update_weights),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
            ]
        )
        return app

    # --- every request --------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        http = request
        if refusal := self._refuse(http):
            return refusal
        try:
            return await handler(http)
        except web.HTTPException as error:
            code = "not_found" if error.status == 404 else "invalid_request"
            return _error(error.status, "invalid_request_error", code, f"{http.method} {http.path}: {error.reason}")
        except errors.Error as error:
            return self._said(error)
        except ConnectionError:
            raise
        except Exception as error:
            logger.exception("%s %s failed", http.method, http.path)
            return _error(500, "server_error", "internal_error", f"{type(error).__name__}: {error}")

    def _refuse(self, http: web.Request) -> web.Response | None:
        named = http.headers.get("Host")
        if named is not None and not is_own_host(named, self.host, self.allow_hosts):
            said = f"this server is not called {named!r:.200}; the names it was given are (--allow-host NAME)"
            return _error(421, "invalid_request_error", "unknown_host", said)
        if self.api_key is not None and http.path != "/health":
            given = http.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self.api_key.encode()):
                return _error(401, "invalid_request_error", "invalid_api_key", "the API key is wrong or missing")
        elif http.method == "POST" and "Origin" in http.headers:  # a page in a browser: anyone's, without a key
            return _error(403, "invalid_request_error", "forbidden", "web pages need a server with an API key")
        return None

    def _said(self, error: errors.Error) -> web.Response:
        _, status, kind, code = next(words for words in _WORDS if isinstance(error, words[0]))
        self.counts[code] += 1
        headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 429 else None
        return _error(status, kind, code, str(error), headers=headers)

    # --- completions ----------------------------------------------------------------------------------------------

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        body = await _body(http)
        if (refusal := self._unknown_model(body)) is not None:
            return refusal
        messages = body.pop("messages", None)
        if not isinstance(messages, list):
            raise errors.RequestRefusedError("'messages' is missing: a list of messages")
        tools = body.pop("tools", None)
        return await self._answer(http, body, [messages], "chat", tools=tools)

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        body = await _body(http)
        if (refusal := self._unknown_model(body)) is not None:
            return refusal
        return await self._answer(http, body, _prompts(body.pop("prompt", None)), "completion")

    def _unknown_model(self, body: dict[str, Any]) -> web.Response | None:
        name = body.pop("model", None)
        if name in (None, "", self.model.model):
            return None
        text = f"the model {name!r:.200} is not served here; {self.model.model!r} is"
        return _error(404, "invalid_request_error", "model_not_found", text)

    async def _answer(
        self,
        http: web.Request,
        body: dict[str, Any],
        prompts: list[Any],
        message_type: MessageType,
        tools: Any = None,
    ) -> web.StreamResponse:
        is_stream, wants_usage = _stream_settings(body)
        choices = _choices(body, prompts)
        asked = [
            Request(model=self.model.model, prompt=p, tools=tools, sampling=body, message_type=message_type)
            for p in prompts
        ]
        self.counts["requests"] += 1
        if is_stream and len(asked) > 1:
            raise errors.RequestRefusedError("a stream answers one prompt; send a request for each")
        shares = self._shares or await self._make_shares()
        async with shares.turn(_client_of(http), choices + (http.content_length or 0) // WORK_BYTES):
            if is_stream:
                return await self._stream(http, asked[0], wants_usage=wants_usage)
            is_long = (http.content_length or 0) > SHORT_CHARS
            complete = self.model.complete_in_thread if is_long else self.model.complete
            replies = await _together([complete(request) for request in asked])
        raws = [reply.raw for reply in replies]
        for raw in raws:
            self._count(raw["usage"])
        return _json(_merged(raws, with_ids=_wants_ids(body)))

    async def _make_shares(self) -> Shares:
        engine = (await self.model.ready()).engine
        if self._shares is None:
            self._shares = Shares(QUEUED * engine.rows, most_waiting=engine.max_waiting)
        return self._shares

    def _count(self, usage: Mapping[str, Any]) -> None:
        self.counts["done"] += 1
        self.counts["prompt_tokens"] += usage["prompt_tokens"]
        self.counts["completion_tokens"] += usage["completion_tokens"]
        self.counts["cached_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]

    async def _stream(self, http: web.Request, request: Request, *, wants_usage: bool) -> web.StreamResponse:
        stream = await self.model.stream(request)
        stream.start()  # here, so that a full engine is still a 429
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            await response.prepare(http)
            try:
                async for chunk in self._chunks(stream, wants_usage=wants_usage):
                    await response.write(b"data: " + wire.encode(chunk) + b"\n\n")
            except errors.Error as error:  # the status is sent: only the stream itself can say it
                body = _error_body("server_error", "model_failed", str(error))
                await response.write(b"data: " + msgspec.json.encode(body) + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        finally:
            stream.close()
        return response

    async def _chunks(self, stream: ReplyStream, *, wants_usage: bool) -> AsyncIterator[dict[str, Any]]:
        prompt = stream.prompt
        head = envelope(prompt, is_chunk=True)
        codec = (await self.model.ready()).codec
        with_ids = _wants_ids(prompt.options)
        is_first = [True] * prompt.options.n
        async for piece in stream:
            choice = _delta(prompt, piece, is_first=is_first[piece.index])
            if prompt.options.logprobs:
                choice["logprobs"] = write_logprobs(prompt, piece.ids, piece.logprobs, codec)
            chunk = {**head, "choices": [choice]}
            if with_ids:
                choice["token_ids"] = piece.ids
                if is_first[piece.index]:
                    chunk["prompt_token_ids"] = prompt.ids
            if wants_usage:
                chunk["usage"] = None
            is_first[piece.index] = False
            yield chunk
        usage = usage_of_completion(stream.completion)
        self._count(usage)
        if wants_usage:
            yield {**head, "choices": [], "usage": usage}

    # --- the model ------------------------------------------------------------------------------------------------

    def _described(self) -> dict[str, Any]:
        loaded = self.model.load()
        return {
            "id": self.model.model,
            "object": "model",
            "created": self.started,
            "owned_by": "verifiers",
            "max_model_len": loaded.engine.length,
        }

    async def _models(self, http: web.Request) -> web.Response:
        await self.model.ready()
        return _json({"object": "list", "data": [self._described()]})

    async def _model(self, http: web.Request) -> web.Response:
        await self.model.ready()
        refusal = self._unknown_model({"model": http.match_info["name"]})
        return refusal if refusal is not None else _json(self._described())

    async def _health(self, http: web.Request) -> web.Response:
        await self.model.ready()
        return _json({"status": "ok", "model": self.model.model})

    async def _metrics(self, http: web.Request) -> web.Response:
        engine = (await self.model.ready()).engine
        counts = self.counts
        waiting = 0 if self._shares is None else self._shares.waiting
        values = [
            ("requests_total", "counter", "Requests for completions.", counts["requests"]),
            ("completions_total", "counter", "Prompts answered.", counts["done"]),
            ("refused_full_total", "counter", "Requests refused because the queue was full.", counts["queue_full"]),
            ("prompt_tokens_total", "counter", "Tokens of prompts.", counts["prompt_tokens"]),
            ("prompt_tokens_cached_total", "counter", "Tokens of prompts found in the cache.", counts["cached_tokens"]),
            ("completion_tokens_total", "counter", "Tokens of replies.", counts["completion_tokens"]),
            ("engine_steps_total", "counter", "Decode steps.", engine.steps),
            ("engine_tokens_total", "counter", "Tokens sampled.", engine.tokens),
            ("requests_running", "gauge", "Requests with a row.", len(engine.live)),
            ("requests_waiting", "gauge", "Requests without one.", len(engine.waiting) + waiting),
            ("rows", "gauge", "Requests that can run at once.", engine.rows),
        ]
        lines = [
            f"# HELP verifiers_{name} {text}\n# TYPE verifiers_{name} {kind}\nverifiers_{name} {value}\n"
            for name, kind, text, value in values
        ]
        return web.Response(text="".join(lines), content_type="text/plain", charset="utf-8")

    async def _update_weights(self, http: web.Request) -> web.Response:
        path = (await _body(http)).get("path")
        if not isinstance(path, str) or not path:
            raise errors.RequestRefusedError("'path' is missing: a folder of safetensors on the server's machine")
        try:
            count = await asyncio.to_thread(self.model.update_weights, path)
        except (ValueError, OSError) as error:
            raise errors.RequestRefusedError(f"these weights were not loaded: {error}") from error
        return _json({"status": "ok", "tensors": count})

    async def _reset_prefix_cache(self, http: web.Request) -> web.Response:
        await asyncio.to_thread(self.model.forget)
        return _json({"status": "ok"})


# --- bodies -------------------------------------------------------------------------------------------------------


async def _body(http: web.Request) -> dict[str, Any]:
    try:
        body = wire.decode(await http.read())
    except ValueError as error:
        raise errors.RequestRefusedError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise errors.RequestRefusedError("the body is not a JSON object")
    return body


def _prompts(prompt: Any) -> list[Any]:
    """A completion's prompt is a text or a list of ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise errors.RequestRefusedError("'prompt' is missing: a text, a list of token ids, or a list of either")
    return [prompt] if isinstance(prompt[0], int) else prompt


def _choices(body: Mapping[str, Any], prompts: list[Any]) -> int:
    """How many replies a request wants; more than fit are refused before anything is done for one of them."""
    n = body.get("n")
    wanted = len(prompts) * (n if type(n) is int and n > 0 else 1)
    if wanted > MOST_CHOICES:
        each = "" if n is None else f" × n={n}"
        raise errors.RequestRefusedError(f"{len(prompts)} prompts{each} in one request; at most {MOST_CHOICES} replies")
    return wanted


def _client_of(http: web.Request) -> tuple[str | None, str | None]:
    """Whose share a request is part of: an address and a key, so that several on one machine can be told apart."""
    return http.remote, http.headers.get("Authorization")


def _stream_settings(body: dict[str, Any]) -> tuple[bool, bool]:
    settings = body.pop("stream_options", None) or {}
    is_stream = body.pop("stream", None) or False
    if not isinstance(is_stream, bool) or not isinstance(settings, dict):
        raise errors.RequestRefusedError("'stream' is true or false, and 'stream_options' an object")
    return is_stream, bool(settings.get("include_usage"))


def _wants_ids(options: Any) -> bool:
    """Token ids come when they are asked for, and with logprobs unless they are declined."""
    read = options.get if isinstance(options, dict) else lambda name: getattr(options, name)
    wanted = read("return_token_ids")
    logprobs = read("logprobs")
    return bool(wanted) if wanted is not None else logprobs is not None and logprobs is not False


async def _together(waiting: list[Any]) -> list[Any]:
    """All of them; if one fails, the others are cancelled."""
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
    """One response of one prompt or of several."""
    response = dict(raws[0])
    if len(raws) > 1:
        choices = [dict(choice, prompt_token_ids=raw["prompt_token_ids"]) for raw in raws for choice in raw["choices"]]
        response["choices"] = [dict(choice, index=index) for index, choice in enumerate(choices)]
        response["usage"] = _total([raw["usage"] for raw in raws])
        del response["prompt_token_ids"]
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


def _delta(prompt: Prompt, piece: Piece, *, is_first: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": piece.index, "finish_reason": piece.finish_reason, "logprobs": None}
    if prompt.message_type == "completion":
        return {**choice, "text": piece.text}
    delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
    if piece.text or is_first:
        delta["content"] = piece.text
    if piece.calls:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(piece.calls)]
    return {**choice, "delta": delta}


def _json(body: Any) -> web.Response:
    return web.Response(body=wire.encode(body), content_type="application/json")


def _error_body(kind: str, code: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}


def _error(
    status: int, kind: str, code: str, message: str, *, headers: Mapping[str, str] | None = None
) -> web.Response:
    written = wire.encode(_error_body(kind, code, message))
    return web.Response(body=written, status=status, headers=headers, content_type="application/json")
