"""float32 matrix products by PyTorch (MKL) and by oneDNN on this CPU, and in a training step; ratios of CPU time.

    python benchmarks/cpu_matmul.py

The rule that it justifies: on AMD processors, products with weights of 32,768 elements or more use oneDNN
(`kernels/cpu/matmul.py`). One thread; both alternate, and the best of several rounds counts.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import training

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verifiers.kernels import autograd
from verifiers.kernels.cpu import matmul

SHAPES = {"128 → 256": (256, 128), "576 → 1,536": (1536, 576), "1,536 → 576": (576, 1536), "576 → 49,152": (49152, 576)}
ROWS = (1, 16, 256, 2048)
REPEATS = 12
STEPS = [
    {**training.CASES["cpu"][0], "steps": 12},
    {"shape": "smollm2", "rollouts": 16, "micro": 16, "group": 4, "words": 32, "new": 16, "steps": 4},
]


def use(is_onednn: bool) -> None:
    for module in (matmul, autograd):
        module.uses_onednn = lambda: is_onednn  # type: ignore[attr-defined]


def best_s(work: Callable[[], object]) -> float:
    found = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def ratios(rows: int, outputs: int, inputs: int) -> list[float]:
    """PyTorch's time over oneDNN's, for the product and for the gradients of its input and its weight."""
    x, weight, grad = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(rows, outputs)
    ways: list[Callable[[], object]] = [
        lambda: matmul.linear(x, weight),
        lambda: matmul.matmul(grad, weight),
        lambda: matmul.weight_gradient(grad, x),
    ]
    found = []
    for work in ways:
        took = {}
        for is_onednn in (False, True):
            use(is_onednn)
            work()
            took[is_onednn] = best_s(work)
        found.append(took[False] / max(took[True], 1e-9))
    return found


def step_s(case: dict[str, Any], is_onednn: bool) -> float:
    """CPU seconds of `train_step`, the median after the first two."""
    use(is_onednn)
    learned: list[float] = []
    with contextlib.redirect_stdout(io.StringIO()):
        training.ours({**case, "reward": "coin", "rate": 1e-6, "seed": 0}, "cpu", training.clocked(learned))
    return statistics.median(learned[2:])


def main() -> None:
    torch.set_num_threads(1)
    print(f"products here are {'oneDNN' if matmul.uses_onednn() else 'MKL'}'s")
    print("MKL ÷ oneDNN: of the product, of its input's gradient, of its weight's")
    with torch.no_grad():
        for label, (outputs, inputs) in SHAPES.items():
            shown = [(rows, ratios(rows, outputs, inputs)) for rows in ROWS if rows * outputs <= 1 << 25]
            print(
                f"{label}:",
                "; ".join(f"{rows} rows {', '.join(f'{one:.2f}' for one in found)}" for rows, found in shown),
            )
    for case in STEPS:
        pairs = [(step_s(case, False), step_s(case, True)) for _ in range(3)]
        told = ", ".join(f"{1000 * mkl:.0f} and {1000 * onednn:.0f} ms ({mkl / onednn:.2f}×)" for mkl, onednn in pairs)
        print(f"a training step of {case['shape']}, {case['rollouts']} rollouts: {told}", flush=True)


if __name__ == "__main__":
    main()
