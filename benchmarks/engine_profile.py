"""A profile of the local engine on a GPU: start-up, phases of the host, steps of the device, kernels.

python benchmarks/engine_profile.py                              # 1,024 requests at once, SmolLM2's shape
python benchmarks/engine_profile.py --rows 1024 --requests 4096  # admission during decoding
python benchmarks/engine_profile.py --try ahead=1,2,4            # tokens per second with other settings, one by one
python benchmarks/engine_profile.py --shape qwen2-1.5b --family Qwen2 --rows 256 --requests 256
python benchmarks/engine_profile.py --steps 8x128 256x128 64x2500   # ms of a decode step: rows × history

Without a GPU only the host's part is shown, with a simulated GPU that takes no time. Failures are printed, and the
other parts continue.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import engine_host
from benchmarks.engine import SHAPES, by_engine, make, prompts_of
from verifiers.engine import cuda_prefill, cuda_runner, steps
from verifiers.engine.engine import Engine

HAS_CARD = torch.cuda.is_available()
PREFILL_SIZES = (32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


def kernels(name: str) -> Any:
    """Import a module of Triton kernels, which needs Triton."""
    from importlib import import_module

    return import_module(f"verifiers.kernels.cuda.{name}")


RULES: dict[str, Callable[[int], None]] = {
    "ahead": lambda n: setattr(steps, "AHEAD", n),
    "admit_share": lambda n: setattr(steps, "ADMIT_SHARE", n),
    "burst": lambda n: setattr(cuda_runner, "BURST", n),  # 8 at most
    "few_rows": lambda n: setattr(cuda_runner, "FEW_ROWS", n),
    "prefill_graphs": lambda n: setattr(cuda_prefill, "TOKENS", tuple(size for size in PREFILL_SIZES if size <= n)),
    "bucket_step": lambda n: setattr(cuda_runner, "BUCKETS", (1, 2, 4, 8, 16, 32, *range(64, 2049, n))),
    "attend_positions": lambda n: setattr(kernels("decode"), "BLOCK_S", n),
    "attend_bytes_in_flight": lambda n: setattr(kernels("decode"), "IN_FLIGHT_BYTES", n),
    "programs_per_multiprocessor": lambda n: setattr(kernels("splits"), "PER_MULTIPROCESSOR", n),
    "fused_projections": lambda n: setattr(kernels("projections"), "MARGIN", 0.97 * n),  # 0: never, 1: if faster
}


class Marks:
    """Times between two points of the GPU's stream, read at the end."""

    def __init__(self) -> None:
        self.pairs: dict[str, list[tuple[Any, Any]]] = {}

    @staticmethod
    def now() -> Any:
        if not HAS_CARD:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def around(self, name: Callable[..., str], work: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any, **more: Any) -> Any:
            began = self.now()
            given = work(*args, **more)
            self.pairs.setdefault(name(*args), []).append((began, self.now()))
            return given

        return marked

    def read(self) -> dict[str, tuple[int, float]]:
        """The count and the average milliseconds of each kind."""
        if HAS_CARD:
            torch.cuda.synchronize()
        found = {}
        for name, pairs in self.pairs.items():
            spent = [a.elapsed_time(b) if HAS_CARD else (b - a) * 1e3 for a, b in pairs]
            found[name] = len(spent), sum(spent) / len(spent)
        self.pairs = {}
        return found


