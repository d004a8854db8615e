"""A stand-in for an OpenEnv server, written from its protocol: JSON messages on ``/ws``, schemas at ``/schema``."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import WSMsgType, web

from verifiers.clients.server_thread import ServerThread

GUESS = {
    "title": "GuessAction",
    "description": "Guess the number.",
    "type": "object",
    "properties": {
        "metadata": {"type": "object", "additionalProperties": True},
        "number": {"type": "integer", "description": "Your guess."},
    },
    "required": ["number"],
    "additionalProperties": False,
}
CALL = {
    "title": "CallToolAction",
    "type": "object",
    "properties": {"tool_name": {"type": "string"}, "arguments": {"type": "object"}},
}
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


class GuessServer(ServerThread):
    """Guess a number: the seed is the number. At most ``sessions`` at once; ``is_mcp`` has an MCP tool instead.

    ``answer`` is what a step is answered with instead of an observation; None closes the connection. ``begins`` is what
    a reset is answered with, ``action`` the schema of actions, and ``listed`` the MCP tools.
    """

    def __init__(
        self,
        *,
        sessions: int = 100,
        is_mcp: bool = False,
        has_rewards: bool = True,
        answer: str | None = "",
        begins: Any = None,
        action: Any = None,
        listed: Any = (ADD,),
    ) -> None:
        super().__init__()
        self.answer, self.begins, self.listed = answer, begins, listed
        self.action = action or (CALL if is_mcp else GUESS)
        self.sessions, self.is_mcp, self.has_rewards = sessions, is_mcp, has_rewards
        self.open = self.most_open = self.begun = self.refused = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def make_runner(self) -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.get("/schema", self._schema), web.get("/ws", self._play)])
        return web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

    async def _schema(self, http: web.Request) -> web.Response:
        return web.json_response({"action": self.action, "observation": {}, "state": {}})

    async def _play(self, http: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(http)
        if self.open >= self.sessions:
            self.refused += 1
            await socket.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            await socket.close()
            return socket
        self.open, self.begun = self.open + 1, self.begun + 1
        self.most_open = max(self.most_open, self.open)
        secret = 0
        try:
            async for frame in socket:
                if frame.type is not WSMsgType.TEXT:
                    break
                message = json.loads(frame.data)
                if message["type"] == "close":
                    break
                if message["type"] == "reset":
                    secret = message["data"].get("seed", 0)
                    await asyncio.sleep(0.01)
                    first = _observed({"text": "Guess a number.", "metadata": {}}, None, False)
                    await socket.send_json(self.begins or first)
                elif self.answer is None:
                    assert http.transport is not None
                    http.transport.abort()
                elif self.answer:
                    await socket.send_str(self.answer)
                else:
                    await socket.send_json(self._step(message["data"], secret))
        finally:
            self.open -= 1
        return socket

    def _step(self, action: dict[str, Any], secret: int) -> dict[str, Any]:
        if action.get("type") == "list_tools":
            return _observed({"tools": self.listed}, None, False)
        if action.get("type") == "call_tool":
            given = action["arguments"]
            answer = {"tool_name": action["tool_name"], "result": {"data": given["a"] + given["b"]}, "error": None}
            return _observed(answer, 0.5, False)
        if action["number"] == 13:
            return {"type": "error", "data": {"message": "13 is bad luck", "code": "EXECUTION_ERROR"}}
        is_right = action["number"] == secret
        hint = "right" if is_right else "more" if action["number"] < secret else "less"
        return _observed({"text": hint}, float(is_right) if self.has_rewards else None, is_right)


def _observed(observation: Any, reward: Any, is_done: bool) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": is_done}}
