"""Tokens per second of the local engine and of `transformers.generate`, on the same prompts in the same run.

python benchmarks/engine.py               # on a GPU if there is one, else on the CPU
python benchmarks/engine.py --model PATH  # a real model instead of SmolLM2-135M's shape with random weights
python benchmarks/engine.py --only ours   # on a GPU: only the engine, without `generate`
python benchmarks/engine.py --only memory # KV cache memory relative to the tokens in it
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verifiers.engine.block_manager import BLOCK
from verifiers.engine.engine import Engine
from verifiers.engine.sequence import Sampling

SHAPES = {  # hidden, feed-forward, layers, heads, key/value heads, vocabulary
    "smollm2": (576, 1536, 30, 9, 3, 49152),
    "qwen2-1.5b": (1536, 8960, 28, 12, 2, 151936),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 151936),
    "tiny": (128, 256, 4, 4, 2, 2048),
}
WARM_UP, WARM_UP_CUDA = 1, 3  # rounds; on a GPU a step is captured as a graph when it runs a second time


def make(name: str, device: str, family: str = "Llama") -> Any:
    """A model of a shape with random weights."""
    torch.manual_seed(0)
    hidden, feed_forward, layers, heads, kv_heads, vocabulary = SHAPES[name]
    config = getattr(transformers, f"{family}Config")(
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)


def prompts_of(n: int, low: int, high: int, vocabulary: int) -> list[list[int]]:
    return [[random.randrange(3, vocabulary) for _ in range(random.randint(low, high))] for _ in range(n)]


def timed(work: Callable[[], int]) -> float:
    """Tokens per second of a function that returns the number of tokens it generated."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    tokens = work()
    return tokens / (time.perf_counter() - began)


def by_generate(model: Any, prompts: list[list[int]], tokens: int) -> int:
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), 0)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=tokens,
            min_new_tokens=tokens, do_sample=True, pad_token_id=0,
        )  # fmt: skip
    return (out.shape[1] - width) * len(prompts)


def by_generate_mixed(model: Any, prompts: list[list[int]], limits: list[int]) -> int:
    """A batch runs until its longest reply is done; only the requested tokens count."""
    by_generate(model, prompts, max(limits))
    return sum(limits)


def by_engine(engine: Engine, prompts: list[list[int]], tokens: list[int], n: int = 1) -> int:
    asked = [
        engine.submit(prompt, Sampling(max_tokens=limit, seed=i), n=n)
        for i, (prompt, limit) in enumerate(zip(prompts, tokens, strict=True))
    ]
    return sum(len(answer.result().ids) for answers in asked for answer in answers)


Work = Callable[[list[list[int]]], int]


def compare(
    name: str, prompts: Callable[[], list[list[int]]], ours: Work, theirs: Work | None, rounds: int, warm_up: int
) -> None:
    """Medians over several alternating rounds with fresh prompts; the first rounds are a warm-up."""
    rates: list[float] = []
    others: list[float] = []
    for _ in range(rounds + warm_up):
        asked = prompts()
        rates.append(timed(lambda: ours(asked)))  # noqa: B023
        if theirs is not None:
            others.append(timed(lambda: theirs(asked)))  # noqa: B023
    del rates[:warm_up], others[:warm_up]
    line = f"{name:<58} engine {median(rates):>9,.0f} tokens/s"
    if theirs is not None:
        ratio = median(one / other for one, other in zip(rates, others, strict=True))
        line += f"   generate {median(others):>9,.0f}   {ratio:.1f}×"
    print(line, flush=True)


def on_cuda(model: Any, label: str, rows: int, *, is_alone: bool = False) -> None:
    vocabulary = model.config.vocab_size
    engine = Engine(model, rows=rows, length=512, prefill_tokens=32768)
    print(f"{label}: {engine.backend}", flush=True)
    limits = [random.randint(64, 256) for _ in range(rows)]
    compare(
        f"{label}: {rows} requests at once, 32–96 + 64–256 tokens",
        lambda: prompts_of(rows, 32, 96, vocabulary),
        lambda asked: by_engine(engine, asked, limits),
        None if is_alone else lambda asked: by_generate_mixed(model, asked, limits),
        rounds=3,
        warm_up=WARM_UP_CUDA,
    )
    more = [random.randint(64, 256) for _ in range(4 * rows)]
    compare(
        f"{label}: {4 * rows} requests through {rows} rows",
        lambda: prompts_of(4 * rows, 32, 96, vocabulary),
        lambda asked: by_engine(engine, asked, more),
        None,
        rounds=1,
        warm_up=WARM_UP,
    )
    engine.close()
    torch.cuda.empty_cache()


