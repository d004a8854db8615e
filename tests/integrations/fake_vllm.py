"""A `vllm` package that only writes down how it was started, and an HTTP server that answers as vLLM's does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

MODULE = """
import json, os, signal, sys, time
if "--help" in sys.argv or "--help=all" in sys.argv:
    print("usage: api_server.py [-h] " + os.environ["FAKE_VLLM_OPTIONS"])
    sys.exit(0)
kept = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
with open(os.environ["FAKE_VLLM_LOG"], "w") as log:
    json.dump({"argv": sys.argv[1:], "env": kept, "pid": os.getpid()}, log)
if "--port=wait" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(43))
    print("up", flush=True)
    time.sleep(30)
sys.exit(41)
"""
OPTIONS = (
    "[--model MODEL] [--host HOST] [--port PORT] [--data-parallel-size N] [--tensor-parallel-size N] "
    "[--enforce-eager | --no-enforce-eager] [--max-model-len N] [--dtype T] [--gpu-memory-utilization X] "
    "[--enable-prefix-caching | --no-enable-prefix-caching] [--enable-lora | --no-enable-lora] "
    "[--enable-log-requests | --no-enable-log-requests] [--logprobs-mode M] [--structured-outputs-config C] "
    "[--distributed-executor-backend B] [--device-ids D] [--hf-overrides H] [--config C] [--uds U]"
)


def install(folder: Path) -> None:
    """Put the package into a folder, to be named in PYTHONPATH."""
    module = folder / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    for package in (module.parent, *list(module.parents)[1:3]):
        (package / "__init__.py").touch()
    module.write_text(MODULE)


class FakeServer:
    """The endpoints; ``asked`` is what was called, in order, ``answers`` what to say instead of a success."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.answers: dict[str, list[tuple[int, Any]]] = {}
        self.keys: list[str | None] = []
        self.delay_s = 0.0

    def answer(self, path: str, *replies: tuple[int, Any]) -> None:
        self.answers[path] = list(replies)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    async def _serve(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.json() if request.can_read_body else dict(request.query)))
        self.keys.append(request.headers.get("Authorization"))
        await asyncio.sleep(self.delay_s)
        waiting = self.answers.get(request.path)
        if waiting:
            status, body = waiting.pop(0)
            return web.json_response(body, status=status)
        if request.path.endswith("completions"):
            return web.json_response(completion(self.asked[-1][1]))
        if "lora" in request.path:
            return web.Response(text="Success: LoRA adapter 'a' added successfully.")
        return web.Response() if request.path == "/health" else web.json_response({"success": True})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        async with TestServer(app) as server:
            yield str(server.make_url("")).rstrip("/")


def completion(body: dict[str, Any]) -> dict[str, Any]:
    """A reply in the shape that vLLM 0.32 gives it, with ids and logprobs only where they are asked for."""
    is_chat = "messages" in body
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None, "token_ids": None}
    reply: dict[str, Any] = {"id": "c", "model": body["model"], "choices": [choice], "prompt_token_ids": None}
    if is_chat:
        choice["message"] = {"role": "assistant", "content": "4"}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": "4", "logprob": -0.5}, {"token": "", "logprob": -0.1}]}
    else:
        choice["text"] = "4"
        if body.get("logprobs"):
            choice["logprobs"] = {"tokens": ["4", ""], "token_logprobs": [-0.5, -0.1]}
    if body.get("return_token_ids"):
        choice["token_ids"] = [52, 2]
        (reply if is_chat else choice)["prompt_token_ids"] = [1, 282, 201]
    return reply
