"""An HTTP request to a server of ours → whether it may ask: by the name it calls us, by its key, not from web pages."""

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
    """Why a request is not answered; None if it is."""
    named = http.headers.get("Host")
    if named is not None and not is_own_host(named, host, allow_hosts):
        said = f"this server is not called {named!r:.200}; the names it was given are (--allow-host NAME)"
        return Refusal(421, "unknown_host", said)
    if api_key is not None and http.path not in OPEN_PATHS:
        given = key_of(http) or ""
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), api_key.encode()):
            return Refusal(401, "invalid_api_key", "the API key is wrong or missing")
    elif http.method == "POST" and "Origin" in http.headers:  # a page in a browser: anyone's, without a key
        return Refusal(403, "forbidden", "web pages need a server with an API key")
    return None


def key_of(http: web.Request) -> str | None:
    """The key that a request came with, in OpenAI's header or in Anthropic's."""
    if "Authorization" in http.headers:
        return http.headers["Authorization"].removeprefix("Bearer ")
    return http.headers.get("x-api-key")


def lost_client(http: web.BaseRequest, error: Exception) -> web.Response | None:
    """What to answer where a handler failed because its client hung up: something that is never sent; else None.

    Raised on to aiohttp, the error would be logged as one of the server, with a traceback.
    """
    is_gone = http.transport is None or http.transport.is_closing()
    if not (is_gone and isinstance(error, ConnectionError)):
        return None
    logger.debug("%s hung up before the end of %s %s", http.remote, http.method, http.path)
    return web.Response(status=499)
