"""Generated integer arithmetic: any number of questions, at three levels of difficulty."""

from __future__ import annotations

import operator
import random
import zlib
from collections.abc import Iterator

import verifiers as vf

SYSTEM_PROMPT = """Work the problem out, then answer in exactly this form:
<reasoning>
your steps
</reasoning>
<answer>
one whole number
</answer>"""
PLAIN_PROMPT = "Reply with the value of the expression, one whole number, and nothing else."

# level → how many numbers, the largest of them, and the operations between them
LEVELS = {
    "easy": (2, 20, "+-"),
    "medium": (3, 50, "+-"),
    "hard": (3, 99, "+-*"),
}
EVERY_NTH_IS_EVAL = 5
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def make_row(draw: random.Random, difficulty: str) -> dict[str, str]:
    """One question with its answer. Operations are evaluated from left to right, and written with parentheses."""
    count, largest, signs = LEVELS[difficulty]
    value = draw.randint(0, largest)
    text = str(value)
    for i in range(1, count):
        sign, number = draw.choice(signs), draw.randint(0, largest)
        value = OPERATIONS[sign](value, number)
        text = f"({text}) {sign} {number}" if i > 1 else f"{text} {sign} {number}"
    return {"question": f"What is {text}?", "answer": str(value), "difficulty": difficulty}


def is_for_eval(row: dict[str, str]) -> bool:
    """Is this question for evaluation or for training? Its text decides, so no question is in both data sets."""
    return zlib.crc32(row["question"].encode()) % EVERY_NTH_IS_EVAL == 0


def make_rows(n: int, difficulty: str, seed: int, *, is_eval: bool) -> Iterator[dict[str, str]]:
    draw = random.Random(seed)
    levels = list(LEVELS) if difficulty == "mixed" else [difficulty]
    for i in range(n):
        while is_for_eval(row := make_row(draw, levels[i % len(levels)])) != is_eval:
            pass
        yield row


def load_environment(
    difficulty: str = "mixed",
    num_train_examples: int = 1000,
    num_eval_examples: int = 200,
    seed: int = 0,
    use_tags: bool = True,
    system_prompt: str | None = None,
) -> vf.SingleTurnEnv:
    """Arithmetic at ``difficulty`` easy, medium, hard or mixed; no question is both for training and for evaluation."""
    if difficulty not in (*LEVELS, "mixed"):
        raise ValueError(f"difficulty must be one of {', '.join(LEVELS)} or mixed, got {difficulty!r}")
    parser = vf.XMLParser(["reasoning", "answer"]) if use_tags else vf.Parser(extract_fn=str.strip)

    def correct(completion: vf.Messages, answer: str) -> bool:
        return parser.parse_answer(completion) == answer

    rubric = vf.Rubric([correct], parser=parser)
    if use_tags:
        rubric.add_reward_func(parser.get_format_reward_func(), 0.1)
    if system_prompt is None:
        system_prompt = SYSTEM_PROMPT if use_tags else PLAIN_PROMPT

    return vf.SingleTurnEnv(
        dataset=list(make_rows(num_train_examples, difficulty, seed, is_eval=False)),
        eval_dataset=list(make_rows(num_eval_examples, difficulty, seed + 1_000_003, is_eval=True)),
        system_prompt=system_prompt or None,
        parser=parser,
        rubric=rubric,
    )