class Phases:
    """Time of the engine's thread in each function, excluding watched functions that it calls."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}
        self._inner: list[float] = []

    def watch(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self.timed(name.strip("_"), getattr(owner, name)))

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            began = time.perf_counter()
            self._inner.append(0.0)
            try:
                return work(*args, **more)
            finally:
                spent = time.perf_counter() - began
                entry = self.spent.setdefault(name, [0, 0.0])
                entry[0] += 1
                entry[1] += spent - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent

        return timed

    def show(self, engine_steps: int) -> None:
        print(f"  {'phase of the host':<22} {'calls':>7} {'µs a call':>10} {'ms a step':>10}")
        for name, (calls, spent) in sorted(self.spent.items(), key=lambda item: -item[1][1]):
            print(f"  {name:<22} {calls:>7.0f} {spent / calls * 1e6:>10.1f} {spent / engine_steps * 1e3:>10.4f}")
        self.spent = {}


@contextmanager
def going_on(what: str) -> Iterator[None]:
    """If one part fails, continue with the others, because GPU time is expensive."""
    try:
        yield
    except Exception:
        print(f"FAILED: {what}\n{traceback.format_exc(limit=-4)}", flush=True)


class Compiled:
    """The kernels that Triton compiled or read from disk, and the time of each."""

    def __init__(self) -> None:
        self.took: list[tuple[str, float]] = []
        if not HAS_CARD:
            return
        with going_on("watching Triton"):
            from triton.runtime import jit

            compile_ = jit.JITFunction._do_compile

            def timed(function: Any, *args: Any, **more: Any) -> Any:
                began = time.perf_counter()
                try:
                    return compile_(function, *args, **more)
                finally:
                    self.took.append((function.fn.__name__, time.perf_counter() - began))

            jit.JITFunction._do_compile = timed  # type: ignore[method-assign]

    def show(self) -> None:
        names = sorted({name for name, _ in self.took})
        each = ", ".join(
            f"{name} × {len(times)} {sum(times):.2f} s"
            for name in names
            if (times := [t for n, t in self.took if n == name])
        )
        print(f"  kernels compiled or read from disk: {len(self.took)} in {sum(t for _, t in self.took):.2f} s: {each}")
        self.took = []


def start(args: argparse.Namespace, model: Any) -> Engine:
    if HAS_CARD:
        return Engine(model, rows=args.rows, length=512)
    return engine_host.make(args.rows, model, runs_itself=True)


def one_round(engine: Engine, args: argparse.Namespace) -> tuple[float, int]:
    """Tokens per second, and the number of steps."""
    random.seed(args.seed)
    args.seed += 1
    n = args.requests // args.group
    prompts = prompts_of(n, 32, 96, engine.vocabulary)
    limits = [random.randint(args.tokens // 4, args.tokens) for _ in range(n)]
    began, before = time.perf_counter(), engine.steps
    tokens = by_engine(engine, prompts, limits, n=args.group)
    return tokens / (time.perf_counter() - began), engine.steps - before


def show_start(args: argparse.Namespace, model: Any, compiled: Compiled) -> Engine:
    began = time.perf_counter()
    engine = start(args, model)
    print(f"start: engine ready after {time.perf_counter() - began:.2f} s ({engine.backend})", flush=True)
    compiled.show()
    by_engine(engine, prompts_of(1, 64, 64, engine.vocabulary), [8])
    print(f"start: first answer after {time.perf_counter() - began:.2f} s", flush=True)
    one_round(engine, args)
    print(f"start: first {args.requests} answers after {time.perf_counter() - began:.2f} s", flush=True)
    compiled.show()
    cuda: Any = engine.scheduler.cuda
    print(f"  graphs: decode {sorted(cuda._graphs)}, prefill {sorted(cuda._prefill._graphs)}", flush=True)
    return engine


def show_rounds(engine: Engine, args: argparse.Namespace) -> None:
    for _ in range(2):
        rate, n = one_round(engine, args)
        print(f"plain: {rate:,.0f} tokens/s, {n} steps", flush=True)
    phases, marks, cuda = Phases(), Marks(), engine.scheduler.cuda
    assert cuda is not None
    plain_event = cuda.card.event
    cuda.launch = marks.around(
        lambda n, steps: f"{steps} steps of {next((b for b in cuda_runner.BUCKETS if b >= n), n)} rows", cuda.launch
    )  # type: ignore[method-assign]
    cuda.prefill = marks.around(lambda ids, *_: f"prompts, {-(-len(ids) // 1024)}k tokens", cuda.prefill)

    def event() -> Any:
        made = plain_event()
        if HAS_CARD:
            return _Waited(phases.timed("waiting for the card", made.synchronize))
        return made

    cuda.card.event = event  # type: ignore[method-assign]
    phases.watch(engine.runner, "detect_changes")
    phases.watch(engine.scheduler, "admit", "finish_chunks", "reserve", "finish", "deliver", "keep_prompt")
    phases.watch(engine._step_runner, "_run_chunks", "_record", "run")
    phases.watch(cuda, "launch_first", "add_blocks", "launch", "collect", "move")
    rate, n = one_round(engine, args)
    print(f"watched: {rate:,.0f} tokens/s, {n} steps", flush=True)
    phases.show(n)
    print(f"  {'on the card':<26} {'times':>7} {'ms each':>9} {'ms in all':>10}")
    for name, (times, spent) in sorted(marks.read().items()):
        print(f"  {name:<26} {times:>7} {spent:>9.3f} {times * spent:>10.1f}")


class _Waited:
    """An event that times its waits."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.synchronize = synchronize


