"""A local endpoint for agents on this machine, with a separate URL and key for each rollout."""

from __future__ import annotations

import asyncio
import contextvars
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from verifiers import errors
from verifiers.clients.hosts import is_own_host
from verifiers.clients.server_access import key_of, lost_client
from verifiers.dialects.http import error_reply, json_reply, words_of
from verifiers.envs.agent_calls import AgentCalls, RolloutOverError
from verifiers.types import unique_id

logger = logging.getLogger("verifiers.envs")

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HOST = "127.0.0.1"
MOST_BYTES = 64 << 20  # of a request, which may contain a whole history with images


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """The URLs of one rollout's model, and its key. The key is not shown in the repr."""

    base_url: str
    anthropic_base_url: str
    api_key: str = field(repr=False)


class AgentEndpoint:
    """One server per event loop, for all rollouts on it. It starts with the first of them."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[str, AgentCalls]] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._root = ""

    @asynccontextmanager
    async def opened(self, answering: AgentCalls) -> AsyncIterator[Address]:
        """Within the block, a rollout's calls are answered at its own address; afterwards they are refused."""
        await self._start()
        name, key = unique_id(), f"vf-{secrets.token_urlsafe(24)}"
        self._open[name] = key, answering
        try:
            root = f"{self._root}/{name}"
            yield Address(base_url=f"{root}/v1", anthropic_base_url=root, api_key=key)
        finally:
            del self._open[name]
            await answering.close()

    async def _start(self) -> None:
        async with self._starting:
            if self._runner is None:
                # The handlers must not inherit context variables that were set for the first rollout.
                listen = asyncio.get_running_loop().create_task(self._listen(), context=contextvars.Context())
                self._runner = await listen

    async def _listen(self) -> web.AppRunner:
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/{rollout}/v1/models", self._models),
                web.post("/{rollout}/v1/chat/completions", self._route(lambda calls: calls.completions.chat)),
                web.post("/{rollout}/v1/completions", self._route(lambda calls: calls.completions.text)),
                web.post("/{rollout}/v1/responses", self._route(lambda calls: calls.responses.create)),
                web.post("/{rollout}/v1/messages", self._route(lambda calls: calls.messages.create)),
                web.post("/{rollout}/v1/messages/count_tokens", self._route(lambda calls: calls.messages.count_tokens)),
            ]
        )
        # Cancel the handler if the agent closes the connection.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0, backlog=4096).start()
        self._root = f"http://{HOST}:{runner.addresses[0][1]}"
        return runner

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    # --- every request --------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if not self._has_key(request):
            message = "the URL and the key do not belong to a running rollout: each rollout has its own"
            return _final(error_reply(request, 401, "invalid_request_error", "invalid_api_key", message))
        try:
            return await handler(request)
        except web.HTTPException as error:
            code, message = "not_found" if error.status == 404 else "invalid_request", f"{request.path}: {error.reason}"
            return _final(error_reply(request, error.status, "invalid_request_error", code, message))
        except RolloutOverError as error:
            return _final(error_reply(request, 400, "invalid_request_error", error.condition, str(error)))
        except errors.Error as error:
            return _final(error_reply(request, *words_of(error), str(error)))
        except Exception as error:
            if (nobody := lost_client(request, error)) is not None:
                return nobody
            logger.exception("%s %s failed", request.method, request.path)
            return _final(
                error_reply(request, 500, "server_error", "internal_error", f"{type(error).__name__}: {error}")
            )

    def _has_key(self, http: web.Request) -> bool:
        found = self._open.get(http.path.split("/")[1])  # not from match_info, which an unknown path does not have
        if found is None or not is_own_host(http.headers.get("Host", HOST), HOST):
            return False
        return hmac.compare_digest((key_of(http) or "").encode(errors="surrogateescape"), found[0].encode())

    def _route(self, find: Callable[[AgentCalls], _Handler]) -> _Handler:
        async def handle(http: web.Request) -> web.StreamResponse:
            return await find(self._open[http.match_info["rollout"]][1])(http)

        return handle

    async def _models(self, http: web.Request) -> web.Response:
        name = self._open[http.match_info["rollout"]][1].name
        model = {"id": name, "object": "model", "created": 0, "owned_by": "verifiers"}
        return json_reply({"object": "list", "data": [model]})


def _final(response: web.Response) -> web.Response:
    """Tell SDKs not to retry, because the rollout's client has done so already."""
    response.headers["x-should-retry"] = "false"
    return response
