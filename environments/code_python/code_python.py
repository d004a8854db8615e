"""Write small Python functions, which are called in the sandbox; the expected values stay outside of it."""

from __future__ import annotations

import functools
import json
import random
import string
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import verifiers as vf

SYSTEM_PROMPT = """Write the Python function that is asked for. Give it, with everything it needs, in one block:
```python
def name(arguments):
    ...
```"""
TOOL_PROMPT = " You may try your code with the python tool first; the last block of your final reply counts."
EVERY_NTH_IS_HELD_OUT = 5
TESTS_PER_TASK = 8
REPEATS = 0.02  # the chance to accept a duplicate task, so that any number of rows can be generated

Inputs = list[Any]
Task = tuple[str, str, Callable[..., Any], Callable[[random.Random], Inputs]]


# --- tasks: name, description, solution, and a generator of inputs ------------------------------------------------


def numbers(draw: random.Random, low: int = -50, high: int = 50, most: int = 12) -> list[int]:
    return [draw.randint(low, high) for _ in range(draw.randint(1, most))]


def word(draw: random.Random, letters: str = "abcde", most: int = 10) -> str:
    return "".join(draw.choice(letters) for _ in range(draw.randint(1, most)))


def sum_of_multiples(draw: random.Random) -> Task:
    a, b = draw.sample(range(2, 30), 2)
    asked = f"sum_of_multiples(n) returns the sum of all whole numbers from 1 to n that are multiples of {a} or of {b}."
    return (
        "sum_of_multiples",
        asked,
        lambda n: sum(x for x in range(1, n + 1) if x % a == 0 or x % b == 0),
        lambda r: [r.randint(0, 2_000)],
    )


def rotate(draw: random.Random) -> Task:
    k, side = draw.randint(2, 40), draw.choice(["left", "right"])

    def solve(items: list[int]) -> list[int]:
        shift = (k if side == "left" else -k) % len(items)
        return items[shift:] + items[:shift]

    asked = f"rotate(items) returns the list rotated by {k} places to the {side}. The list has at least one item."
    return "rotate", asked, solve, lambda r: [numbers(r)]


def shift_letters(draw: random.Random) -> Task:
    small, large = draw.randint(1, 25), draw.randint(1, 25)
    lower, upper = string.ascii_lowercase, string.ascii_uppercase
    table = str.maketrans(lower + upper, lower[small:] + lower[:small] + upper[large:] + upper[:large])
    asked = (
        f"shift_letters(text) returns the text with each letter a-z replaced by the one {small} places further in the "
        f"alphabet, and each letter A-Z by the one {large} places further, going on from the first after the last; all "
        "other characters stay."
    )
    return "shift_letters", asked, lambda text: text.translate(table), lambda r: [word(r, "aMzZq, 7!", 20)]


def in_base(draw: random.Random) -> Task:
    base, width = draw.choice([3, 4, 5, 6, 7, 9, 11, 12, 13, 14, 15]), draw.randint(2, 12)

    def solve(n: int) -> str:
        digits = ""
        while n:
            n, digit = divmod(n, base)
            digits = (string.digits + string.ascii_lowercase)[digit] + digits
        return digits.rjust(width, "0")

    asked = (
        f"in_base(n) returns the whole number n >= 0 written in base {base}, with a, b, c, ... as digits from 10 on, "
        f"and with zeros in front where it would have fewer than {width} digits."
    )
    return "in_base", asked, solve, lambda r: [r.choice([0, r.randint(1, 50), r.randint(50, 10**9)])]


def recurrence(draw: random.Random) -> Task:
    p, q, m = draw.randint(1, 9), draw.randint(1, 9), draw.randint(50, 5_000)

    def solve(n: int) -> int:
        before, now = 0, 1
        for _ in range(n):
            before, now = now, (p * now + q * before) % m
        return before

    asked = f"recurrence(n) returns a(n) modulo {m}, where a(0) = 0, a(1) = 1 and a(n) = {p} a(n-1) + {q} a(n-2)."
    return "recurrence", asked, solve, lambda r: [r.randint(0, 300)]