def show_kernels(engine: Engine, args: argparse.Namespace) -> None:
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CUDA if HAS_CARD else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiled:
        rate, n = one_round(engine, args)
    found: dict[str, tuple[int, float]] = {}
    for one in profiled.events() or ():
        if HAS_CARD and one.device_type.name == "CPU":  # the launching calls
            continue
        times, spent = found.get(one.name, (0, 0.0))
        found[one.name] = times + 1, spent + one.time_range.elapsed_us()
    print(f"kernels of {n} steps, {rate:,.0f} tokens/s while profiled: ms in all, times, µs each, name", flush=True)
    for name, (times, spent) in sorted(found.items(), key=lambda item: -item[1][1])[:28]:
        print(f"  {spent / 1e3:>9.2f} {times:>8} {spent / times:>9.1f}  {name[:110]}", flush=True)


def show_tries(args: argparse.Namespace, model: Any, tries: Sequence[str]) -> None:
    for rule in tries:
        name, values = rule.split("=")
        for value in map(int, values.split(",")):
            with going_on(f"{name}={value}"):
                RULES[name](value)
                engine = start(args, model)
                one_round(engine, args)
                rates = [one_round(engine, args)[0] for _ in range(3)]
                print(f"{name}={value}: {max(rates):,.0f} tokens/s at best, {min(rates):,.0f} at worst", flush=True)
                engine.close()
                if HAS_CARD:
                    torch.cuda.empty_cache()


def show_steps(args: argparse.Namespace, model: Any, cases: Sequence[tuple[int, int]]) -> None:
    """Milliseconds of a decode step, by rows and history; lengths differ by a quarter, and blocks are scattered."""
    rows, longest = max(rows for rows, _ in cases), max(history for _, history in cases)
    engine = Engine(model, rows=rows, length=2 * longest)
    by_engine(engine, prompts_of(1, 32, 32, engine.vocabulary), [4])
    cuda: Any = engine.scheduler.cuda
    generator = torch.Generator("cuda").manual_seed(args.seed)
    with engine.lock, torch.inference_mode(), engine.runner.evaluating():
        cuda.is_live.zero_()  # so that lengths stay constant
        for rows, history in cases:
            cuda.blocks.random_(1, cuda.cache.store.shape[2], generator=generator)
            cuda.length.random_(history * 3 // 4, history * 5 // 4 + 1, generator=generator)
            graph, _ = cuda._capture(rows, False)
            took = []
            for _ in range(5):
                began = Marks.now()
                for _ in range(20):
                    graph.replay()
                ended = Marks.now()
                ended.synchronize()
                took.append(began.elapsed_time(ended) / 20)
            print(f"a step of {rows} rows with histories of {history}: {min(took):.3f} ms", flush=True)
    engine.close()


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--shape", choices=sorted(SHAPES), default="smollm2")
    options.add_argument("--family", default="Llama")
    options.add_argument("--rows", type=int, default=1024)
    options.add_argument("--requests", type=int, default=1024)
    options.add_argument("--group", type=int, default=1, help="completions of each prompt")
    options.add_argument("--tokens", type=int, default=256, help="of a reply at most; a quarter at least")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--no-kernels", action="store_true", help="without the table of kernels")
    options.add_argument("--try", dest="tries", nargs="+", default=[], help=f"rule=value,value; {', '.join(RULES)}")
    options.add_argument("--steps", nargs="+", metavar="ROWSxHISTORY", help="instead, the time of a decode step")
    args = options.parse_args()
    if unknown := {rule.split("=")[0] for rule in args.tries} - RULES.keys():
        options.error(f"there is no rule {', '.join(unknown)}; there are {', '.join(RULES)}")
    model = make(args.shape, "cuda", args.family) if HAS_CARD else engine_host.model()
    if args.steps:
        if not HAS_CARD:
            options.error("--steps needs a card")
        show_steps(args, model, [(int(rows), int(history)) for rows, history in (one.split("x") for one in args.steps)])
        return
    compiled = Compiled()
    if args.tries:
        show_tries(args, model, args.tries)
        return
    engine = show_start(args, model, compiled)
    if not args.no_kernels:
        with going_on("the table of kernels"):
            show_kernels(engine, args)
    with going_on("rounds"):
        show_rounds(engine, args)
    engine.close()


if __name__ == "__main__":
    main()
