"""The engine's own share of a decode step, besides forward and sampling, with 2M parameters and 32 requests.

python benchmarks/engine_overhead.py            # prints the share; exits with 1 above 25 %
python benchmarks/engine_overhead.py --profile  # and a profile
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verifiers.engine import logits
from verifiers.engine.engine import Engine
from verifiers.engine.sequence import Sampling

MOST = 0.25
CASES: dict[str, dict[str, Any]] = {
    "untruncated": {},
    "top-p 0.95": {"top_p": 0.95},
    "each token told": {"on_token": lambda token, logprob: None},
}
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


class Clock:
    """Accumulates the time spent in a function until it is read."""

    def __init__(self) -> None:
        self.spent = 0.0

    def timing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent += time.perf_counter() - began

        return timed

    def read(self) -> float:
        spent, self.spent = self.spent, 0.0
        return spent


def measure(requests: int, tokens: int, case: dict[str, Any], profile: bool) -> tuple[float, float, float, float]:
    """Median milliseconds of a step, of its forward and of its sampling; and the remaining share."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()  # type: ignore[arg-type]
    engine = Engine(model, rows=requests, length=512)
    forward, sampling = Clock(), Clock()
    steps: list[tuple[float, float, float]] = []
    # Not `runner.forward`, because replacing attention and other layers is the engine's work.
    runner: Any = engine.runner
    runner._run_module, runner.decoder.forward = map(forward.timing, (runner._run_module, runner.decoder.forward))
    runner.cpu.run, runner.cpu.decode = map(forward.timing, (runner.cpu.run, runner.cpu.decode))
    logits.sample = sampling.timing(logits.sample)
    engine_step = engine._step
    watch = cProfile.Profile()
    began, drawn = [0.0], [0]

    def one_step() -> None:
        """Measure from the start of one iteration to the start of the next, including the time between."""
        began.append(time.perf_counter())
        drawn.append(engine.steps)
        n = drawn[-1] - drawn[-2]  # an iteration may have several steps
        is_full = (
            len(engine.running) == requests and not engine.waiting
        )  # no request arrived or finished in the previous iteration
        parts = forward.read(), sampling.read()
        if is_full and engine.steps > 1:
            steps.append(((began[-1] - began[-2]) / n, *(part / n for part in parts)))
        if profile:
            watch.enable()
        engine_step()
        watch.disable()

    engine._step = one_step  # type: ignore[method-assign]
    draw = random.Random(0)
    futures = [
        engine.submit(
            [draw.randrange(3, 2048) for _ in range(draw.randint(30, 120))],
            Sampling(max_tokens=tokens, seed=i, top_p=case.get("top_p", 1.0)),
            on_token=case.get("on_token"),
        )[0]
        for i in range(requests)
    ]
    for future in futures:
        future.result()
    engine.close()
    if profile:
        pstats.Stats(watch).sort_stats("tottime").print_stats(25)
    whole, model_s, sample_s = (statistics.median(column) for column in zip(*steps, strict=True))
    own = statistics.median((step - a - b) / step for step, a, b in steps)
    return whole * 1e3, model_s * 1e3, sample_s * 1e3, own


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--requests", type=int, default=32)
    options.add_argument("--tokens", type=int, default=300)
    options.add_argument("--profile", action="store_true")
    args = options.parse_args()
    own_sample, worst = logits.sample, 0.0
    for kind, case in CASES.items():
        logits.sample = own_sample
        step, forward, sampling, own = measure(args.requests, args.tokens, case, args.profile)
        worst = max(worst, own)
        print(
            f"2M parameters, {args.requests} requests, {kind:<15}: step {step:.2f} ms = forward {forward:.2f} + "
            f"sampling {sampling:.2f} + engine {own * step:.2f} ({own:.1%}; at most {MOST:.0%})",
            flush=True,
        )
    sys.exit(worst > MOST)


if __name__ == "__main__":
    main()
