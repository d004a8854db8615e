"""Overhead of `Rubric.score_rollouts` over calling the reward function in a bare loop, with 100,000 rollouts.

python benchmarks/scoring.py [-n 100000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import verifiers as vf

PARSER = vf.XMLParser(["reasoning", "answer"])


def correct(completion: Any, answer: str) -> float:
    """A plain reward: find the answer in the reply and compare it."""
    return 1.0 if PARSER.parse_answer(completion) == answer else 0.0


def rollouts(n: int) -> list[vf.State]:
    reply = (
        "<reasoning>\n{0} comes to mind; after some thought it is still {0}.\n</reasoning>\n<answer>\n{0}\n</answer>"
    )
    return [
        vf.State(
            input={
                "prompt": [{"role": "user", "content": f"What comes after {i - 1}?"}],
                "answer": str(i if i % 3 else -1),
                "task": "counting",
                "example_id": i,
            },
            completion=[{"role": "assistant", "content": reply.format(i)}],
            trajectory=[],
        )
        for i in range(n)
    ]


def bare(states: list[vf.State]) -> list[float]:
    return [correct(completion=state["completion"], answer=state["input"]["answer"]) for state in states]


def cpu_s(call: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    began = time.process_time()
    result = call()
    return time.process_time() - began, result


def main(n: int, rounds: int) -> None:
    rubric = vf.Rubric(funcs=[correct])
    states = rollouts(n)
    prompts, completions, answers = (
        [state["prompt"] for state in states],
        [state["completion"] for state in states],
        [state["answer"] for state in states],
    )
    expected = bare(states)
    ways: dict[str, Callable[[], Any]] = {
        "bare loop": lambda: bare(states),
        "score_rollouts(states)": lambda: rubric.score_rollouts(states)["reward"],
        "score_rollouts(columns)": lambda: rubric.score_rollouts(prompts, completions, answers)["reward"],
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, call in ways.items():
            took, rewards = cpu_s(call)
            assert rewards == expected
            best[name] = min(best[name], took)
    print(f"{n:,} rollouts, one reward function that parses XML and compares; best of {rounds}")
    for name, took in best.items():
        print(f"{name:24} {took:6.2f} s of CPU  {took / n * 1e6:6.2f} µs each  {took / best['bare loop']:5.2f}×")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("-n", type=int, default=100_000)
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    main(args.n, args.rounds)