def some_words(draw: random.Random) -> Task:
    k, is_long = draw.randint(2, 9), draw.random() < 0.5
    order = draw.choice(["alphabetical order", "reverse alphabetical order", "the order in which they first appear"])

    def solve(text: str) -> list[str]:
        found = list(dict.fromkeys(w for w in text.split() if (len(w) > k if is_long else len(w) < k)))
        return found if order.startswith("the") else sorted(found, reverse=order.startswith("reverse"))

    length = f"{'more' if is_long else 'fewer'} than {k} letters"
    return (
        "some_words",
        f"some_words(text) returns a list of the words of {length}, each once, in {order}.",
        solve,
        lambda r: [" ".join(word(r, "abc", 12) for _ in range(r.randint(0, 12)))],
    )


def nearest(draw: random.Random) -> Task:
    target, tie = draw.randint(-40, 40), draw.choice(["smaller", "larger"])
    sign = 1 if tie == "smaller" else -1
    asked = (
        f"nearest(items) returns the number in the list that is nearest to {target}; of two that are, the {tie} one."
    )
    return (
        "nearest",
        asked,
        lambda items: min(items, key=lambda x: (abs(x - target), sign * x)),
        lambda r: [numbers(r)],
    )


def runs(draw: random.Random) -> Task:
    mark = draw.choice("*#:-x~@")
    least = draw.randint(2, 5)

    def solve(text: str) -> str:
        parts: list[list[Any]] = []
        for c in text:
            if parts and parts[-1][0] == c:
                parts[-1][1] += 1
            else:
                parts.append([c, 1])
        return "".join(f"{c}{mark}{n}" if n >= least else c * n for c, n in parts)

    asked = (
        f"runs(text) returns the text with each run of {least} or more equal characters replaced by the character, "
        f"then {mark!r}, then the length of the run; shorter runs stay as they are."
    )
    return "runs", asked, solve, lambda r: ["".join(r.choice("abc") * r.randint(1, 7) for _ in range(r.randint(0, 6)))]


def merged(draw: random.Random) -> Task:
    gap = draw.randint(0, 40)

    def solve(intervals: list[list[int]]) -> list[list[int]]:
        done: list[list[int]] = []
        for low, high in sorted(intervals):
            if done and low <= done[-1][1] + gap:
                done[-1][1] = max(done[-1][1], high)
            else:
                done.append([low, high])
        return done

    def make(r: random.Random) -> Inputs:
        starts = [r.randint(0, 300) for _ in range(r.randint(0, 8))]
        return [[[low, low + r.randint(0, 12)] for low in starts]]

    asked = (
        f"merged(intervals) takes a list of [low, high] pairs and returns them sorted, with those merged that overlap "
        f"or lie at most {gap} apart (the next low minus the high before it)."
    )
    return "merged", asked, solve, make


def digit_steps(draw: random.Random) -> Task:
    k, modulus = draw.randint(2, 5), draw.randint(500, 999)

    def solve(n: int) -> int:
        steps = 0
        while n >= 10:
            n, steps = sum(int(d) ** k for d in str(n)) % modulus, steps + 1
            if steps == 100:
                break
        return steps

    asked = (
        f"digit_steps(n) counts steps: while n has two or more digits and fewer than 100 steps were made, n becomes "
        f"the sum of its digits, each to the power of {k}, modulo {modulus}. It returns the number of steps."
    )
    return "digit_steps", asked, solve, lambda r: [r.randint(0, 10**6)]


MAKERS = [sum_of_multiples, rotate, shift_letters, in_base, recurrence, some_words, nearest, runs, merged, digit_steps]


def is_held_out(question: str) -> bool:
    """Is a task for evaluation or for training? Its text decides, so no task is in both data sets."""
    return zlib.crc32(question.encode()) % EVERY_NTH_IS_HELD_OUT == 0


def make_rows(n: int, seed: int, *, held_out: bool) -> list[dict[str, Any]]:
    """``n`` tasks with their tests; the same seed gives the same tasks."""
    draw = random.Random(f"code-python {seed} {held_out}")
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    while len(rows) < n:
        name, asked, solve, make = draw.choice(MAKERS)(draw)
        question = f"Write a Python function. {asked}"
        if is_held_out(question) == held_out and (question not in seen or draw.random() < REPEATS):
            seen.add(question)
            inputs = [make(draw) for _ in range(TESTS_PER_TASK)]
            tests = [{"args": args, "expected": solve(*json.loads(json.dumps(args)))} for args in inputs]
            rows.append({"question": question, "info": {"function": name, "tests": tests}})
    return rows


