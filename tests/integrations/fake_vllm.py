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
if "--port=answer" in sys.argv:
    from vllm.entrypoints.openai.answering import main
    main()
sys.exit(41)
"""
OUTPUTS = """
from dataclasses import dataclass

@dataclass
class WeightVersionSpan:
    version: str
    start: int
    end: int

@dataclass
class CompletionOutput:
    index: int
    finish_reason: str = None
    weight_versions: list = None

@dataclass
class RequestOutput:
    outputs: list
"""
CHAT = """
import json
from types import SimpleNamespace

def answer(outputs):
    return SimpleNamespace(choices=[SimpleNamespace(index=i, finish_reason=one.finish_reason) for i, one in outputs])

def event(index, finish_reason):
    chunk = {"choices": [{"index": index, "delta": {"content": "\\ud83d\\ude00"}, "finish_reason": finish_reason}]}
    return f"data: {json.dumps(chunk)}\\n\\n"

class OpenAIServingChat:
    async def chat_completion_full_generator(self, request, result_generator, request_id):
        async for result in result_generator:
            last = result
        return answer([(one.index, one) for one in last.outputs]) if last.outputs else {"error": "none"}

    async def chat_completion_stream_generator(self, request, result_generator, request_id):
        async for result in result_generator:
            for one in result.outputs:
                yield event(one.index, one.finish_reason)
        yield "data: [DONE]\\n\\n"
"""
COMPLETION = """
from vllm.entrypoints.openai.chat_completion.serving import answer, event

class OpenAIServingCompletion:
    def request_output_to_completion_response(self, final_res_batch, request, request_id):
        return answer(list(enumerate(one for result in final_res_batch for one in result.outputs)))

    async def completion_stream_generator(self, request, engine_inputs, result_generator, request_id):
        async for prompt, result in result_generator:
            for one in result.outputs:
                yield event(prompt * (request.n or 1) + one.index, one.finish_reason)
        yield "data: [DONE]\\n\\n"
"""
ANSWERING = """
import asyncio, json, sys
from types import SimpleNamespace
from vllm.outputs import CompletionOutput as Output, RequestOutput, WeightVersionSpan as Span
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

def ended(index, *starts, end=5):
    ends = [start for _, start in starts[1:]] + [end]
    return Output(index, "stop", [Span(name, start, stop) for (name, start), stop in zip(starts, ends)])

SECOND, FIRST = ended(1, ("3", 0)), ended(0, ("3", 0), ("4", 2))

async def engine(*results):
    for result in results:
        await asyncio.sleep(0)
        yield result

def deltas(*place):
    parts = [[Output(0)], [Output(1)], [SECOND], [Output(0)], [FIRST]]
    return engine(*((*place, RequestOutput(part)) if place else RequestOutput(part) for part in parts))

async def answers():
    chat, completion, two = OpenAIServingChat(), OpenAIServingCompletion(), SimpleNamespace(n=2)
    whole = [RequestOutput([FIRST, SECOND])]
    yield "chat", await chat.chat_completion_full_generator(two, engine(*whole), "id")
    yield "error", await chat.chat_completion_full_generator(two, engine(RequestOutput([])), "id")
    beams = RequestOutput([Output(0, "stop"), Output(1, "stop")])
    yield "beams", await chat.chat_completion_full_generator(two, engine(beams), "id")
    yield "chat stream", [one async for one in chat.chat_completion_stream_generator(two, deltas(), "id")]
    swapped = [RequestOutput([SECOND, FIRST]), *whole]
    yield "completion", completion.request_output_to_completion_response(swapped, two, "id")
    args = two, ["a", "b"], deltas(1), "id"
    yield "completion stream", [one async for one in completion.completion_stream_generator(*args)]

async def write():
    async for name, found in answers():
        found = [vars(one) for one in found.choices] if hasattr(found, "choices") else found
        print(json.dumps([name, found]), flush=True)

def main():
    print(json.dumps(["started as", sys.argv[1:]]), flush=True)
    asyncio.run(write())
"""
OPTIONS = (
    "[--model MODEL] [--host HOST] [--port PORT] [--data-parallel-size N] [--tensor-parallel-size N] "
    "[--enforce-eager | --no-enforce-eager] [--max-model-len N] [--dtype T] [--gpu-memory-utilization X] "
    "[--enable-prefix-caching | --no-enable-prefix-caching] [--enable-lora | --no-enable-lora] "
    "[--enable-log-requests | --no-enable-log-requests] [--logprobs-mode M] [--structured-outputs-config C] "
    "[--distributed-executor-backend B] [--device-ids D] [--hf-overrides H] [--config C] [--uds U]"
)
OPTIONS_0_32 = f"{OPTIONS} [--weight-transfer-config C] [--worker-extension-cls W]"


def install(folder: Path) -> None:
    """Put the package into a folder, to be named in PYTHONPATH."""
    openai = "entrypoints/openai"
    modules = {
        f"{openai}/api_server.py": MODULE,
        f"{openai}/answering.py": ANSWERING,
        f"{openai}/chat_completion/serving.py": CHAT,
        f"{openai}/completion/serving.py": COMPLETION,
        "outputs.py": OUTPUTS,
    }
    for path, text in modules.items():
        module = folder / "vllm" / path
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(text)
    for package in (folder / "vllm").glob("**/"):
        (package / "__init__.py").touch()


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
    spans = [{"version": "default", "start": 0, "end": 2}]  # which `vf-vllm` adds
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None, "token_ids": None}
    choice["weight_versions"] = spans
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