def on_cpu(model: Any, label: str, tokens: int) -> None:
    vocabulary = model.config.vocab_size
    engine = Engine(model, rows=32, length=512)
    limits = [random.randint(tokens // 2, tokens * 3 // 2) for _ in range(32)]
    compare(
        f"{label}: 4 prompts × 8, {tokens} tokens (GRPO-shaped)",
        lambda: prompts_of(4, 60, 100, vocabulary),
        lambda asked: by_engine(engine, asked, [tokens] * 4, n=8),
        lambda asked: by_generate(model, [prompt for prompt in asked for _ in range(8)], tokens),
        rounds=3,
        warm_up=WARM_UP,
    )
    compare(
        f"{label}: 32 chats, {tokens // 2}–{tokens * 3 // 2} tokens",
        lambda: prompts_of(32, 30, 120, vocabulary),
        lambda asked: by_engine(engine, asked, limits),
        lambda asked: by_generate_mixed(model, asked, limits),
        rounds=3,
        warm_up=WARM_UP,
    )
    engine.close()


def long_replies(model: Any, label: str, rows: int, low: int, high: int) -> None:
    """Long replies, as of reasoning models: few rows, long histories."""
    engine = Engine(model, rows=rows, length=high + 128)
    limits = [random.randint(low, high) for _ in range(rows)]
    compare(
        f"{label}: {rows} replies of {low:,}–{high:,} tokens",
        lambda: prompts_of(rows, 32, 96, model.config.vocab_size),
        lambda asked: by_engine(engine, asked, limits),
        None,
        rounds=1,
        warm_up=WARM_UP,
    )
    engine.close()
    torch.cuda.empty_cache()


def first_answer(name: str, label: str, family: str = "Llama") -> None:
    """Seconds from a model in memory to the first token of its first answer, and to the first full batch."""
    model = make(name, "cuda" if torch.cuda.is_available() else "cpu", family)
    began = time.perf_counter()
    engine = Engine(model, rows=256, length=512)
    ready = time.perf_counter() - began
    by_engine(engine, prompts_of(1, 32, 96, model.config.vocab_size), [8])
    first = time.perf_counter() - began
    by_engine(engine, prompts_of(256, 32, 96, model.config.vocab_size), [64] * 256)
    whole = time.perf_counter() - began
    engine.close()
    print(
        f"{label}: engine ready after {ready:.1f} s, first answer {first:.1f} s, first 256 answers {whole:.1f} s",
        flush=True,
    )


def memory_held(model: Any, label: str, rows: int, n: int, low: int, high: int) -> None:
    """Allocated blocks relative to the tokens in them: maximum over all steps, and median."""
    engine = Engine(model, rows=rows, length=high + 200)
    ratios, step = list[tuple[float, float]](), engine._step

    def measured() -> None:
        step()
        lengths = engine.table.length[: len(engine.running)]
        if len(lengths) == rows:
            held = engine.scheduler.blocks.held * BLOCK
            own = {id(one): one.blocks for one in engine.running}
            shared = sum(map(len, own.values())) - len({block for blocks in own.values() for block in blocks})
            there = int(lengths.sum())
            ratios.append((held / (there - shared * BLOCK), held / there))

    engine._step = measured  # type: ignore[method-assign]
    prompts = prompts_of(rows // n, 100, 160, model.config.vocab_size)
    by_engine(engine, prompts, [random.randint(low, high) for _ in prompts], n=n)
    engine.close()
    distinct, each = zip(*ratios, strict=True)
    print(
        f"{label}: {rows // n} prompts × {n}, {low}–{high} tokens: memory held ÷ tokens there "
        f"{max(distinct):.3f} at most, {median(distinct):.3f} typically; ÷ tokens of all sequences {median(each):.3f}",
        flush=True,
    )


def second_turn(model: Any, label: str, length: int) -> None:
    """Time to the first token of a second turn, with and without the prefix cache of the history."""
    engine = Engine(model, rows=4, length=length + 200)
    history = prompts_of(1, length - 64, length - 64, model.config.vocab_size)[0]
    first = engine.submit(history, Sampling(max_tokens=64, seed=1))[0].result()
    turn = [*first.prompt_ids, *first.ids, *prompts_of(1, 20, 20, model.config.vocab_size)[0]]
    times: dict[str, float] = {}
    for name in ("with", "without") * 6:  # the first of each is a warm-up
        if name == "without":
            engine.forget()
        began = time.perf_counter()
        answer = engine.submit(turn, Sampling(max_tokens=1))[0].result()
        times[name] = min(times.get(name, 1e9), time.perf_counter() - began)
        assert (answer.reused > 0) == (name == "with"), answer.reused
    engine.close()
    ratio = times["without"] / times["with"]
    took = f"{times['with'] * 1e3:.1f} ms with the history's keys, {times['without'] * 1e3:.1f} without"
    print(f"{label}: second turn over {length:,} tokens, first token after {took}: {ratio:.1f}×", flush=True)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model")
    only = ["smollm2", "tiny", "ours", "memory"]
    options.add_argument("--only", choices=only, help="one of the two models; the engine alone; its memory")
    args = options.parse_args()
    random.seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.only == "memory":
        for n in (1, 8):
            memory_held(make("tiny", device), "0.9M parameters", 32, n, 64, 256)
        return
    if args.model:
        from verifiers.engine.files.models import load

        model = load(args.model)[0]
    else:
        model = make("smollm2", device)
    if device == "cuda":
        if not args.model:
            first_answer("smollm2", "SmolLM2-135M")
        is_alone = args.only == "ours"
        larger = make("qwen2-1.5b", device, "Qwen2")
        for rows in (1024, 256):
            on_cuda(model, "SmolLM2-135M", rows, is_alone=is_alone)
        second_turn(model, "SmolLM2-135M", 2000)
        on_cuda(larger, "Qwen2-shaped 1.5B", 256, is_alone=is_alone)
        long_replies(larger, "Qwen2-shaped 1.5B", 128, 1024, 4096)
        second_turn(larger, "Qwen2-shaped 1.5B", 2000)
        return
    if args.only != "tiny":
        on_cpu(model, "SmolLM2-135M", 64)
        second_turn(model, "SmolLM2-135M", 2000)
    if args.only != "smollm2":  # last: a tiny model's engine leaves PyTorch with one thread
        on_cpu(make("tiny", device), "0.9M parameters", 64)


if __name__ == "__main__":
    main()