# --- scoring ------------------------------------------------------------------------------------------------------


def code_in(completion: vf.Messages) -> str:
    """The last fenced block of the last reply; a reply without one counts as code."""
    text = vf.Parser().parse_answer(completion) or ""
    blocks = text.split("```")[1::2]
    if not blocks:
        return text
    first_line, _, rest = blocks[-1].partition("\n")
    return rest if first_line.strip().lower() in ("", "python", "py", "python3") else blocks[-1]


def is_same(given: Any, expected: Any) -> bool:
    """Are the values the same JSON? So True is not 1, and the order of lists matters."""
    return json.dumps(given, sort_keys=True) == json.dumps(expected, sort_keys=True)


class CodeRubric(vf.Rubric):
    """Runs the code, calls the function with each test's arguments, and compares the results outside the sandbox."""

    def __init__(self, timeout_s: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.timeout_s = timeout_s
        self.add_reward_func(self.all_passed)
        self.add_metric(self.share_passed)

    @functools.cached_property
    def sandbox(self) -> Any:
        return vf.Sandbox(timeout_s=self.timeout_s)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "sandbox"}

    async def all_passed(self, completion: vf.Messages, info: dict[str, Any], state: vf.State) -> bool:
        """Did the function return the right value in every test?"""
        return await self.share_passed(completion, info, state) == 1.0

    async def share_passed(self, completion: vf.Messages, info: dict[str, Any], state: vf.State) -> float:
        """The share of tests with the right value. The code is run once for both functions."""
        if "share_passed" not in state:
            passed = await self.judge(code_in(completion), info["function"], info["tests"])
            state["share_passed"] = passed / len(info["tests"])
        return float(state["share_passed"])

    async def judge(self, code: str, function: str, tests: list[dict[str, Any]]) -> int:
        """The number of tests that pass. A call that times out or ends the process is the last; the rest fail."""
        passed = 0
        async with self.sandbox.session() as session:
            if not (await session.run(code)).is_ok:
                return 0
            for test in tests:
                result = await session.call(function, test["args"])
                if result.is_fresh:  # the code's process is gone, and the function with it
                    break
                passed += result.is_ok and is_same(result.value, test["expected"])
                if result.status == "timeout":
                    break
        return passed


def solve(messages: vf.Messages, row: dict[str, Any]) -> str:
    """A reply that passes, for checking the environment: a lookup table of the expected values, in the right form."""
    info = row["info"]
    table = {json.dumps(test["args"]): test["expected"] for test in info["tests"]}
    name = info["function"]
    return f"```python\nimport json\ndef {name}(*args): return {table!r}[json.dumps(list(args))]\n```"


def load_environment(
    dataset_path: str | None = None,
    num_train_examples: int = 1000,
    num_eval_examples: int = 200,
    use_tools: bool = False,
    timeout_s: float = 5.0,
    max_turns: int = 5,
    seed: int = 0,
) -> vf.Environment:
    """Python functions to write; the reward is 1 if every test passes, else 0."""
    if dataset_path is not None:
        path = Path(dataset_path).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {str(path)!r}; dataset_path must be a .jsonl file")
        rows: dict[str, Any] = {"dataset": path}
    else:
        rows = {
            "dataset": functools.partial(make_rows, num_train_examples, seed, held_out=False),
            "eval_dataset": functools.partial(make_rows, num_eval_examples, seed, held_out=True),
        }
    rubric = CodeRubric(timeout_s)
    if not use_tools:
        return vf.SingleTurnEnv(**rows, system_prompt=SYSTEM_PROMPT, rubric=rubric)
    return vf.PythonEnv(
        **rows, system_prompt=SYSTEM_PROMPT + TOOL_PROMPT, rubric=rubric, max_turns=max_turns, timeout_s=timeout_s
    )
