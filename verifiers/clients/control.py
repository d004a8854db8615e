"""A server's control endpoints: JSON in, JSON out, and errors that never show a key."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import urlsplit

from verifiers.clients import wire
from verifiers.clients.retries import status_failure
from verifiers.clients.secrets import hide_in_url, mask, redact, secrets_in
from verifiers.errors import ConnectionFailedError, DeadlineError, Error, RequestRefusedError, ServerError

HEALTH_TIMEOUT_S = 5.0
ASK_AGAIN_S = 0.2
SHOWN_CHARS = 500


class ServerControl:
    """A trainer's control of the server that samples for it, `vf serve` or vLLM.

    ``base_url`` is the URL that clients use, with or without ``/v1``. ``timeout_s`` bounds each request to the server.

    >>> ServerControl("http://localhost:8000/v1", "sk-secret")
    ServerControl('http://localhost:8000', api_key='sk-…')
    """

    def __init__(self, base_url: str, api_key: str | None = None, *, timeout_s: float = 600.0) -> None:
        root = base_url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(root)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url must look like http://host:8000, not {hide_in_url(base_url)!r}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be above 0, not {timeout_s!r}")
        self.base_url = root
        self.api_key = (api_key or "").strip() or None
        self.timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"{type(self).__name__}({hide_in_url(self.base_url)!r}, api_key={mask(self.api_key)!r})"

    @property
    def host(self) -> str:
        return urlsplit(self.base_url).hostname or ""

    async def health(self) -> bool:
        """Is the server up and its engine alive?"""
        try:
            await self.ask("GET", "/health", timeout_s=min(self.timeout_s, HEALTH_TIMEOUT_S))
        except Error:
            return False
        return True

    async def wait(self, timeout_s: float = 600.0) -> None:
        """Wait until the server is up; raises `DeadlineError` after ``timeout_s``."""
        end = time.monotonic() + timeout_s
        while not await self.health():
            if time.monotonic() >= end:
                raise DeadlineError(f"no healthy server at {hide_in_url(self.base_url)} within {timeout_s:g} s")
            await asyncio.sleep(ASK_AGAIN_S)

    async def ask(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """The reply's JSON, or its text if it is not JSON."""
        status, text = await self.send(method, path, body, timeout_s or self.timeout_s)
        self.check(method, path, status, text)
        try:
            return wire.decode(text.encode())
        except ValueError:
            return text

    async def send(self, method: str, path: str, body: Any, timeout_s: float) -> tuple[int, str]:
        """The status and the text of the reply, whatever the status."""
        import aiohttp  # slow to import

        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        failed: Error
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.request(method, f"{self.base_url}{path}", json=body, allow_redirects=False) as response,
            ):
                return response.status, await response.text(errors="replace")
        except TimeoutError:
            failed = DeadlineError(self.shown(f"{method} {path}: no complete reply within {timeout_s:g} s"))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            text = f"{method} {path}: {type(error).__name__}: {error}"
            failed = ConnectionFailedError(self.shown(f"{text}; is the server at {self.base_url} running?"))
        raise failed  # outside the except block: aiohttp's exceptions contain the request's headers and so its key

    def check(self, method: str, path: str, status: int, text: str) -> None:
        """Raise an error if the status is not a success."""
        if 200 <= status < 300:
            return
        said = self.shown(status_failure(status, {}, text).text)
        said = said if len(said) <= SHOWN_CHARS else f"{said[:SHOWN_CHARS]}…"
        kind = RequestRefusedError if status < 500 else ServerError
        raise kind(f"{method} {path}: {said}{self.hint(path, status, text)}")

    def hint(self, path: str, status: int, text: str) -> str:
        """What to do if the server has no such endpoint."""
        if status not in (404, 405) or "not found" not in text.lower() or "Error" in text:
            return ""
        if "lora" in path:
            return "; start it with `vf-vllm --enable-lora …`"
        return "; start it with `vf-vllm …`, or with VLLM_SERVER_DEV_MODE=1 in its environment"

    def shown(self, text: str) -> str:
        keys = secrets_in({}, [self.base_url])
        return redact(text, [*keys, self.api_key] if self.api_key else keys)
