"""The aiohttp application of a local model's server: access, routes, errors, models, health and metrics."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from verifiers import errors
from verifiers.clients.server_access import lost_client, refusal
from verifiers.dialects.completions import Completions
from verifiers.dialects.http import error_reply, json_reply, words_of
from verifiers.dialects.messages import Messages
from verifiers.dialects.responses import Responses
from verifiers.engine.local_model import LocalModel
from verifiers.engine.server.serving import Serving
from verifiers.engine.server.tokens import TokenEndpoints
from verifiers.engine.server.weights import WeightEndpoints

logger = logging.getLogger("verifiers.engine")

MOST_BYTES = 8 << 20  # maximum size of a request body: ten times a context of 128,000 tokens


class ServedModel:
    """The endpoints of one model. `app` creates the aiohttp application."""

    def __init__(
        self, model: LocalModel, *, api_key: str | None = None, host: str = "127.0.0.1", allow_hosts: Sequence[str] = ()
    ) -> None:
        self.model = model
        self.api_key = api_key
        self.host = host
        self.allow_hosts = tuple(allow_hosts)
        self.serving = Serving(model)

    def app(self) -> web.Application:
        completions, tokens = Completions(self.serving), TokenEndpoints(self.serving)
        responses, messages = Responses(self.serving), Messages(self.serving)
        weights = WeightEndpoints(self.model)
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._model),
                web.post("/v1/chat/completions", completions.chat),
                web.post("/v1/completions", completions.text),
                web.post("/v1/responses", responses.create),
                web.post("/v1/messages", messages.create),
                web.post("/v1/messages/count_tokens", messages.count_tokens),
                web.post("/tokenize", tokens.tokenize),
                web.post("/detokenize", tokens.detokenize),
                *weights.routes(),
            ]
        )
        app.on_cleanup.append(weights.close)
        return app

    # --- every request --------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        http = request  # aiohttp requires the parameter name `request`
        if found := refusal(http, api_key=self.api_key, host=self.host, allow_hosts=self.allow_hosts):
            return error_reply(http, found.status, "invalid_request_error", found.code, found.message)
        try:
            return await handler(http)
        except web.HTTPException as error:
            code = "not_found" if error.status == 404 else "invalid_request"
            return error_reply(
                http, error.status, "invalid_request_error", code, f"{http.method} {http.path}: {error.reason}"
            )
        except errors.Error as error:
            status, kind, code = words_of(error)
            self.serving.counts[code] += 1
            return error_reply(http, status, kind, code, str(error))
        except Exception as error:
            if (nobody := lost_client(http, error)) is not None:
                return nobody
            logger.exception("%s %s failed", http.method, http.path)
            return error_reply(http, 500, "server_error", "internal_error", f"{type(error).__name__}: {error}")

    # --- the model ------------------------------------------------------------------------------------------------

    async def _description(self) -> dict[str, Any]:
        engine = (await self.model.ready()).engine
        return {
            "id": self.serving.name,
            "object": "model",
            "created": self.serving.started,
            "owned_by": "verifiers",
            "max_model_len": engine.length,
        }

    async def _models(self, http: web.Request) -> web.Response:
        return json_reply({"object": "list", "data": [await self._description()]})

    async def _model(self, http: web.Request) -> web.Response:
        description = await self._description()
        self.serving.check_model(http.match_info["name"])
        return json_reply(description)

    async def _health(self, http: web.Request) -> web.Response:
        await self.model.ready()
        return json_reply({"status": "ok", "model": self.serving.name})

    async def _metrics(self, http: web.Request) -> web.Response:
        engine = (await self.model.ready()).engine
        counts, waiting = self.serving.counts, self.serving.waiting
        values = [
            ("requests_total", "counter", "Requests for completions.", counts["requests"]),
            ("completions_total", "counter", "Prompts answered.", counts["done"]),
            ("refused_full_total", "counter", "Requests refused because the queue was full.", counts["queue_full"]),
            ("prompt_tokens_total", "counter", "Tokens of prompts.", counts["prompt_tokens"]),
            ("prompt_tokens_cached_total", "counter", "Prompt tokens found in the cache.", counts["cached_tokens"]),
            ("completion_tokens_total", "counter", "Tokens of replies.", counts["completion_tokens"]),
            ("engine_steps_total", "counter", "Decode steps.", engine.steps),
            ("engine_tokens_total", "counter", "Tokens sampled.", engine.tokens),
            ("requests_running", "gauge", "Requests that are decoding.", len(engine.running)),
            ("requests_waiting", "gauge", "Requests that are waiting.", len(engine.waiting) + waiting),
            ("rows", "gauge", "Requests that can run at once.", engine.rows),
        ]
        lines = [
            f"# HELP verifiers_{name} {text}\n# TYPE verifiers_{name} {kind}\nverifiers_{name} {value}\n"
            for name, kind, text, value in values
        ]
        return web.Response(text="".join(lines), content_type="text/plain", charset="utf-8")
