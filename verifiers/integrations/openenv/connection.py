"""Messages of OpenEnv's WebSocket ↔ values: one connection is one session of an environment on its server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp

from verifiers.clients import wire
from verifiers.errors import InfraError, ToolCallError

MOST_BYTES = 100 << 20  # per message: observations may be images
HEARTBEAT_S = 20.0
LONGEST_PAUSE_S = 2.0


class ActionRefusedError(ToolCallError):
    """The server refused an action: the model reads the message and may try another one."""


class FullError(InfraError):
    """The server has reached its maximum number of sessions."""


class Connection:
    """One session on a server."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None, timeout_s: float) -> None:
        self._url, self._headers, self._timeout_s = url, dict(headers or {}), timeout_s
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def schema(self) -> dict[str, Any]:
        """The JSON schemas of the server's actions, observations and state."""
        try:
            async with self._session().get(f"{self._url}/schema") as reply:
                reply.raise_for_status()
                body = await reply.json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise InfraError(f"the OpenEnv server at {self._url} returned no schema: {_said(error)}") from error
        if not isinstance(body, dict) or not isinstance(body.get("action"), dict):
            raise InfraError(f"{self._url}/schema is not the schema of an OpenEnv server")
        return body

    async def begin(self, kind: str, data: Mapping[str, Any], *, wait_s: float) -> dict[str, Any]:
        """Send the first message of a session; if the server is full, wait up to ``wait_s`` for a free session."""
        ends, pause_s = asyncio.get_running_loop().time() + wait_s, 0.05
        while True:
            try:
                return await self.ask(kind, data)
            except FullError:
                if asyncio.get_running_loop().time() + pause_s > ends:
                    raise
            await self._disconnect()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send one message; returns the server's answer."""
        try:
            async with asyncio.timeout(self._timeout_s):
                socket = await self._connected()
                try:
                    await socket.send_str(wire.encode({"type": kind, "data": dict(data)}).decode())
                except ConnectionError:
                    pass  # a full server sends an error and closes, perhaps before this message
                frame = await socket.receive()
        except TimeoutError as error:
            raise InfraError(f"the OpenEnv server at {self._url} did not answer in {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise InfraError(f"the OpenEnv server at {self._url} cannot be reached: {_said(error)}") from error
        if frame.type is not aiohttp.WSMsgType.TEXT:
            raise InfraError(f"the OpenEnv server at {self._url} closed the session ({frame.extra or frame.type.name})")
        return _read(frame.data)

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            self._http = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        return self._http

    async def _connected(self) -> aiohttp.ClientWebSocketResponse:
        if self._socket is None:
            url = f"ws{self._url.removeprefix('http')}/ws"
            self._socket = await self._session().ws_connect(url, max_msg_size=MOST_BYTES, heartbeat=HEARTBEAT_S)
        return self._socket

    async def _disconnect(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            try:
                await socket.send_str('{"type": "close"}')
            except (ConnectionError, aiohttp.ClientError):  # the server closed it first
                pass
            await socket.close()

    async def close(self) -> None:
        await self._disconnect()
        if self._http is not None:
            await self._http.close()
            self._http = None


def _read(text: str) -> dict[str, Any]:
    try:
        message = wire.decode(text.encode())
        kind, data = message["type"], message.get("data") or {}
        if not isinstance(data, dict):
            raise TypeError("data must be an object")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InfraError(f"an OpenEnv server answered {text!r:.100}, which is not a message of its protocol") from error
    if kind != "error":
        answer: dict[str, Any] = data
        return answer
    code, said = data.get("code"), str(data.get("message") or "it failed")
    if code == "CAPACITY_REACHED":
        raise FullError(f"the OpenEnv server has no free session: {said}")
    if code in ("VALIDATION_ERROR", "EXECUTION_ERROR"):
        known = [one for one in data.get("errors") or () if isinstance(one, dict)]
        wrong = [f"{'.'.join(map(str, one.get('loc') or ()))}: {one.get('msg')}" for one in known]
        raise ActionRefusedError("; ".join([said, *wrong]))
    raise InfraError(f"the OpenEnv server failed ({code}): {said}")


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
