"""An HTTP request to one of our servers → whether it is allowed, by its Host header, API key and Origin."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Collection
from typing import NamedTuple

from aiohttp import web

from verifiers.clients.hosts import is_own_host

logger = logging.getLogger("verifiers.clients")

OPEN_PATHS = ("/health",)


class Refusal(NamedTuple):
    status: int
    code: str
    message: str


def refusal(http: web.Request, *, api_key: str | None, host: str, allow_hosts: Collection[str] = ()) -> Refusal | None:
    """Why a request is refused; None if it is allowed."""
    named = http.headers.get("Host")
    if named is not None and not is_own_host(named, host, allow_hosts):
        said = f"the Host {named!r:.200} is not a name of this server; allow it with --allow-host NAME"
        return Refusal(421, "unknown_host", said)
    if api_key is not None and http.path not in OPEN_PATHS:
        given = key_of(http) or ""
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), api_key.encode()):
            return Refusal(401, "invalid_api_key", "the API key is wrong or missing")
    elif http.method == "POST" and "Origin" in http.headers:  # without a key, any web page in a browser could send this
        return Refusal(403, "forbidden", "web pages need a server with an API key")
    return None


def key_of(http: web.Request) -> str | None:
    """The API key of a request, from OpenAI's header or from Anthropic's."""
    if "Authorization" in http.headers:
        return http.headers["Authorization"].removeprefix("Bearer ")
    return http.headers.get("x-api-key")


def lost_client(http: web.BaseRequest, error: Exception) -> web.Response | None:
    """A placeholder response if a handler failed because its client disconnected, else None. It is never sent.

    If the error reached aiohttp, aiohttp would log it as a server error with a traceback.
    """
    is_gone = http.transport is None or http.transport.is_closing()
    if not (is_gone and isinstance(error, ConnectionError)):
        return None
    logger.debug("%s disconnected before the end of %s %s", http.remote, http.method, http.path)
    return web.Response(status=499)
