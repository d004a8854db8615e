"""Mathematics with a Python tool: problems from the hub, from a file, or generated."""

from __future__ import annotations

import functools
import math
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import verifiers as vf

SYSTEM_PROMPT = "Use python for all calculations. Give the final answer, and nothing else, inside \\boxed{}."
GENERATED = "generated"
EVERY_NTH_IS_HELD_OUT = 5
# training data set → its separate evaluation data set
EVALUATED_ON = {"math": "math500", "gsm8k": "gsm8k"}


# --- generated problems -------------------------------------------------------------------------------------------


def primes_below(n: int) -> list[int]:
    """The primes below n."""
    return [p for p in range(2, n) if all(p % d for d in range(2, math.isqrt(p) + 1))]


def make_primes(draw: random.Random) -> tuple[str, int]:
    n = draw.randint(50, 2_000)
    return f"What is the sum of all prime numbers below {n}?", sum(primes_below(n))


def make_divisors(draw: random.Random) -> tuple[str, int]:
    n, (a, b, c) = draw.randint(500, 5_000), draw.sample([2, 3, 5, 7, 11, 13], 3)
    text = f"How many whole numbers from 1 to {n} are divisible by {a} or {b}, but not by {c}?"
    return text, sum((x % a == 0 or x % b == 0) and x % c != 0 for x in range(1, n + 1))


def make_power(draw: random.Random) -> tuple[str, int]:
    base, exponent, modulus = draw.randint(3, 99), draw.randint(50, 500), draw.randint(101, 9_999)
    return f"What is the remainder when {base}^{exponent} is divided by {modulus}?", pow(base, exponent, modulus)


def make_digits(draw: random.Random) -> tuple[str, int]:
    base, exponent = draw.randint(3, 40), draw.randint(20, 80)
    return f"What is the sum of the digits of {base}^{exponent}?", sum(map(int, str(base**exponent)))


def make_change(draw: random.Random) -> tuple[str, int]:
    total, coins = draw.randint(40, 150), sorted(draw.sample([1, 2, 5, 10, 20, 25], 3))
    ways = [1] + [0] * total
    for coin in coins:
        for amount in range(coin, total + 1):
            ways[amount] += ways[amount - coin]
    listed = ", ".join(map(str, coins[:-1]))
    return f"In how many ways can {total} be paid with coins of {listed} and {coins[-1]}, in any number?", ways[total]


def make_determinant(draw: random.Random) -> tuple[str, int]:
    (a, b, c), (d, e, f), (g, h, i) = rows = [[draw.randint(-9, 9) for _ in range(3)] for _ in range(3)]
    value = a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)
    return f"What is the determinant of the matrix {rows}?", value


def make_recurrence(draw: random.Random) -> tuple[str, int]:
    p, q, n = draw.randint(1, 6), draw.randint(1, 6), draw.randint(12, 60)
    before, now = 0, 1
    for _ in range(n - 1):
        before, now = now, p * now + q * before
    return f"A sequence has a(0) = 0, a(1) = 1 and a(n) = {p} a(n-1) + {q} a(n-2). What is a({n})?", now


MAKERS: list[Callable[[random.Random], tuple[str, int]]] = [
    make_primes,
    make_divisors,
    make_power,
    make_digits,
    make_change,
    make_determinant,
    make_recurrence,
]


def is_held_out(question: str) -> bool:
    """Is a problem for evaluation or for training? Its text decides, so no problem is in both data sets."""
    return zlib.crc32(question.encode()) % EVERY_NTH_IS_HELD_OUT == 0


def make_rows(n: int, seed: int, *, held_out: bool) -> list[dict[str, str]]:
    """``n`` problems; the same seed gives the same problems."""
    draw = random.Random(f"math-python {seed} {held_out}")
    rows: list[dict[str, str]] = []
    while len(rows) < n:
        question, answer = MAKERS[len(rows) % len(MAKERS)](draw)
        if is_held_out(question) == held_out:
            rows.append({"question": question, "answer": str(answer)})
    return rows


# --- rows ---------------------------------------------------------------------------------------------------------


def read_hub(name: str, split: str | None, n: int) -> Any:
    """The first ``n`` rows of a data set on the hub (-1: all)."""
    try:
        found = vf.load_example_dataset(name, split=split)
    except OSError as error:
        advice = f"dataset_name={GENERATED!r} needs no network, dataset_path= reads a .jsonl file"
        raise OSError(f"{name!r} could not be loaded from the hub; without it, {advice}: {error}") from error
    return found if n < 0 else found.select(range(min(n, len(found))))


def sources(
    dataset_name: str, dataset_split: str, dataset_path: str | None, n_train: int, n_eval: int, seed: int
) -> tuple[Any, Any]:
    """The sources of the training and evaluation rows, which are read or generated on first use."""
    if dataset_path is not None:
        path = Path(dataset_path).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {str(path)!r}; dataset_path must be a .jsonl file")
        return path, None
    if dataset_name == GENERATED:
        sizes = 1_000 if n_train < 0 else n_train, 200 if n_eval < 0 else n_eval
        return (
            functools.partial(make_rows, sizes[0], seed, held_out=False),
            functools.partial(make_rows, sizes[1], seed, held_out=True),
        )
    train = functools.partial(read_hub, dataset_name, dataset_split, n_train)
    if dataset_name not in EVALUATED_ON:
        return train, None
    return train, functools.partial(read_hub, EVALUATED_ON[dataset_name], "test", n_eval)


def load_environment(
    dataset_name: str = "math",
    dataset_split: str = "train",
    dataset_path: str | None = None,
    num_train_examples: int = -1,
    num_eval_examples: int = -1,
    max_turns: int = 10,
    timeout_s: float = 30.0,
    system_prompt: str = SYSTEM_PROMPT,
    seed: int = 0,
) -> vf.PythonEnv:
    """Mathematics with a ``python`` tool; the reward is 1 for the right answer in the last ``\\boxed{}``, else 0."""
    train, evaluation = sources(dataset_name, dataset_split, dataset_path, num_train_examples, num_eval_examples, seed)
    parser = vf.MaybeThinkParser(extract_fn=functools.partial(vf.extract_boxed_answer, strict=True))
    return vf.PythonEnv(
        dataset=train,
        eval_dataset=evaluation,
        system_prompt=system_prompt,
        parser=parser,
        rubric=vf.MathRubric(parser=parser),
        max_turns=max_turns,
        timeout_s=timeout_s,
    )
