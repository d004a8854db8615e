"""A vLLM server that runs already → the same one with other weights, or another adapter, and no stale cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from verifiers.clients import wire
from verifiers.clients.retries import status_failure
from verifiers.clients.secrets import hide_in_url, mask, redact, secrets_in
from verifiers.errors import ConnectionFailedError, DeadlineError, Error, RequestRefusedError, ServerError

HEALTH_TIMEOUT_S = 5.0
ASK_AGAIN_S = 0.2
SHOWN_CHARS = 500
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


class VLLMServer:
    """What a trainer asks of a vLLM server; `vf-vllm` starts one that answers.

    ``base_url`` is the one that clients use, with or without ``/v1``. ``timeout_s`` bounds each request to the server.

    >>> VLLMServer("http://localhost:8000/v1", "sk-secret")
    VLLMServer('http://localhost:8000', api_key='sk-…')
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
        return f"VLLMServer({hide_in_url(self.base_url)!r}, api_key={mask(self.api_key)!r})"

    # --- is it there? ---------------------------------------------------------------------------------------------

    async def health(self) -> bool:
        """Is the server up, and its engine alive?"""
        try:
            await self._ask("GET", "/health", timeout_s=min(self.timeout_s, HEALTH_TIMEOUT_S))
        except Error:
            return False
        return True

    async def wait(self, timeout_s: float = 600.0) -> None:
        """Wait until the server is up; raises `DeadlineError` when it is not within that time."""
        end = time.monotonic() + timeout_s
        while not await self.health():
            if time.monotonic() >= end:
                raise DeadlineError(f"no healthy server at {hide_in_url(self.base_url)} within {timeout_s:g} s")
            await asyncio.sleep(ASK_AGAIN_S)

    # --- weights and adapters -------------------------------------------------------------------------------------

    async def reload_weights(self, path: str | Path, *, check: bool = True) -> None:
        """Load the weights in a folder (as `save_pretrained` writes it) in place of the present ones.

        Requests in flight end with the old weights, later ones wait for the new. The server reads the folder itself;
        one that it cannot read ends its engine for good, so it is looked at from here first, unless ``check`` is False
        (a folder that only the server's machine has).
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": _weights(path, check=check)}}
        async with self.paused():
            await self._ask("POST", "/collective_rpc", body)
            await self.reset_prefix_cache()

    async def load_lora(self, name: str, path: str | Path) -> None:
        """Load an adapter (a folder of `peft`), to be asked for as the model ``name``; one of that name is replaced."""
        body = {"lora_name": name, "lora_path": _whole(path), "load_inplace": True}
        async with self.paused():
            try:
                await self._ask("POST", "/v1/load_lora_adapter", body)
            except RequestRefusedError as error:
                if "already been loaded" not in str(error):
                    raise
                await self.unload_lora(name)  # a vLLM that knows no `load_inplace`
                await self._ask("POST", "/v1/load_lora_adapter", body)
            await self.reset_prefix_cache()

    async def unload_lora(self, name: str) -> None:
        """Drop an adapter."""
        await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def reset_prefix_cache(self) -> None:
        """Forget the keys and values of old prompts; waits while running requests hold some of them."""
        end = time.monotonic() + self.timeout_s
        while True:
            reply = await self._ask("POST", "/reset_prefix_cache")
            if not isinstance(reply, dict) or reply.get("success") is not False:  # older ones answer with nothing
                return
            if time.monotonic() + ASK_AGAIN_S >= end:
                raise DeadlineError(f"the prefix cache was still in use after {self.timeout_s:g} s")
            await asyncio.sleep(ASK_AGAIN_S)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No request runs inside the block: those in flight end first, later ones wait.

        A vLLM too old to know how to pause goes on with them, and the prefix cache is reset once they are done.
        """
        can_pause = True
        try:
            can_pause = await self._pause()
            yield
        except BaseException:
            if can_pause:
                with suppress(Error):  # what went wrong inside the block is what the caller must hear
                    await self._ask("POST", "/resume")
            raise
        if can_pause:
            await self._ask("POST", "/resume")

    async def _pause(self) -> bool:
        status, text = await self._send("POST", "/pause?mode=wait", None, self.timeout_s)
        if status == 404:
            return False
        self._check("POST", "/pause", status, text)
        return True

    # --- requests -------------------------------------------------------------------------------------------------

    async def _ask(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """The reply's JSON, or its text where it is none."""
        status, text = await self._send(method, path, body, timeout_s or self.timeout_s)
        self._check(method, path, status, text)
        try:
            return wire.decode(text.encode())
        except ValueError:
            return text

    async def _send(self, method: str, path: str, body: Any, timeout_s: float) -> tuple[int, str]:
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
            failed = DeadlineError(self._shown(f"{method} {path}: no whole reply within {timeout_s:g} s"))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            text = f"{method} {path}: {type(error).__name__}: {error}"
            failed = ConnectionFailedError(self._shown(f"{text}; is the server at {self.base_url} running?"))
        raise failed  # outside of the except: aiohttp's exceptions carry the request's headers, and so its key

    def _check(self, method: str, path: str, status: int, text: str) -> None:
        if 200 <= status < 300:
            return
        said = self._shown(status_failure(status, {}, text).text)
        said = said if len(said) <= SHOWN_CHARS else f"{said[:SHOWN_CHARS]}…"
        kind = RequestRefusedError if status < 500 else ServerError
        raise kind(f"{method} {path}: {said}{_hint(path, status, text)}")

    def _shown(self, text: str) -> str:
        keys = secrets_in({}, [self.base_url])
        return redact(text, [*keys, self.api_key] if self.api_key else keys)


def _whole(path: str | Path) -> str:
    """The server's working directory is not ours."""
    return str(Path(path).absolute())


def _weights(path: str | Path, *, check: bool) -> str:
    """The whole path of a folder, in which there are weights."""
    folder = _whole(path)
    if check and not any(next(Path(folder).glob(pattern), None) for pattern in WEIGHTS):
        raise RequestRefusedError(
            f"{folder} holds no weights ({', '.join(WEIGHTS)}); check=False if only the server's machine has it"
        )
    return folder


def _hint(path: str, status: int, text: str) -> str:
    """What to do where the server has no such endpoint."""
    if status not in (404, 405) or "not found" not in text.lower() or "Error" in text:
        return ""
    if "lora" in path:
        return "; start it with `vf-vllm --enable-lora …`"
    return "; start it with `vf-vllm …`, or with VLLM_SERVER_DEV_MODE=1 in its environment"
