"""Samplers for tests: real processes of `vf serve`, and trainings in processes of their own, to be killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

import verifiers as vf
from tests.engine import tiny
from verifiers.clients.protocol import Request
from verifiers.clients.server_thread import ServerThread
from verifiers.engine.channel import opened

ROOT = Path(__file__).parents[2]
START_S = 400.0


def save_model(folder: Path, **kwargs: Any) -> Path:
    tokenizer = tiny.tokenizer()
    tiny.model(tokenizer, **kwargs).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Server:
    """`vf serve` as a process of its own."""

    def __init__(self, model: Path, port: int = 0) -> None:
        self.process = start("-m", "verifiers", "serve", str(model), "--port", str(port), "--rows", "16")
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.said.extend(self.process.stderr)

    @property
    def url(self) -> str:
        """Where it is, once it is there."""
        found = until(lambda: re.search(r"http://[\d.:]+/v1", "".join(list(self.said))), self.process)
        return str(found[0])

    @property
    def port(self) -> int:
        return int(self.url.removesuffix("/v1").rsplit(":", 1)[1])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()


def start(*arguments: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)


def until(found: Any, process: subprocess.Popen[str] | None = None, limit_s: float = START_S) -> Any:
    """Wait until something is there; what it is."""
    end = time.monotonic() + limit_s
    while not (value := found()):
        assert process is None or process.poll() is None, "the process has ended"
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.02)
    return value


class Vllm(ServerThread):
    """The endpoints of vLLM 0.32 that a trainer asks, with what it takes as their bodies, over a model of ours.

    Started by `vf-vllm` it says which weights made each token, as the real one does: their name is "default" until they
    are given one. ``says_versions=False`` is a plain `vllm serve`; ``lies`` is said instead of the truth.
    """

    INIT = {"master_address", "master_port", "rank_offset", "world_size", "packed", "nccl_unique_id_b64"}

    def __init__(
        self,
        *,
        version: Any = "0.32.0",
        config: Any = None,
        seed: int = 0,
        takes_weights: bool = True,
        says_versions: bool = True,
    ) -> None:
        super().__init__(host="127.0.0.1", port=0)
        self._version = {"version": version} if isinstance(version, str) else version
        self._config = {"backend": "gloo"} if config is None and isinstance(version, str) else config
        self._takes = takes_weights
        tokenizer = tiny.tokenizer()
        self._local = vf.LocalModel(tiny.model(tokenizer, seed=seed), tokenizer, name="served", rows=16)
        self.engine = self._local.engine
        self.engine.name_weights("default")
        self._channel: Any = None
        self._says_versions = says_versions
        self.lies: Any = None
        self.is_broken = self.hangs = False
        self.asked: list[str] = []
        self.versions: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def stop(self) -> None:
        super().stop()
        if self._channel is not None:
            self._channel.close()
        self._local.close()

    def make_runner(self) -> web.BaseRunner:
        app = web.Application(middlewares=[self._note])
        gets = {
            "/version": self._version,
            "/server_info": {"vllm_config": {"weight_transfer_config": self._config}},
            "/v1/models": {"data": [{"id": "served"}]},
            "/get_world_size": {"world_size": 1},
        }
        app.router.add_get("/health", self._health)
        for path, found in gets.items():
            app.router.add_get(path, self._answer(found))
        app.router.add_get("/weight_info", self._weight_info)
        for path in ("/start_weight_update", "/reset_prefix_cache"):
            app.router.add_post(path, self._answer({}))
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        app.router.add_post("/init_weight_transfer_engine", self._init)
        app.router.add_post("/update_weights", self._update)
        app.router.add_post("/finish_weight_update", self._finish)
        app.router.add_post("/v1/chat/completions", self._chat)
        return web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

    @web.middleware
    async def _note(self, http: web.Request, handler: Any) -> web.StreamResponse:
        if http.method == "POST" and not http.path.startswith("/v1"):
            self.asked.append(http.path_qs)
        found: web.StreamResponse = await handler(http)
        return found

    @staticmethod
    def _answer(found: Any) -> Any:
        async def answer(_: web.Request) -> web.Response:
            return web.json_response(found or {}, status=200 if found is not None else 404)

        return answer

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({}, status=503 if self.hangs else 200)

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.engine.runner.weight_version})

    async def _pause(self, http: web.Request) -> web.Response:
        await asyncio.to_thread(self.engine.pause, http.query["mode"])
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self.engine.resume()
        return web.json_response({"status": "resumed"})

    async def _init(self, http: web.Request) -> web.Response:
        body = await http.json()
        info = body.pop("init_info")
        if body or info.keys() - self.INIT or ("nccl_unique_id_b64" in info) == ("master_address" in info):
            return web.json_response({"error": "422"}, status=422)
        self._channel = await asyncio.to_thread(opened, info, rank=info["rank_offset"], timeout_s=60)
        return web.json_response({"message": "Weight transfer initialized"})

    async def _update(self, http: web.Request) -> web.Response:
        info = (await http.json())["update_info"]
        if set(info) != {"names", "dtype_names", "shapes"}:
            return web.json_response({"error": "422"}, status=422)
        await asyncio.to_thread(self._receive, info)
        return web.json_response({"message": "Weights updated"})

    def _receive(self, info: Any) -> None:
        own = dict(self.engine.model.named_parameters())
        with self.engine.lock, torch.no_grad():
            for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                self._channel.broadcast(tensor)
                if self._takes:
                    own[name].copy_(tensor)

    async def _finish(self, http: web.Request) -> web.Response:
        self.versions.append((await http.json())["weight_version"])
        await asyncio.to_thread(self.engine.name_weights, self.versions[-1])
        return web.json_response({"message": "Weight update finished"})

    async def _chat(self, http: web.Request) -> web.Response:
        if self.is_broken:
            return web.json_response({"error": "the engine is dead"}, status=500)
        if self.hangs:
            await asyncio.sleep(3600)
        body = await http.json()
        messages = body.pop("messages")
        body.pop("model")
        if self.lies is not None:
            body["ignore_eos"] = True  # as many tokens as are lied about
        reply = (await self._local.complete(Request(model="", prompt=messages, sampling=body))).raw
        for choice in reply["choices"]:
            said = choice.pop("weight_versions")
            if self._says_versions:
                choice["weight_versions"] = said if self.lies is None else self.lies
        reply.pop("sampling")
        return web.json_response(reply)
