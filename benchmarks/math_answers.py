"""Cost of comparing two mathematical answers: plain numbers, algebra, and answers meant to block the grader.

python benchmarks/math_answers.py [-n 20000]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import verifiers as vf

PLAIN = [("18", "18"), ("1,234", "1234"), ("5", "\\$5.00"), ("7", "8"), ("3/4", "0.75"), ("5", "5 dollars")]
ALGEBRA = [
    ("x^2 + 2x + 1", "(x+1)^2", 1.0),
    ("\\frac{\\sqrt{2}}{2}", "\\frac{1}{\\sqrt 2}", 1.0),
    ("\\{1, 2\\}", "\\{2, 1\\}", 1.0),
    ("\\sin x \\cos x", "\\frac{\\sin 2x}{2}", 1.0),
    ("[0,1)", "0 \\le x < 1", 1.0),
    ("x + 1", "x + 2", 0.0),
]
HOSTILE = [
    "9^{9^{9^{9}}}",
    "1000000000!",
    "(x+y+z)^{100000}",
    "\\sum_{k=1}^{10^{12}} k^{k}",
    "\\int_0^{10} \\sin(\\cos(\\sin(x^x))) e^{x^2} dx",
    "\\sqrt{" * 400 + "4" + "}" * 400,
    "1+" * 4000 + "1",
    "x = 9^{9^{9^{9}}}",
]


def cpu_of_workers() -> float:
    """CPU seconds of all descendants of this process."""
    fields = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parts = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        fields[int(path.parent.name)] = (int(parts[1]), sum(map(int, parts[11:15])))  # parent; own and ended children's
    known = {os.getpid()}
    while more := {pid for pid, (parent, _) in fields.items() if parent in known} - known:
        known |= more
    return sum(fields[pid][1] for pid in known - {os.getpid()}) / os.sysconf("SC_CLK_TCK")


async def ask(rubric: vf.MathRubric, right: str, response: str) -> tuple[float, float]:
    began = time.perf_counter()
    verdict = await rubric.correct_answer(rubric.parser, f"\\boxed{{{response}}}", right)
    return time.perf_counter() - began, verdict


async def main(n: int) -> None:
    rubric = vf.MathRubric()
    began = time.process_time()
    for i in range(n):
        await ask(rubric, *PLAIN[i % len(PLAIN)])
    print(f"plain numbers      {(time.process_time() - began) / n * 1e6:7.1f} µs of CPU a pair")
    began = time.perf_counter()
    await ask(rubric, "x", "y")
    print(f"the first worker   {time.perf_counter() - began:7.1f} s until it has compared something")
    for right, response, _ in ALGEBRA:
        await ask(rubric, right, response)
    took = []
    for _ in range(10):
        rubric = vf.MathRubric()  # a new one has an empty cache
        for right, response, expected in ALGEBRA:
            seconds, verdict = await ask(rubric, right, response)
            assert verdict == expected, (right, response)
            took.append(seconds)
    print(f"algebra            {median(took) * 1e3:7.1f} ms a pair, the slowest {max(took) * 1e3:.1f} ms")
    took, used = [], []
    for text in HOSTILE:
        before = cpu_of_workers()
        seconds, verdict = await ask(rubric, "41", text)
        assert verdict == 0.0, text
        took.append(seconds)
        used.append(cpu_of_workers() - before)
    print(f"hostile answers    {median(took) * 1e3:7.1f} ms a pair, the slowest {max(took) * 1e3:.1f} ms; none fails")
    print(f"                   {median(used) * 1e3:7.1f} ms of CPU a pair, the most {max(used) * 1e3:.1f} ms")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("-n", type=int, default=20_000)
    asyncio.run(main(options.parse_args().n))
