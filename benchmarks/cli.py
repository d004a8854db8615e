"""What the command line costs: CPU of `vf --help`, and of `vf eval` over the same evaluation in a script."""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import verifiers as vf
env = vf.load_environment("arithmetic", num_eval_examples={n})
results = env.evaluate(client=vf.FakeClient({reply!r}), model="fake", rollouts_per_example=1, max_concurrent=32)
print(results)
"""


def cpu_s(command: list[str]) -> float:
    """Seconds of CPU that a process takes, its start included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rollouts", type=int, default=20_000)
    options.add_argument("--times", type=int, default=5)
    given = options.parse_args()
    from verifiers.cli.answering import FAKE_REPLY

    vf = [sys.executable, "-m", "verifiers"]
    n = str(given.rollouts)
    evaluate = [*vf, "eval", "arithmetic", "-m", "fake", "-n", n, "-r", "1", "-a", f'{{"num_eval_examples": {n}}}']
    script = [sys.executable, "-c", SCRIPT.format(n=n, reply=FAKE_REPLY)]
    bare = median(cpu_s([sys.executable, "-c", "pass"]) for _ in range(given.times))
    shown = median(cpu_s([*vf, "--help"]) for _ in range(given.times))
    print(f"vf --help                  {shown * 1000:7.0f} ms CPU (an empty Python: {bare * 1000:.0f} ms)")
    pairs = [(cpu_s(script), cpu_s(evaluate)) for _ in range(given.times)]
    plain, command = (median(column) for column in zip(*pairs, strict=True))
    print(f"{given.rollouts:,} rollouts, a script  {plain:7.2f} s CPU")
    print(f"{given.rollouts:,} rollouts, vf eval   {command:7.2f} s CPU ({(command / plain - 1):+.1%})")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
