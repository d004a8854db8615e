"""The host's CPU time per step, token and request of GPU steps, with a simulated GPU that takes no time.

A step of 1,024 rows at 300,000 tokens per second lasts 3.4 ms, one of 256 rows at 150,000 lasts 1.7 ms; the host's work
must take well below that. Scheduler, blocks, prefix cache, tables, answers and PyTorch calls are the engine's own;
graphs and kernels are not run. (Launching work on a GPU takes about as long as an equally small call on the CPU.)

python benchmarks/engine_host.py            # the table
python benchmarks/engine_host.py --profile  # and a profile of 4,096 requests through 1,024 rows
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verifiers.engine.block_manager import BlockManager
from verifiers.engine.cuda_runner import WORDS, CudaDecoder
from verifiers.engine.engine import LEAST_SHARED_CUDA, PREFILL_CUDA, Engine
from verifiers.engine.sequence import Sampling

VOCABULARY, TOKEN = 512, 7
CASES = [(256, 256, 1), (1024, 1024, 1), (256, 1024, 1), (1024, 4096, 1), (1024, 4096, 8)]  # rows, requests, a group


class IdleCard:
    """A GPU that takes no time and always samples the same token."""

    def capture(self, work: Callable[[], Any], undo: Any = None) -> tuple[Any, Any]:
        return self, work()

    def replay(self) -> None:
        return

    def drop_graphs(self) -> None:
        return

    def pinned_buffer(self, n: int) -> Tensor:
        return torch.empty(n, dtype=torch.int32)

    def event(self) -> Any:
        return self

    def synchronize(self) -> None:
        return

    def tokens_at_once(self, share: int) -> int:
        return 16

    def sample(self, logits_NV: Tensor, columns: Any) -> tuple[Tensor, Tensor, Tensor]:
        n = len(logits_NV)
        return torch.full((n,), TOKEN), torch.zeros(n), torch.zeros(n)


class IdleDecoder(CudaDecoder):
    """A decoder with empty graphs and immediate prompt logits."""

    def _step(self, size: int, truncates: bool) -> Tensor:
        words = torch.zeros(WORDS * size, dtype=torch.int32)
        words[: 2 * size : 2] = TOKEN
        return words


def model() -> Any:
    """A small model with as many parameter tensors as SmolLM2, because every step checks them."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=30, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=VOCABULARY, max_position_embeddings=1024, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def make(rows: int, model: Any, *, runs_itself: bool = False) -> Engine:
    """An engine with the code path of a GPU; without its own thread, the caller runs the steps."""
    engine = Engine(model, rows=rows, length=512, prefill_tokens=PREFILL_CUDA)
    cache: Any = engine.scheduler.cache
    engine.scheduler.blocks = BlockManager(cache.store.shape[2], least_shared=LEAST_SHARED_CUDA)
    card: Any = IdleCard()
    engine.scheduler.cuda = decoder = IdleDecoder(engine.table, engine.runner, cache, card)
    decoder._prefill._forward = lambda tokens, blocks, kept, tables: torch.zeros(len(kept), VOCABULARY)  # type: ignore[method-assign]
    engine._thread = None if runs_itself else threading.current_thread()
    return engine


def drive(
    engine: Engine, requests: int, group: int, draw: random.Random, watch: cProfile.Profile | None
) -> list[float]:
    """CPU time in ms per step, in µs per token and per submitted request; the host's maximum of tokens per second."""
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(draw.randint(32, 96))] for _ in range(requests // group)]
    ways = [Sampling(max_tokens=draw.randint(64, 256), seed=i) for i in range(requests)]
    began, steps, tokens = time.thread_time(), engine.steps, engine.tokens
    futures = [engine.submit(prompts[i // group], way)[0] for i, way in enumerate(ways)]
    submitted = time.thread_time()
    if watch is not None:
        watch.enable()
    while engine.waiting or engine.running or engine.scheduler.prefilling:
        with engine.lock, torch.inference_mode(), engine.runner.evaluating():
            engine._step()
        engine.scheduler.deliver()
    if watch is not None:
        watch.disable()
    ended = time.thread_time()
    steps, tokens = engine.steps - steps, engine.tokens - tokens
    assert sum(len(future.result().ids) for future in futures) == tokens
    stepping = ended - submitted
    return [
        stepping / steps * 1e3, stepping / tokens * 1e6, (submitted - began) / requests * 1e6, tokens / (ended - began)
    ]  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--profile", action="store_true")
    profiles = options.parse_args().profile
    torch.set_num_threads(1)
    small = model()
    for rows, requests, group in CASES:
        engine, draw = make(rows, small), random.Random(0)
        watch = cProfile.Profile(time.thread_time) if profiles and (requests, group) == (4096, 1) else None
        rounds = [
            drive(engine, requests, group, draw, watch if i == 2 else None) for i in range(3)
        ]  # the first is a warm-up
        step, token, submit, rate = min(rounds[1:])
        print(
            f"{requests:>5,} requests{f' in groups of {group}' if group > 1 else '':<16} through {rows:>5,} rows: "
            f"{step:.2f} ms a step, {token:.2f} µs a token, {submit:.0f} µs to submit a request; "
            f"{rate:,.0f} tokens a second at most",
            flush=True,
        )
        if watch is not None:
            pstats.Stats(watch).sort_stats("tottime").print_stats(30)
        engine._thread = None
        engine.close()


if __name__ == "__main__":
    main()
