"""Small trainers for tests: a random model of a few thousand parameters, and a task it can make progress on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import verifiers as vf
from tests.engine import tiny


def share_of_e(completion: Any) -> float:
    """How much of a reply of 8 characters is the letter e."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return min(text.count("e") / 8, 1.0)


def environment(n: int = 16, **kwargs: Any) -> Any:
    rows = [{"question": f"say {i}", "answer": str(i), "difficulty": "easy" if i % 2 else "hard"} for i in range(n)]
    return vf.SingleTurnEnv(dataset=rows, **{"rubric": vf.Rubric([share_of_e]), **kwargs})


def config(folder: Path, **kwargs: Any) -> vf.GRPOConfig:
    usual = {
        "batch_size": 16,
        "group_size": 4,
        "max_new_tokens": 8,
        "learning_rate": 3e-3,
        "max_steps": 3,
        "output_dir": folder / "run",
        "show_progress": False,
    }
    return vf.GRPOConfig(**{**usual, **kwargs})


def trainer(folder: Path, kind: Any = None, *, env: Any = None, model: Any = None, **kwargs: Any) -> Any:
    """A trainer whose configuration takes the keywords that are not the trainer's own."""
    own = ("peft_config", "client", "callbacks", "row_sampler", "weight_schedule", "dataset", "eval_dataset")
    given = {name: kwargs.pop(name) for name in own if name in kwargs}
    extra = kwargs.pop("extra", {})
    tokenizer = tiny.tokenizer()
    return (kind or vf.GRPOTrainer)(
        model=tiny.model(tokenizer) if model is None else model,
        tokenizer=tokenizer,
        env=environment() if env is None else env,
        config=config(folder, **kwargs),
        **given,
        **extra,
    )
