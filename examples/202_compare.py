"""202 · Comparing two models on the same questions, question by question.

The questions differ far more than the models do. The two separate intervals overlap, but the interval of the paired
difference excludes 0.

python examples/202_compare.py
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import verifiers as vf

QUESTIONS = 120
ROLLOUTS = 4


def correct(completion: vf.Messages, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


def environment() -> vf.Environment:
    rows = [{"question": f"question {n}", "answer": "yes"} for n in range(QUESTIONS)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([correct]))


def player(name: str, skill: float) -> Callable[[list[dict[str, str]]], str]:
    """A model for which the same questions are hard as for the other, but better by its ``skill``."""
    draws: dict[str, random.Random] = {}

    def reply(messages: list[dict[str, str]]) -> str:
        question = messages[-1]["content"]
        ease = random.Random(question).random()
        draw = draws.setdefault(question, random.Random(name + question))
        return "yes" if draw.random() < ease + skill else "no"

    return reply


def main() -> dict[str, Any]:
    env = environment()
    scores = {}
    for name, skill in (("A", 0.0), ("B", 0.06)):
        client = vf.FakeClient(player(name, skill))
        results = env.evaluate(client=client, model=name, rollouts_per_example=ROLLOUTS, use_tqdm=False)
        print(f"{name} {results.interval()}")
        scores[name] = results
    a, b = (vf.stats.by_example(run["rewards"], run["example_ids"]) for run in scores.values())
    paired = vf.stats.compare(a, b)
    separate = vf.stats.compare(a, b, paired=False)
    print(f"\npaired\n{paired}\n\nas if the questions were others\n{separate}")
    return {**scores, "paired": paired, "separate": separate}


if __name__ == "__main__":
    main()
