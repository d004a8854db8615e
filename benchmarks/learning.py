"""A new tiny transformer, warmed up, learns to reverse text by reward: before and after, by seed.

python benchmarks/learning.py [--seeds 0 1 2] [--steps 110]
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

example = importlib.import_module("examples.303_warm_up_and_grpo")
example.ROWS, example.PASSES, example.ENOUGH = 20_000, 1, 2.5  # longer than the example, to see the final reward


def main(seeds: list[int], steps: int) -> None:
    print("seed  warm-up  reward first → last  held-out before → after (95% intervals)          CPU     wall")
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            done = example.learn(Path(folder), steps=steps, seed=seed)
        before, after = (
            f"{found.mean:.3f} ({found.low:.3f}–{found.high:.3f})"
            for found in (done.before.interval(), done.after.interval())
        )
        print(
            f"{seed:>4}  {len(done.warm_up.steps):>7}  {done.start:.3f} → {done.end:.3f}       "
            f"{before} → {after}  {done.cpu_s:>5.0f} s  {done.wall_s:>5.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=110)
    chosen = parser.parse_args()
    main(chosen.seeds, chosen.steps)
