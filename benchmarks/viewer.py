"""Cost of `vf view` on a run of 100,000 rollouts: time to the first page, time per further page, and memory."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from verifiers.store import RunDir, to_record
from verifiers.types import State, Usage


def state_of(number: int, repeats: int) -> State:
    """A rollout with a line of about 2 kB."""
    example = number // repeats
    reward = float(number * 7919 % 10 < 6)
    return State(
        input={
            "prompt": [
                {"role": "system", "content": "Think. " * 40},
                {"role": "user", "content": f"What is {example}? " * 30},
            ],
            "answer": str(example),
            "task": f"task-{example % 5}",
            "example_id": example,
        },
        completion=[{"role": "assistant", "content": f"Let me see…\n{number * 31 % 9973}\n" * 45}],
        reward=reward,
        metrics={"correct": reward, "format": (number % 7) / 6, "length": float(number % 100)},
        timing={"generation_ms": 812.5 + number % 301, "scoring_ms": 0.25, "total_ms": 812.75 + number % 301},
        stop_condition="max_turns_reached",
        usage=Usage(prompt_tokens=400, completion_tokens=300 + number % 50),
        error=ConnectionError("the endpoint went away") if number % 100 == 7 else None,
    )


def make_run(folder: Path, n: int, repeats: int) -> RunDir:
    run = RunDir.create(folder, env_id="benchmark", model="none", config={})
    with run.appender() as out:
        for number in range(n):
            out.append(to_record(state_of(number, repeats), rollout=number % repeats))
    run.update_metadata({"num_rollouts": n, "num_failed": n // 100, "avg_reward": 0.6})
    return run


class Viewer:
    """A ``vf view`` process, with the requests that its page makes."""

    def __init__(self, run: Path) -> None:
        command = [sys.executable, "-m", "verifiers", "view", str(run), "--no-open"]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": sys.path[0]}
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.search(r"(http://\S+?)/#/run/(\w+)", line)
        assert found is not None, line
        self.base = f"{found[1]}/api/runs/{found[2]}"

    def ask(self, path: str = "", **query: Any) -> Any:
        with urllib.request.urlopen(f"{self.base}{path}?{urllib.parse.urlencode(query)}", timeout=60) as reply:
            return json.loads(reply.read())

    def memory_mb(self, name: str = "VmHWM") -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"{name}:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def report(viewer: Viewer, what: str, began: float, cpu: float) -> None:
    wall, cpu = time.perf_counter() - began, viewer.cpu_s() - cpu
    print(f"{what:64} {wall:6.2f} s wall {cpu:6.2f} s CPU {viewer.memory_mb():5.0f} MB")


def measure(run: Path) -> None:
    began = time.perf_counter()
    viewer = Viewer(run)
    try:
        report(viewer, "start of the program", began, 0.0)
        begun_cpu, began = viewer.cpu_s(), time.perf_counter()
        viewer.ask()
        page = viewer.ask("/rollouts", n=50)
        report(viewer, f"first page, cold ({page['of']:,} rollouts read so far)", began, begun_cpu)
        while page["share_read"] < 1:
            page = viewer.ask("/rollouts", n=50)
        report(viewer, "until every rollout is read", began, begun_cpu)
        viewer.ask("/figures")
        report(viewer, "and every figure counted", began, begun_cpu)
        questions: dict[str, dict[str, Any]] = {
            "first page, warm: run, table and figures": {},
            "sorted by reward": {"sort": "reward", "desc": 1},
            "sorted by a metric": {"sort": "metric:length"},
            "failed only": {"status": "failed"},
            "page 1,000 of the order by reward": {"sort": "reward", "desc": 1, "start": 49_950},
            "a search that finds few": {"q": "What is 777?"},
            "a search that finds all": {"q": "let me see"},
        }
        for what, query in questions.items():
            cpu, began = viewer.cpu_s(), time.perf_counter()
            if not query:
                viewer.ask()
                viewer.ask("/figures")
            page = viewer.ask("/rollouts", n=50, **query)
            first = time.perf_counter() - began
            while not page["is_done"]:
                page = viewer.ask("/rollouts", n=50, **query)
            report(viewer, f"{what}: {page['total']:,} (first answer {first:.2f} s)", began, cpu)
        print(f"memory: {viewer.memory_mb('VmRSS'):.0f} MB now, {viewer.memory_mb():.0f} MB at most")
    finally:
        viewer.close()


def main(n: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), n, repeats)
        size = run.results_path.stat().st_size
        print(f"{n:,} rollouts of {size // max(n, 1):,} bytes, {repeats} of each example, 1 in 100 failed")
        measure(run.path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=100_000)
    parser.add_argument("-r", "--repeats", type=int, default=4)
    arguments = parser.parse_args()
    main(arguments.n, arguments.repeats)
