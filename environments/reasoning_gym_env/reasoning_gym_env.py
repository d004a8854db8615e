"""Puzzles of Reasoning Gym, one kind or a mixture, scored by its own scorers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import verifiers as vf

THINK_PROMPT = (
    "Solve the puzzle. Think inside <think>...</think>, then give your final answer, and nothing else, "
    "in <answer> tags."
)

# Several kinds of puzzles that small models sometimes solve, and whose right answer is one short text.
MIXTURE = (
    "basic_arithmetic",
    "gcd",
    "letter_counting",
    "number_sequence",
    "simple_equations",
    "word_sequence_reversal",
)


def after_thoughts(text: str) -> str | None:
    """The answer in tags, in the text after the thoughts."""
    return vf.XMLParser(["answer"]).parse_answer(text)


def load_environment(
    gym: str | Sequence[str | Mapping[str, Any]] = MIXTURE,
    config: Mapping[str, Any] | None = None,
    use_think: bool = False,
    num_train_examples: int = 1000,
    num_eval_examples: int = 100,
    seed: int = 0,
    system_prompt: str | None = None,
    scoring_timeout: float = 20.0,
) -> vf.ReasoningGymEnv:
    """Puzzles of ``gym``: a data set's name, or a list of names or of ``{"name", "weight", "config"}``."""
    if min(num_train_examples, num_eval_examples) < 0:
        raise ValueError(f"{num_train_examples=}, {num_eval_examples=} must be 0 or more")
    given: dict[str, Any] = {"parser": vf.ThinkParser(extract_fn=after_thoughts)} if use_think else {}
    if system_prompt or use_think:
        given["system_prompt"] = system_prompt or THINK_PROMPT
    return vf.ReasoningGymEnv(
        gym if isinstance(gym, str) else list(gym),
        num_train_examples=num_train_examples,
        num_eval_examples=num_eval_examples,
        seed=seed,
        config=config,
        scoring_timeout=scoring_timeout,
        **given,
    )
