"""This machine and its torch → what a model in this process could do. Run as a process of its own, it prints JSON.

Nothing imports torch here until the function is called, and a torch that crashes takes no other program with it.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

# The matrices of SmolLM2-135M, which is what its decoding spends its time on: 30 layers, and the vocabulary.
WIDTH, KEYS, INNER, LAYERS, VOCABULARY = 576, 192, 1536, 30, 49152
BUILT_LAYERS = 3  # enough that they do not all fit into a cache
ROWS = {"cpu": 32, "cuda": 256}
ROUNDS = 3
MEASURE_S = 0.12  # each of two parts, in each round


def probe() -> dict[str, Any]:
    """Version, device, memory, the engine's choice of number type, and for each the tokens a second it allows."""
    torch = importlib.import_module("torch")
    models = importlib.import_module("verifiers.engine.files.models")
    compiled = importlib.import_module("verifiers.kernels.cpu.binding")
    has_cuda = torch.cuda.is_available()
    device = "cuda" if has_cuda else "cpu"
    found: dict[str, Any] = {"torch": torch.__version__, "device": device, "threads": torch.get_num_threads()}
    if has_cuda:
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpus": torch.cuda.device_count(), "gpu_bytes": properties.total_memory}
    # In turns, so that another program's busy moment does not fall on one of them alone.
    rounds = [{name: measure(torch, device, name) for name in ("float32", "bfloat16")} for _ in range(ROUNDS)]
    speeds = {name: max(speeds[name] for speeds in rounds) for name in rounds[0]}
    found["dtype"] = str(models.default_dtype(device)).removeprefix("torch.")
    found["rows"] = ROWS[device]
    found["is_compiled"] = compiled.decode_functions() is not None
    found["tokens_per_s"] = {name: round(speed) for name, speed in speeds.items()}
    return found


def measure(torch: Any, device: str, dtype: str) -> float:
    """Tokens a second if only the matrix products of SmolLM2-135M cost anything."""
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
    """Seconds a call takes, the best of as many as fit into the time."""

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
