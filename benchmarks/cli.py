"""Overhead of the command line: CPU time of `vf --help`, and of `vf eval` against the same evaluation in a script."""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
VF = (sys.executable, "-m", "verifiers")
SCRIPT = """
import verifiers as vf
env = vf.load_environment("arithmetic", num_eval_examples={n})
results = env.evaluate(client=vf.FakeClient({reply!r}), model="fake", rollouts_per_example=1, max_concurrent=32)
print(results)
"""


def cpu_s(command: Sequence[str]) -> float:
    """CPU seconds of a process, including its start."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def in_pairs(one: Sequence[str], other: Sequence[str], pairs: int) -> list[tuple[float, float]]:
    """Run both in pairs with alternating order, so that other load affects both equally."""
    found = []
    for number in range(pairs):
        if number % 2:
            second, first = cpu_s(other), cpu_s(one)
        else:
            first, second = cpu_s(one), cpu_s(other)
        found.append((first, second))
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rollouts", type=int, default=20_000)
    options.add_argument("--pairs", type=int, default=8)
    given = options.parse_args()
    from verifiers.cli.answering import FAKE_REPLY

    n = str(given.rollouts)
    evaluate = [*VF, "eval", "arithmetic", "-m", "fake", "-n", n, "-r", "1", "-a", f'{{"num_eval_examples": {n}}}']
    script = [sys.executable, "-c", SCRIPT.format(n=n, reply=FAKE_REPLY)]
    for command in (script, [*VF, "--help"]):
        cpu_s(command)  # warm-up: bytecode and file cache
    bare, shown = map(median, zip(*in_pairs([sys.executable, "-c", "pass"], [*VF, "--help"], given.pairs), strict=True))
    print(f"vf --help                  {shown * 1000:7.0f} ms CPU (an empty Python: {bare * 1000:.0f} ms)")
    pairs = in_pairs(script, evaluate, given.pairs)
    plain, command_s = map(median, zip(*pairs, strict=True))
    ratios = sorted(command / script for script, command in pairs)
    print(f"{given.rollouts:,} rollouts, a script  {plain:7.2f} s CPU")
    print(
        f"{given.rollouts:,} rollouts, vf eval   {command_s:7.2f} s CPU; by pairs {median(ratios) - 1:+.1%} "
        f"(from {ratios[0] - 1:+.1%} to {ratios[-1] - 1:+.1%}), load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
