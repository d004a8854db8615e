"""301 · A first training: GRPO on a new tiny transformer, with a reward that gives partial credit.

The model has random weights. The task is to answer consonants with three vowels. Each vowel earns a third, so even the
first replies differ in reward, and GRPO only learns from differences within a group.

python examples/301_train.py
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import verifiers as vf

VOWELS, CONSONANTS = "aeiou", "bcdfghjklm"


def vowels(completion: vf.Messages) -> float:
    """A third for each vowel in a reply of up to three letters; 0 for longer replies."""
    reply = completion[-1]["content"]
    return sum(letter in VOWELS for letter in reply) / 3 if len(reply) <= 3 else 0.0


def environment() -> vf.Environment:
    words = ["".join(random.Random(n).choices(CONSONANTS, k=4)) for n in range(600)]
    rows = [{"question": word} for word in words]
    return vf.SingleTurnEnv(dataset=rows[100:], eval_dataset=rows[:100], rubric=vf.Rubric([vowels]))


def main(folder: Path | None = None, *, steps: int = 40) -> Any:
    folder = folder or Path(tempfile.mkdtemp())
    model, tokenizer = vf.tiny_model(VOWELS + CONSONANTS, hidden_size=32, layers=1)
    config = vf.GRPOConfig(
        batch_size=128,  # rollouts per step
        group_size=8,  # rollouts per prompt
        max_new_tokens=4,
        learning_rate=1e-2,
        max_steps=steps,
        eval_strategy="steps",
        eval_steps=max(steps // 4, 1),
        output_dir=folder / "vowels",
        show_progress=False,
    )
    trainer = vf.GRPOTrainer(model=model, tokenizer=tokenizer, env=environment(), config=config)
    before = trainer.evaluate()
    report = trainer.train()
    after = trainer.evaluate()
    print(report.picture())
    print(f"\nreward on prompts that were held out: {before.mean_reward:.2f} before, {after.mean_reward:.2f} after")
    print(f"the run: {report.path}")
    return report


if __name__ == "__main__":
    main()
