"""Measures what torch can do on this machine. `vf doctor` runs it as a separate process, which prints JSON.

This way ``vf doctor`` does not import torch, and survives a crash of it.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

# The sizes of the matrices of SmolLM2-135M, whose products dominate its decoding: 30 layers, and the vocabulary.
WIDTH, KEYS, INNER, LAYERS, VOCABULARY = 576, 192, 1536, 30, 49152
BUILT_LAYERS = 3  # enough not to fit into a cache
ROWS = {"cpu": 32, "cuda": 256}
ROUNDS = 3
MEASURE_S = 0.12  # each of two parts, in each round


def probe() -> dict[str, Any]:
    """The version, device, memory, the engine's default dtype, and the tokens per second that each dtype allows."""
    torch = importlib.import_module("torch")
    models = importlib.import_module("verifiers.engine.files.models")
    compiled = importlib.import_module("verifiers.kernels.cpu.binding")
    has_cuda = torch.cuda.is_available()
    device = "cuda" if has_cuda else "cpu"
    found: dict[str, Any] = {"torch": torch.__version__, "device": device, "threads": torch.get_num_threads()}
    if has_cuda:
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpus": torch.cuda.device_count(), "gpu_bytes": properties.total_memory}
    # Measure alternately, so that load from other programs does not affect only one dtype.
    rounds = [{name: measure(torch, device, name) for name in ("float32", "bfloat16")} for _ in range(ROUNDS)]
    speeds = {name: max(speeds[name] for speeds in rounds) for name in rounds[0]}
    found["dtype"] = str(models.default_dtype(device)).removeprefix("torch.")
    found["rows"] = ROWS[device]
    found["is_compiled"] = compiled.decode_functions() is not None
    found["tokens_per_s"] = {name: round(speed) for name, speed in speeds.items()}
    return found


def measure(torch: Any, device: str, dtype: str) -> float:
    """Tokens per second if decoding SmolLM2-135M consisted only of its matrix products."""
    rows = ROWS[device]
    linear = torch.nn.functional.linear

    def matrix(outputs: int, inputs: int) -> Any:
        return torch.full((outputs, inputs), 0.01, device=device, dtype=getattr(torch, dtype))

    layers = [
        [matrix(WIDTH, WIDTH), matrix(2 * KEYS, WIDTH), matrix(WIDTH, WIDTH), *(matrix(INNER, WIDTH),) * 2]
        for _ in range(BUILT_LAYERS)
    ]
    downs = [matrix(WIDTH, INNER) for _ in range(BUILT_LAYERS)]
    head = matrix(VOCABULARY, WIDTH)
    narrow, wide = matrix(rows, WIDTH), matrix(rows, INNER)

    def stack() -> None:
        for weights, down in zip(layers, downs, strict=True):
            for weight in weights:
                linear(narrow, weight)
            linear(wide, down)

    with torch.inference_mode():
        step_s = timed(torch, device, stack) * LAYERS / BUILT_LAYERS
        step_s += timed(torch, device, lambda: linear(narrow, head))
    return rows / step_s


def timed(torch: Any, device: str, work: Any) -> float:
    """Seconds per call: the minimum over `MEASURE_S`."""

    def call() -> float:
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    call()
    best, until = call(), time.perf_counter() + MEASURE_S
    while time.perf_counter() < until:
        best = min(best, call())
    return best


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()))
