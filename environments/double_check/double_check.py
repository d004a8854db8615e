"""Generated sums of many steps; the model is asked to check its answer before it counts."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import verifiers as vf

SYSTEM_PROMPT = "Work the problem out step by step. Give the final number, and nothing else, inside \\boxed{}."
STEPS = {
    "Add {n}.": lambda value, n: value + n,
    "Subtract {n}.": lambda value, n: value - n,
    "Multiply by {n}.": lambda value, n: value * n,
    "Take the result away from {n}.": lambda value, n: n - value,
}


def make_row(draw: random.Random, num_steps: int) -> vf.Row:
    """A start value and the operations on it, one sentence per step."""
    value = draw.randint(2, 50)
    sentences = [f"Start with {value}."]
    for _ in range(num_steps):
        sentence, step = draw.choice(list(STEPS.items()))
        n = draw.randint(2, 9 if "Multiply" in sentence else 50)
        value = step(value, n)
        sentences.append(sentence.format(n=n))
    return {"question": " ".join([*sentences, "What is the result?"]), "answer": str(value)}


def make_rows(n: int, num_steps: int, seed: int) -> list[vf.Row]:
    draw = random.Random(seed)
    return [make_row(draw, num_steps) for _ in range(n)]


def hub_rows(dataset_name: str, start: int, stop: int, total: int, seed: int) -> Any:
    """Rows ``start`` to ``stop`` of ``total`` random rows of a data set on the hub."""
    rows = vf.load_example_dataset(dataset_name, n=total, seed=seed)
    return rows.select(range(min(start, len(rows)), min(stop, len(rows))))


def make_parser() -> vf.Parser:
    """A parser for which a reply without a box has no answer."""
    return vf.MaybeThinkParser(extract_fn=functools.partial(vf.extract_boxed_answer, strict=True))


@functools.cache
def plain_rubric() -> vf.MathRubric:
    return vf.MathRubric(parser=make_parser())


async def first_answer(completion: vf.Messages, answer: str) -> float:
    """Was the first answer right, before the check?"""
    score = await plain_rubric().score_rollout("", completion[:1], answer, {})
    return float(score["reward"])


def load_environment(
    dataset_name: str = "steps",
    num_steps: int = 6,
    num_train_examples: int = 1000,
    num_eval_examples: int = 200,
    checks: str | Sequence[str] | None = None,
    seed: int = 0,
    system_prompt: str | None = None,
) -> vf.DoubleCheckEnv:
    """Sums of ``num_steps`` steps, or an example data set of the hub; ``checks`` are the follow-up questions."""
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    if min(num_train_examples, num_eval_examples) < 1:
        raise ValueError(
            f"num_train_examples={num_train_examples} and num_eval_examples={num_eval_examples} must be at least 1"
        )
    if dataset_name == "steps":
        train: Any = make_rows(num_train_examples, num_steps, seed)
        evaluation: Any = make_rows(num_eval_examples, num_steps, seed + 1_000_003)
    else:
        total = num_eval_examples + num_train_examples
        train = functools.partial(hub_rows, dataset_name, num_eval_examples, total, total, seed)
        evaluation = functools.partial(hub_rows, dataset_name, 0, num_eval_examples, total, seed)
    parser = make_parser()
    return vf.DoubleCheckEnv(
        dataset=train,
        eval_dataset=evaluation,
        system_prompt=system_prompt or SYSTEM_PROMPT,
        parser=parser,
        rubric=vf.MathRubric([first_answer], [0.0], parser=parser),
        **({} if checks is None else {"checks": checks}),
    )
