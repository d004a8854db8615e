"""When a second thread helps on a CPU: decoding models of several sizes in C, and the training kernels of a layer.

    python benchmarks/cpu_threads.py

The rules that it justifies: one thread per two million parameters for sampling (`cpu/threads.py`), and at least 32,768
elements per thread for training (`cpu/learning.py`). Each time is the best of several, so that load from other programs
matters less.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
import transformers

from verifiers.engine.block_manager import blocks_for
from verifiers.engine.kv_cache import KVCache, Shape
from verifiers.engine.model_runner import ModelRunner
from verifiers.kernels import reference
from verifiers.kernels.cpu import learning, threads
from verifiers.kernels.cpu.binding import decode_functions
from verifiers.kernels.cpu.model import Paged

SIZES = {"0.8M": (128, 4), "3.5M": (256, 5), "7M": (384, 4), "25M": (576, 6)}  # hidden size, layers
SEQUENCES, LENGTH = 16, 128
ROWS = (16, 256, 4096)
WIDTH = 576
ROUNDS = 40


def best_ms(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    work()
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return 1000 * min(found)


def decode_ms(width: int, layers: int, parts: int) -> tuple[int, float]:
    """The number of parameters, and the milliseconds of one decode step for all sequences with ``parts`` threads."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    runner = ModelRunner(model)
    if runner.cpu is None:
        raise SystemExit(f"this needs C: {runner.not_in_c}")
    threads.PARAMETERS_PER_THREAD = threads.parameters_of(model) // parts
    torch.set_num_threads(parts)
    runner.cpu.lay_out()
    each = blocks_for(LENGTH)
    cache = KVCache(Shape.of(config), SEQUENCES * each, LENGTH, dtype=torch.float32, device=torch.device("cpu"))
    paged = Paged(cache.store, np.arange(SEQUENCES * each, dtype=np.int32).reshape(SEQUENCES, each), LENGTH)
    ids, which = torch.arange(SEQUENCES), np.arange(SEQUENCES)
    position = np.full(SEQUENCES, LENGTH // 2)
    with torch.inference_mode():
        took = best_ms(lambda: runner.cpu.run(ids, which, position, which, paged))  # type: ignore[union-attr]
    return threads.parameters_of(model), took


def learning_ms(rows: int, parts: int) -> tuple[float, float]:
    """Milliseconds of norm and gate, forward and backward, in C and in PyTorch with ``parts`` threads."""
    torch.set_num_threads(parts)
    x, weight, grad = torch.randn(rows, WIDTH), torch.randn(WIDTH), torch.randn(rows, WIDTH)

    def both(kernels: object) -> None:
        _, _, scale = kernels.norm(x, None, weight, 1e-5)  # type: ignore[attr-defined]
        kernels.norm_back(x, weight, scale, grad, grad, learns=True)  # type: ignore[attr-defined]
        kernels.gated(x, grad)  # type: ignore[attr-defined]
        kernels.gated_back(x, grad, x)  # type: ignore[attr-defined]

    return best_ms(lambda: both(learning)), best_ms(lambda: both(reference))


def main() -> None:
    if decode_functions() is None:
        raise SystemExit("this needs a C compiler")
    most = torch.get_num_threads()
    per_thread = threads.PARAMETERS_PER_THREAD
    counts = [n for n in (1, 2, 4, 8, 16, 32) if n <= most]
    print(f"{most} threads; one for every {per_thread:,} parameters, {learning.GRAIN:,} numbers a thread at least")
    print("a decode step of 16 sequences, ms:", *(f"{n:>7} thr" for n in counts))
    for width, layers in SIZES.values():
        found = [decode_ms(width, layers, n) for n in counts]
        print(f"{found[0][0]:>24,} parameters:", *(f"{took:>11.2f}" for _, took in found))
    print("norm and gate, forward and backward, ms: C / PyTorch")
    for rows in ROWS:
        pairs = [learning_ms(rows, n) for n in counts]
        print(f"{rows:>18} rows of {WIDTH}:", *(f"{ours:>8.3f} / {theirs:.3f}" for ours, theirs in pairs))


if __name__ == "__main__":
    main()
