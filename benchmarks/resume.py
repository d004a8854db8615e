"""Cost of the store: a record and an append, a run of 100,000 rollouts until it is ready to resume, a whole resume.

python benchmarks/resume.py [-n ROLLOUTS] [--whole ROLLOUTS]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from verifiers.store import RunDir, encode, read_records, to_record
from verifiers.store.checksum import is_intact, seal
from verifiers.types import State, Usage


def state_of(example_id: int, *, fails: bool) -> State:
    """A single-turn rollout with a line of about 2 kB."""
    return State(
        input={
            "prompt": [{"role": "system", "content": "Think. " * 40}, {"role": "user", "content": "What is it? " * 40}],
            "answer": "42",
            "task": "benchmark",
            "example_id": example_id,
        },
        completion=[{"role": "assistant", "content": "Let me see…\n" * 60}],
        reward=1.0,
        metrics={"correct": 1.0, "format": 0.5},
        timing={"generation_ms": 812.5, "scoring_ms": 0.25, "total_ms": 812.75},
        stop_condition="max_turns_reached",
        usage=Usage(prompt_tokens=400, completion_tokens=300),
        error=ConnectionError("the endpoint went away") if fails else None,
    )


def measure(what: str, call: Callable[[], Any], rows: int = 0) -> Any:
    cpu, wall = time.process_time(), time.perf_counter()
    result = call()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(f"{what:44} {cpu:7.2f} s CPU {wall:7.2f} s wall" + (f"  {rows / cpu:9,.0f} rows/s" if rows else ""))
    return result


def measure_append(run: RunDir, n: int = 2_000, rounds: int = 10) -> None:
    """CPU microseconds of each step from a finished rollout to the file; the best of some rounds."""
    state = state_of(0, fails=False)
    record = to_record(state, rollout=0)
    line = encode(record)
    sealed = seal(line)
    with run.appender() as out:
        steps: dict[str, Callable[[], Any]] = {
            "to_record": lambda: to_record(state, rollout=0),
            "encode": lambda: encode(record),
            "checksum": lambda: seal(line),
            "checksum, compared": lambda: is_intact(sealed),
            "append (encoding and checksum included)": lambda: out.append(record),
        }
        for name, step in steps.items():
            took = min(_cpu_of(step, n) for _ in range(rounds))
            print(f"{name:44} {took * 1e6:7.1f} µs CPU  {1 / took:9,.0f} rows/s")


def _cpu_of(step: Callable[[], Any], n: int) -> float:
    cpu = time.process_time()
    for _ in range(n):
        step()
    return (time.process_time() - cpu) / n


def append_all(run: RunDir, n: int) -> None:
    with run.appender() as out:
        for number in range(n):
            out.append(to_record(state_of(number, fails=number % 100 == 7), rollout=0))


def main(n: int) -> None:
    line = len(encode(to_record(state_of(0, fails=False), rollout=0)))
    print(f"{n:,} rollouts of {line:,} bytes, 1 in 100 failed")
    with tempfile.TemporaryDirectory() as folder:
        measure_append(RunDir.create(Path(folder), env_id="benchmark", model="append", config={}))
        run = RunDir.create(Path(folder), env_id="benchmark", model="none", config={})
        measure("make, record and append all (durably)", lambda: append_all(run, n))
        measure("index", run.load_index, n)
        measure("compact: 1% moved, the file rewritten", run.compact, n)
        finished = measure("compact: nothing to move (a plain resume)", run.compact, n).finished
        assert len(finished) == n - len(range(7, n, 100))
        measure("read all records", lambda: sum(1 for _ in run.records()), n)
        measure("read two columns of all", lambda: sum(1 for _ in read_records(run.path, ["reward", "task"])), n)
        measure("first page of 50 (index included)", lambda: run.page(0, 50))
        measure("last page of 50", lambda: run.page(len(finished) - 50, 50))
        measure("read all, sorted", lambda: sum(1 for _ in run.sorted_records()))


def peak_mib() -> int:
    """The peak memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM"))


def evaluate(path: Path, n: int, words: int, *, resume: bool) -> None:
    """One evaluation of ``n`` rows with replies of ``words`` words; a resumed one prints its time and memory."""
    import verifiers as vf

    class Canned:
        async def complete(self, request: Any) -> Any:
            return vf.Completion(message={"role": "assistant", "content": "word " * words})

    rows = [{"question": f"What is {number}+{number}?", "answer": str(2 * number)} for number in range(n)]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([lambda completion, answer: 1.0, lambda answer: 0.5]))
    len(env.get_eval_dataset())
    before = peak_mib()
    cpu, wall = time.process_time(), time.perf_counter()
    results = env.evaluate(
        client=Canned(), model="canned", results_path=path, resume=resume, max_concurrent=256, use_tqdm=False
    )
    assert len(results.rewards) == n, results
    took = f"{time.process_time() - cpu:7.2f} s CPU {time.perf_counter() - wall:7.2f} s wall"
    if resume:
        size = (path / "results.jsonl").stat().st_size / n / 1000
        print(f"resume {n:,} rows of {size:.1f} kB, 1% missing   {took}, {peak_mib() - before} MiB on {before} MiB")


def measure_whole(n: int) -> None:
    """Resume in a separate process, for short and for long replies: from the call to the results."""
    for words in (100, 2000):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "run")
            _spawn("make", path, n, words)
            os.truncate(path / "results.jsonl", (path / "results.jsonl").stat().st_size * 99 // 100)
            _spawn("resume", path, n, words)


def _spawn(kind: str, path: Path, n: int, words: int) -> None:
    subprocess.run([sys.executable, __file__, "--worker", kind, str(path), str(n), str(words)], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        kind, path, n, words = sys.argv[2:]
        evaluate(Path(path), int(n), int(words), resume=kind == "resume")
        raise SystemExit
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=100_000, help="rollouts of the store's own figures")
    parser.add_argument("--whole", type=int, default=200_000, help="rollouts of the run that is resumed whole")
    asked = parser.parse_args()
    main(asked.n)
    measure_whole(asked.whole)
