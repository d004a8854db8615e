"""One setting at a time: the guessing game of examples/302 trained with other settings, and its final results.

python benchmarks/knobs.py [--seeds 1 2] [--steps 48] [--only "as it is" …]
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

example = importlib.import_module("examples.302_multi_turn_training")

SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "temperature 1.0": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "learning_rate × 4": {"learning_rate": 4e-3},
    "learning_rate ÷ 4": {"learning_rate": 2.5e-4},
    "group_size 4, as many rollouts": {"group_size": 4},
    "batch_size 56, group_size 8": {"batch_size": 56, "group_size": 8},
    "kl_coef 0.05": {"kl_coef": 0.05},
    "no partial reward": {"weights": (1.0, 0.0)},
}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def run(settings: dict[str, Any], seed: int, steps: int) -> str:
    """The share of games won and the metrics on the page about knobs, over the last five steps."""
    weights = settings.get("weights", (1.0, 0.5))
    chosen = {name: value for name, value in settings.items() if name != "weights"}
    with tempfile.TemporaryDirectory() as folder:
        env = example.environment(weights)
        report = example.make_trainer(env, Path(folder), seed=seed, max_steps=steps, **chosen).train()
    last = report.steps[-5:]
    won, sensible = (mean([step["metrics"][name] for step in last]) for name in ("found", "sensible"))
    entropy, flat = (mean([step[name] for step in last]) for name in ("entropy", "zero_variance"))
    return f"{won:.2f} | {sensible:.2f} | {entropy:.2f} | {flat:.0%} | {len(report.notices)}"


def main(seeds: list[int], steps: int, only: list[str] | None) -> None:
    print("| setting | seed | found | sensible | entropy | flat groups | notices |")
    print("|---|---|---|---|---|---|---|")
    for name, settings in SETTINGS.items():
        for seed in seeds if not only or name in only else ():
            print(f"| {name} | {seed} | {run(settings, seed, steps)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--only", nargs="*")
    chosen = parser.parse_args()
    main(chosen.seeds, chosen.steps, chosen.only)
