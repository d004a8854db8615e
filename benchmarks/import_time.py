"""CPU milliseconds of ``import verifiers`` and of the first names used, and a check that nothing heavy is imported.

    python benchmarks/import_time.py [--rounds 10]

Each figure is from fresh interpreters, minus an interpreter that imports nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "transformers", "datasets", "openai", "numpy", "pandas", "pyarrow", "sympy")
STEPS = {
    "import verifiers": "import verifiers",
    "… and vf.SingleTurnEnv": "import verifiers as vf; vf.SingleTurnEnv",
    "… and vf.HTTPClient": "import verifiers as vf; vf.SingleTurnEnv; vf.HTTPClient",
    "… and an evaluation": (
        "import verifiers as vf; "
        "vf.SingleTurnEnv(dataset=[{'question': '2+2?', 'answer': '4'}])"
        ".evaluate(client=vf.FakeClient('4'), model='m', use_tqdm=False)"
    ),
}


def cpu_ms(code: str) -> float:
    """User and system time of one fresh interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd="/")
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{code} failed")
    return (used.ru_utime + used.ru_stime) * 1000


def heavy_after(code: str) -> list[str]:
    """The heavy packages that are loaded after running some code."""
    ask = f"{code}\nimport sys; print(*(set({HEAVY!r}) & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.check_output([sys.executable, "-c", ask], env=environment, cwd="/", text=True).split()


def main(rounds: int) -> None:
    cpu_ms(STEPS["… and an evaluation"])  # the first run compiles bytecode
    empty = [cpu_ms("pass") for _ in range(rounds)]
    print(f"{'a bare interpreter':24} best {min(empty):6.1f} ms of CPU, median {statistics.median(empty):6.1f}")
    for name, code in STEPS.items():
        taken = [cpu_ms(code) for _ in range(rounds)]
        best, median = min(taken) - min(empty), statistics.median(taken) - statistics.median(empty)
        print(f"{name:24} best {best:6.1f} ms of CPU, median {median:6.1f}; heavy: {heavy_after(code) or 'none'}")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=10)
    main(options.parse_args().rounds)
