"""Tokens per second of SmolLM2-135M on a CPU in float32, which runs in C, and in bfloat16, which runs in PyTorch.

    python benchmarks/cpu_dtypes.py     # vf models pull smollm2 first

The rule that it justifies: weights on a CPU are float32 by default (`engine/files/models.py`). Rounds alternate, and
the best of each counts, so that load from other programs matters less.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verifiers as vf
from verifiers.engine import Sampling

CASES = [(1, 32, 64), (8, 64, 64), (32, 64, 64), (4, 1024, 1)]  # requests, tokens of a prompt, new tokens
ROUNDS = 3


def seconds(model: vf.LocalModel, requests: int, prompt: int, new: int, seed: int) -> float:
    draw = random.Random(seed)
    prompts = [[draw.randrange(1000, 40000) for _ in range(prompt)] for _ in range(requests)]
    began = time.perf_counter()
    model.engine.generate(prompts, Sampling(max_tokens=new, ignore_eos=True))
    return time.perf_counter() - began


def main() -> None:
    torch.manual_seed(0)
    models = {name: vf.LocalModel("smollm2", device="cpu", dtype=name, rows=32) for name in ("float32", "bfloat16")}
    for name, model in models.items():
        print(f"{name}: {model.backend}")
        seconds(model, 8, 64, 16, seed=-1)
    for requests, prompt, new in CASES:
        rounds = [
            {name: seconds(model, requests, prompt, new, seed) for name, model in models.items()}
            for seed in range(ROUNDS)
        ]
        tokens = requests * (new if new > 1 else prompt)
        best = {name: tokens / min(took[name] for took in rounds) for name in models}
        what = f"{requests} × {new} new tokens" if new > 1 else f"{requests} prompts of {prompt} tokens"
        ratio = best["float32"] / best["bfloat16"]
        print(f"{what}: {best['float32']:.0f} and {best['bfloat16']:.0f} tokens a second ({ratio:.2f}×)")


if __name__ == "__main__":
    main()
