"""CPU time of the same requests and the same training batch with each backend that can run a model on a CPU.

    python benchmarks/backends.py

Llama's and Qwen3's shapes (norms of queries and keys, wide heads) of the same size. Sampling runs in C, in PyTorch with
fewer operations, and with the modules of transformers. Training is the forward and backward pass of a packed row, with
our kernels and with the modules. One thread; the best of several alternating rounds.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verifiers.engine.backends import CPU, MODULES, TORCH
from verifiers.engine.engine import Engine
from verifiers.engine.sequence import Sampling
from verifiers.trainers.learning.logprobs import TokenScorer
from verifiers.trainers.learning.micro_batches import MicroBatch, fully_trained, micro_batches
from verifiers.trainers.learning.packing import PackedForward

VOCABULARY = 2048
SIZES = {"small": (128, 4, 4, 2), "larger": (256, 6, 8, 4)}  # hidden size, layers, heads, key/value heads
FAMILIES: dict[str, dict[str, int]] = {"Llama": {}, "Qwen3": {"head_dim": 64}}
REQUESTS, PROMPT, NEW = 16, 64, 64
GROUPS, SIZE = 2, 8
ROUNDS = 5


def make(family: str, size: str) -> Any:
    width, layers, heads, kv_heads = SIZES[size]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=1024, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=True, initializer_range=0.05, **FAMILIES[family],
    )  # fmt: skip
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def cpu_ms(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return 1000 * (time.process_time() - began)


def in_turn(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The lowest CPU time of each; the first round is a warm-up."""
    found = [{name: cpu_ms(work) for name, work in ways.items()} for _ in range(ROUNDS + 1)]
    return {name: min(one[name] for one in found[1:]) for name in ways}


def tell(what: str, took: dict[str, float], slowest: str) -> None:
    quickest = min(took, key=lambda name: took[name])
    figures = ", ".join(f"{name} {ms:,.0f}" for name, ms in took.items())
    print(f"{what}, ms of CPU: {figures}; {slowest} ÷ {quickest}: {took[slowest] / took[quickest]:.1f}×", flush=True)


def ids_of(n: int) -> list[int]:
    return [random.randrange(3, VOCABULARY) for _ in range(n)]


def sampling(label: str, model: Any) -> None:
    engine = Engine(model, rows=REQUESTS, length=PROMPT + NEW + 8)
    print(f"{label}: sampled {engine.backend}", flush=True)
    prompts = [ids_of(PROMPT) for _ in range(REQUESTS)]

    def by(backend: str) -> None:
        with engine.lock:
            engine.use_backend(backend)
            engine.reset()
        engine.generate(prompts, Sampling(max_tokens=NEW, seed=1))

    backends = [TORCH, MODULES] if engine.runner.cpu is None else [CPU, TORCH, MODULES]
    took = in_turn({name: lambda name=name: by(name) for name in backends})  # type: ignore[misc]
    tell(f"{label}: {REQUESTS} requests of {PROMPT} + {NEW} tokens", took, MODULES)
    engine.close()


def batch_of(scorer: TokenScorer) -> MicroBatch:
    trained = []
    for _ in range(GROUPS):
        prompt = ids_of(PROMPT)
        trained += [fully_trained(prompt, ids_of(NEW)) for _ in range(SIZE)]
    (batch,) = micro_batches(trained, max_tokens=10**6, longest_packed=scorer.layouts.longest_packed)
    return batch


def learning(label: str, model: Any) -> None:
    scorer = TokenScorer(model)
    batch = batch_of(scorer)
    assert batch.packing is not None
    packing = batch.packing

    def step(fused: bool) -> None:
        model.zero_grad(set_to_none=True)
        scorer.outputs(batch, fused=fused, packed=PackedForward(packing, varlen=False)).square().sum().backward()

    took = in_turn({"kernels": lambda: step(True), "modules": lambda: step(False)})
    tell(
        f"{label}: layers of {GROUPS} × {SIZE} sequences of {PROMPT} + {NEW} tokens, forward and back", took, "modules"
    )


def main() -> None:
    torch.set_num_threads(1)
    random.seed(0)
    for size in SIZES:
        for family in FAMILIES:
            model = make(family, size)
            label = f"{family}, {sum(one.numel() for one in model.parameters()) / 1e6:.1f}M"
            sampling(label, model)
            learning(label, model)


if __name__ == "__main__":
    main()
