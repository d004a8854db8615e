"""Steps an hour of a training whose tools are slow, one after the other and with rollouts sampled ahead.

Every turn waits for a tool, for times with a long tail (log-normal: most take a moment, a few take very long), as
searches, sandboxes and judges do. One after the other, each step waits for the slowest of its rollouts; asynchronously
rollouts go on across updates, groups are learned from as they finish, and the ratio corrects what is stale.

    python -m benchmarks.async_training [steps]
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import verifiers as vf

STEPS = 40
MEDIAN_S, SIGMA, LONGEST_S = 0.25, 1.2, 8.0
AHEAD, MAX_STALENESS = 3, 6


class SlowTools(vf.MultiTurnEnv):
    """Two turns, and a tool between them that takes its time. Rewarded is the share of one letter."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._latency = random.Random(0)
        self.is_slow = True

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        if self.is_slow:
            await asyncio.sleep(min(MEDIAN_S * self._latency.lognormvariate(0.0, SIGMA), LONGEST_S))
        return [{"role": "user", "content": "again"}]


def share_of_e(completion: Any) -> float:
    said = "".join(one["content"] for one in completion if one["role"] == "assistant")
    return min(said.count("e") / max(len(said), 1), 1.0)


def train(folder: Path, steps: int, **settings: Any) -> tuple[float, float, Any]:
    """Seconds, the reward of the model as it is at the end, and the report."""
    model, tokenizer = vf.tiny_model()
    rows = [{"question": f"say {i}"} for i in range(64)]
    env = SlowTools(dataset=rows, rubric=vf.Rubric([share_of_e]), max_turns=2)
    config = vf.GRPOConfig(
        batch_size=32,
        group_size=4,
        max_new_tokens=8,
        learning_rate=2e-3,
        max_steps=steps,
        output_dir=folder,
        show_progress=False,
        save_strategy="no",
        seed=1,
        eval_rollouts_per_example=4,
        **settings,
    )
    trainer = vf.GRPOTrainer(model=model, tokenizer=tokenizer, env=env, config=config)
    began = time.perf_counter()
    report = trainer.train()
    took_s = time.perf_counter() - began
    env.is_slow = False
    reward = trainer.evaluate().interval().mean
    return took_s, reward, report


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder) / "warm", 1)  # compiles what is compiled once
        in_turn_s, in_turn, _ = train(Path(folder) / "in-turn", steps)
        ahead = {"num_batches_ahead": AHEAD, "max_staleness": MAX_STALENESS}
        ahead_s, stale, report = train(Path(folder) / "ahead", steps, **ahead)
    later = report.steps[1:]
    clipped = sum(one["clip_fraction"] for one in later) / len(later)
    print(f"one after the other: {steps / in_turn_s * 3600:7.0f} steps an hour, reward at the end {in_turn:.3f}")
    print(f"ahead:               {steps / ahead_s * 3600:7.0f} steps an hour, reward at the end {stale:.3f}")
    print(f"ahead ÷ one after the other: {in_turn_s / ahead_s:.2f}× the steps an hour")
    mean, most = sum(one["staleness"] for one in later) / len(later), max(one["staleness_max"] for one in later)
    across = sum(one["across_updates"] for one in later) / len(later)
    print(f"staleness {mean:.2f} updates on average, {most} at most of {MAX_STALENESS} allowed; ", end="")
    print(f"{across:.0%} of rollouts crossed an update; {clipped:.1%} of tokens clipped")


if __name__ == "__main__":
    main()
