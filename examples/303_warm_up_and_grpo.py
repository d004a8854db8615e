"""303 · Warm-up and GRPO in practice: a new tiny transformer learns to reverse text.

Supervised fine-tuning warms it up until about one reply in five is right. From then on the model is not shown right
replies; it only learns which of its own replies were right. It is evaluated on held-out texts.

python examples/303_warm_up_and_grpo.py [--seed 0]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verifiers as vf

ROOT = Path(__file__).resolve().parents[1]
LETTERS, LENGTH = "abcdefghijkl", 4
ROWS, PASSES = 6_000, 2  # training texts; passes over each batch, with one update each
ENOUGH = 2.2  # the loss per reply, in nats, that ends the warm-up: about one reply in five is then right


@dataclass(frozen=True, kw_only=True)
class Learned:
    """The results: the reports, the evaluations on held-out texts before and after, and the time."""

    warm_up: Any
    report: Any
    before: vf.Results
    after: vf.Results
    cpu_s: float
    wall_s: float

    @property
    def start(self) -> float:
        """The mean reward of the first steps."""
        return mean(self.report.rewards[:5])

    @property
    def end(self) -> float:
        return mean(self.report.rewards[-5:])


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def environment(seed: int = 0) -> vf.Environment:
    """Strings of a few letters to reverse; a reply counts only if every letter is right."""
    env = vf.load_environment(
        "reverse-text",
        environments_dir=ROOT / "environments",
        length=LENGTH,
        alphabet=LETTERS,
        use_tags=False,
        system_prompt="Reverse.",
        num_examples=ROWS,
        num_eval_examples=300,
        seed=seed,
    )
    env.rubric.weights[:] = [0.0, 1.0]  # similarity, exact
    return env


def stop_early(trainer: vf.SFTTrainer, figures: dict[str, Any]) -> None:
    """Called after each step of the warm-up."""
    tokens_of_a_reply = figures["tokens"] / figures["samples"]
    trainer.should_stop = figures["loss"] * tokens_of_a_reply < ENOUGH


def learn(folder: Path, *, steps: int = 24, seed: int = 0, show_progress: bool = False) -> Learned:
    """Create a model, warm it up and train it; writes two run directories into the folder."""
    began, cpu = time.perf_counter(), time.process_time()
    env = environment(seed)
    model, tokenizer = vf.tiny_model(texts=env.dataset[:1000], hidden_size=64, layers=2, seed=seed)
    common = {"adam_beta2": 0.99, "seed": seed, "show_progress": show_progress}
    warm_up = vf.SFTTrainer(
        model=model,
        tokenizer=tokenizer,
        env=env,
        config=vf.SFTConfig(
            batch_size=64, max_steps=300, learning_rate=3e-3, output_dir=folder / f"warm-up-{seed}", **common
        ),
        callbacks=[stop_early],
    )
    warmed = warm_up.train()
    trainer = vf.GRPOTrainer(
        model=model,
        tokenizer=tokenizer,
        env=env,
        config=vf.GRPOConfig(
            batch_size=512,
            group_size=8,
            num_iterations=PASSES,
            max_steps=steps,
            learning_rate=1.5e-3,
            warmup_steps=10,
            max_new_tokens=LENGTH + 1,
            output_dir=folder / f"rewarded-{seed}",
            **common,
        ),
    )
    before = trainer.evaluate()
    report = trainer.train()
    after = trainer.evaluate()
    return Learned(
        warm_up=warmed,
        report=report,
        before=before,
        after=after,
        cpu_s=time.process_time() - cpu,
        wall_s=time.perf_counter() - began,
    )


def show(done: Learned) -> None:
    print(f"\nThe share of right replies, step by step:\n\n{done.report.picture()}\n")
    before, after = done.before.interval(), done.after.interval()
    print(f"Right on texts it has never seen: {before.mean:.1%} before, {after.mean:.1%} after.")
    print(f"It took {done.cpu_s:.0f} s of CPU, {done.wall_s:.0f} s in all. A plot: {done.report.path / 'plot.svg'}")


def new_folder() -> Path:
    return Path("outputs/train") / time.strftime("tiny-%Y%m%d-%H%M%S")


def main(folder: Path | None = None, *, steps: int = 24, seed: int = 0, show_progress: bool = False) -> Learned:
    done = learn(folder or new_folder(), steps=steps, seed=seed, show_progress=show_progress)
    show(done)
    return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    main(chosen.folder, seed=chosen.seed, show_progress=True)
