"""Compiles every Triton kernel for a card that is not here, and prints their names; run with the compute capability.

A stand-in for the driver names the card. Each function is called as on a card, in half precision and with programmatic
dependent launch, and its kernel is compiled to machine code but not launched.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from verifiers.kernels.cuda import decode, extend, learning, linear, lora, sampling
from verifiers.kernels.modules import Lora
from verifiers.kernels.norms import HeadNorms

HALF = torch.bfloat16


class Driver:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only() -> set[str]:
    """From here on kernels are compiled and not launched; the names of those that were."""
    names, run = set[str](), JITFunction.run

    def compiled(self: Any, *args: Any, warmup: bool, **more: Any) -> Any:
        names.add(self.fn.__name__)
        return run(self, *args, warmup=True, **more)

    JITFunction.run = compiled
    return names


def half(*shape: int) -> Any:
    return torch.zeros(shape, dtype=HALF)


def sample_and_extend() -> None:
    q, k = half(3, 6, 1, 64), half(3, 2, 1, 64)
    cache, tables = half(20, 2, 16, 64), torch.zeros((3, 6), dtype=torch.int32)
    norms = HeadNorms(half(64), half(64), 1e-6, 1e-6)
    length = torch.tensor([5, 70, 90])
    plain: Any = {"scale": 0.1, "window": None, "softcap": None}
    for splits in (1, 4):
        decode.attend(q, k, k, cache, cache, tables, length, splits, rotary=(half(3, 1, 64),) * 2, norms=norms, **plain)
    decode.attend(q, k, k, cache, cache, tables, length, scale=0.1, window=40, softcap=2.0)
    decode.attend(q, k, k, cache, cache, tables, length, rotary=(half(99, 64),) * 2, **plain)
    decode.rotate_(q, k, half(1, 1, 64), half(1, 1, 64), norms)
    decode.embed_and_norm(torch.zeros(4, dtype=torch.int64), half(9, 64), half(64), 1e-6)
    decode.rms_norm(torch.nn.RMSNorm(64, dtype=HALF), 1e-6, half(4, 64))
    decode.gated(half(4, 64), half(4, 64))
    index = torch.zeros(3, dtype=torch.int64)
    extend.store(k.transpose(0, 2), k.transpose(0, 2), cache, cache, tables, index, index)
    for splits in (1, 4):
        blocks = torch.zeros((4, 1), dtype=torch.int32)
        extend.extend(q.transpose(0, 2), cache, cache, tables, blocks, splits=splits, **plain)
    sampling.sample(half(4, 5000), torch.ones(4), torch.arange(4), torch.arange(4))


def project() -> None:
    for rows in (1, 256):
        x, weights = half(rows, 128), [half(n, 128) for n in (128, 64, 64)]
        linear.project(x, weights, [None] * 3)
        linear.project(x, weights, [half(len(one)) for one in weights])
        for n in (64, 576, 1536, 8192):  # the number of warps follows from the width
            linear.add_projected_and_norm(half(rows, n), x, half(n, 128), half(n), 1e-6)
        linear.project_gated(x, weights[1], weights[2])
        lora.add_adapted_([half(rows, 128)], x, [Lora(None, half(8, 128), half(128, 8), 1.0)])


def learn() -> None:
    logits, target, numbers = half(4, 5000), torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    learning.logprobs(logits, target, 0.9, numbers, numbers)
    learning.logprobs_back_(logits, target, 0.9, numbers, numbers)
    x, weight = half(4, 64), half(64)
    for more in (None, x):
        learning.norm(x, more, weight, 1e-6)
        learning.norm_back(x, weight, numbers, more, x, learns=more is not None)
    q, k, angle = half(1, 5, 6, 64), half(1, 5, 2, 64), half(1, 5, 64)
    for back in (False, True):
        learning.rotate(q, k, angle, angle, back=back)
    learning.gated_back(x, x, x)


def main() -> None:
    capability = int(sys.argv[1])
    driver.set_active(Driver(capability))
    names = compile_only()
    launch = {"OVERLAPS": True, "launch_pdl": True} if capability >= 90 else {"OVERLAPS": False}
    for module in (decode, linear, lora, sampling):
        module.overlap = lambda device: launch  # type: ignore[assignment]
    sample_and_extend()
    project()
    learn()
    print(*sorted(names))


if __name__ == "__main__":
    main()
