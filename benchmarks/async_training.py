"""Steps per hour of a training with slow tools, synchronous and with rollouts sampled ahead.

Every turn waits for a tool, with a long-tailed (log-normal) latency like that of searches, sandboxes and judges. In
synchronous training each step waits for its slowest rollout. In asynchronous training rollouts continue across updates,
groups are trained on as they finish, and the importance ratio corrects for stale tokens.

    python -m benchmarks.async_training [steps] [seeds]
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import verifiers as vf

STEPS, SEEDS = 40, 3
MEDIAN_S, SIGMA, LONGEST_S = 0.25, 1.2, 8.0
AHEAD, MAX_STALENESS = 3, 6
FIGURES = ("staleness", "across_updates", "clip_fraction")


class SlowTools(vf.MultiTurnEnv):
    """Two turns with a slow tool between them; the reward is the share of one letter."""

    def __init__(self, *, seed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._latency = random.Random(seed)
        self.is_slow = True

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        if self.is_slow:
            await asyncio.sleep(min(MEDIAN_S * self._latency.lognormvariate(0.0, SIGMA), LONGEST_S))
        return [{"role": "user", "content": "again"}]


def share_of_e(completion: Any) -> float:
    said = "".join(one["content"] for one in completion if one["role"] == "assistant")
    return min(said.count("e") / max(len(said), 1), 1.0)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A training: its duration, its model's final rewards, and the metrics of its steps."""

    took_s: float
    rewards: dict[Any, list[float]]  # the final model's rewards by question
    steps: list[dict[str, Any]]

    @property
    def reward(self) -> float:
        return mean(mean(of_question) for of_question in self.rewards.values())

    def steps_to(self, reward: float) -> int:
        """Steps until a batch first had this reward; the number of all steps if none had."""
        return next((i for i, one in enumerate(self.steps) if one["reward"] >= reward), len(self.steps))

    def mean(self, figure: str) -> float:
        return mean(one.get(figure, 0) for one in self.steps[1:])


def train(folder: Path, steps: int, seed: int, **settings: Any) -> Trained:
    model, tokenizer = vf.tiny_model(seed=seed)
    rows = [{"question": f"say {i}"} for i in range(64)]
    env = SlowTools(seed=seed, dataset=rows, rubric=vf.Rubric([share_of_e]), max_turns=2)
    config = vf.GRPOConfig(
        batch_size=32,
        group_size=4,
        max_new_tokens=8,
        learning_rate=2e-3,
        max_steps=steps,
        output_dir=folder,
        show_progress=False,
        save_strategy="no",
        seed=seed,
        eval_rollouts_per_example=4,
        **settings,
    )
    trainer = vf.GRPOTrainer(model=model, tokenizer=tokenizer, env=env, config=config)
    began = time.perf_counter()
    report = trainer.train()
    took_s = time.perf_counter() - began
    env.is_slow = False
    results = trainer.evaluate()
    rewards = vf.stats.by_example(results["rewards"], [(seed, state["example_id"]) for state in results["states"]])
    return Trained(took_s=took_s, rewards=rewards, steps=report.steps)


def show(name: str, runs: list[Trained], steps: int) -> None:
    an_hour = steps * len(runs) / sum(run.took_s for run in runs) * 3600
    scores = [(one, question) for run in runs for question, of_it in run.rewards.items() for one in of_it]
    reward = vf.stats.mean_interval(*zip(*scores, strict=True))
    late = mean(run.steps_to(0.9) for run in runs)
    print(f"{name}: {an_hour:.0f} steps an hour; a reward of 0.9 after {late:.1f} steps; at the end {reward}")
    stale, across, clipped = (mean(run.mean(one) for run in runs) for one in FIGURES)
    most = max(one.get("staleness_max", 0) for run in runs for one in run.steps)
    print(f"    staleness {stale:.2f} updates on average, {most} at most; ", end="")
    print(f"{across:.0%} of rollouts crossed an update; {clipped:.1%} of tokens clipped")


def main() -> None:
    steps, seeds = (int(given) for given in [*sys.argv[1:], *map(str, (STEPS, SEEDS)[len(sys.argv) - 1 :])])
    ahead = {"num_batches_ahead": AHEAD, "max_staleness": MAX_STALENESS}
    ways = {"in turn": {}, "ahead": ahead, "ahead, left to the clip": {**ahead, "importance_sampling_mode": "off"}}
    runs: dict[str, list[Trained]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder) / "warm", 1, 0)  # compiles what is compiled only once
        for seed in range(1, seeds + 1):
            for name, settings in ways.items():
                runs[name].append(train(Path(folder) / f"{name}-{seed}", steps, seed, **settings))
                print(f"seed {seed}, {name}: {runs[name][-1].took_s:.0f} s, {runs[name][-1].reward:.3f}", flush=True)
    for name, made in runs.items():
        show(name, made, steps)
    in_turn, early, _ = runs.values()
    print(f"ahead ÷ in turn: {sum(a.took_s for a in in_turn) / sum(b.took_s for b in early):.2f}× the steps an hour")
    print("reward at the end, A in turn, B ahead, question by question of each seed:")
    print(vf.stats.compare(*({k: v for run in made for k, v in run.rewards.items()} for made in (in_turn, early))))


if __name__ == "__main__":
    main()
