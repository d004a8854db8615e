"""302 · Training over several turns: a guessing game in which the environment says “more” or “less”.

The secret is one of seven digits, and there are three turns. A player that ignores the hints finds it in at most three
of seven games; binary search always finds it. The environment's messages are in the context but never trained on.

python examples/302_multi_turn_training.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import verifiers as vf

SECRETS, TURNS = "1234567", 3


class MoreOrLess(vf.MultiTurnEnv):
    def setup_state(self, state: vf.State) -> None:
        state.update(open=SECRETS, guesses=0, sensible=0, found=False)

    def env_response(self, messages: vf.Messages, state: vf.State) -> tuple[str, dict[str, Any]]:
        guess, secret, still_open = messages[-1]["content"], state["answer"], state["open"]
        is_sensible = len(guess) == 1 and guess in still_open
        count = {"guesses": state["guesses"] + 1, "sensible": state["sensible"] + is_sensible}
        if guess == secret:
            return "yes", {**count, "found": True}
        if len(guess) != 1 or guess not in SECRETS:
            return "digit", count
        if guess < secret:
            return "more", {**count, "open": "".join(digit for digit in still_open if digit > guess)}
        return "less", {**count, "open": "".join(digit for digit in still_open if digit < guess)}

    def is_completed(self, messages: vf.Messages, state: vf.State) -> bool:
        return state["found"] or state["guesses"] >= TURNS


def found(state: vf.State) -> float:
    return float(state["found"])


def sensible(state: vf.State) -> float:
    """The share of guesses that could still be right: a partial reward, in which even first attempts differ."""
    return state["sensible"] / state["guesses"]


def environment(weights: tuple[float, float] = (1.0, 0.5)) -> vf.Environment:
    rows = [{"question": "guess", "answer": secret} for secret in SECRETS]
    rubric = vf.Rubric([found, sensible], weights=list(weights))
    return MoreOrLess(dataset=rows, eval_dataset=rows, rubric=rubric, max_turns=TURNS + 1)


def make_trainer(env: vf.Environment, folder: Path, *, seed: int = 1, **settings: Any) -> Any:
    """A trainer for a new model; ``settings`` are those of `vf.GRPOConfig`."""
    texts = ["guess", "more", "less", "digit", "yes", SECRETS]
    model, tokenizer = vf.tiny_model(texts=texts, hidden_size=64, layers=2, seed=seed)
    chosen = {
        "batch_size": 224,
        "group_size": 32,
        "max_new_tokens": 2,  # a digit, and the end of the turn
        "learning_rate": 1e-3,
        "temperature": 1.2,  # rewards within groups differ for longer than at 1.0
        "max_steps": 60,
        "eval_rollouts_per_example": 20,
        **settings,
    }
    config = vf.GRPOConfig(output_dir=folder / "more-or-less", seed=seed, show_progress=False, **chosen)
    return vf.GRPOTrainer(model=model, tokenizer=tokenizer, env=env, config=config)


def main(folder: Path | None = None, *, steps: int = 60) -> Any:
    trainer = make_trainer(environment(), folder or Path(tempfile.mkdtemp()), max_steps=steps)
    before = trainer.evaluate()
    report = trainer.train()
    after = trainer.evaluate()
    print(report.picture())
    for name, results in (("before", before), ("after", after)):
        shares = {metric: results.interval(metric).mean for metric in ("found", "sensible")}
        print(f"{name:<7} found {shares['found']:.2f}, guesses that could be right {shares['sensible']:.2f}")
    return report


if __name__ == "__main__":
    main()
