"""Answers in mathematics: plain numbers are compared exactly and at once, all else by math-verify under a limit."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import verifiers as vf
from verifiers.errors import GraderError
from verifiers.parsers import XMLParser
from verifiers.rubrics import MathRubric
from verifiers.rubrics import math_rubric as module
from verifiers.rubrics.plain_answers import compare_plainly, normalised, plain_number
from verifiers.types import State

ROOT = Path(__file__).resolve().parent.parent.parent
POWER_TOWER = "9^{9^{9^9}}"


def rollout(response: str, answer: Any = "4") -> State:
    row = {"prompt": "?", "answer": answer, "task": "", "info": {}, "example_id": 0}
    return State({"input": row, "completion": [{"role": "assistant", "content": response}], "trajectory": []})


def reward(response: str, answer: Any, **kwargs: Any) -> float:
    scores = MathRubric(**kwargs).score_rollout_sync("?", rollout(response)["completion"], answer, {})
    assert scores.keys() == {"correct_answer", "reward"}
    return scores["reward"]


# --- the rubric ---------------------------------------------------------------------------------------------------


def test_the_boxed_answer_after_the_thoughts_is_compared_with_the_right_one() -> None:
    assert reward("<think>\\boxed{3}</think> It is \\boxed{4}.", "4") == 1.0
    assert reward("It is \\boxed{3}.", "4") == 0.0
    assert reward("4", "4") == 1.0
    assert reward("", "4") == 0.0
    assert reward("\\boxed{0.5}", 0.5) == 1.0
    assert reward("\\boxed{0.0000001}", 1e-7) == 1.0


@pytest.mark.parametrize(
    ("answer", "response", "expected"),
    [
        ("x^2 + 2x + 1", "(x+1)^2", 1.0),
        ("\\frac{\\sqrt{2}}{2}", "\\frac{1}{\\sqrt 2}", 1.0),
        ("\\{1, 2\\}", "\\{2, 1\\}", 1.0),
        ("1/3", "0.333333", 1.0),
        ("50\\%", "0.5", 1.0),
        ("x + 1", "x + 2", 0.0),
        ("x", "", 0.0),
        ("42", "I do not know", 0.0),
    ],
)
def test_expressions_are_compared_by_what_they_mean(answer: str, response: str, expected: float) -> None:
    assert reward(f"\\boxed{{{response}}}" if response else "", answer) == expected


def test_functions_of_ones_own_count_beside_it() -> None:
    def short(completion):
        return len(completion[0]["content"]) < 20

    rubric = MathRubric(funcs=[short], weights=[0.5], parser=XMLParser(["answer"]))
    scores = rubric.score_rollout_sync("?", rollout("<answer>4.0</answer>")["completion"], "4", {})
    assert scores == {"short": 0.0, "correct_answer": 1.0, "reward": 1.0}


def test_a_wrong_answer_cannot_take_itself_out_of_the_mean() -> None:
    rows = [{"question": str(i), "answer": "4"} for i in range(4)]
    client = vf.FakeClient(lambda m: "\\boxed{4}" if int(m[-1]["content"]) < 2 else f"\\boxed{{{POWER_TOWER}}}")
    results = vf.SingleTurnEnv(dataset=rows, rubric=MathRubric()).evaluate(client, "fake", use_tqdm=False)
    assert results.failed == []
    assert sorted(results["rewards"]) == [0.0, 0.0, 1.0, 1.0]


HOSTILE = {
    "a tower of powers": POWER_TOWER,
    "a tower in an equation": f"x = {POWER_TOWER}",
    "a tower modulo": f"{POWER_TOWER} \\bmod 7",
    "a factorial": "1000000000!",
    "a factorial of a factorial": "((9!)!)!",
    "a large power of a sum": "(x+y+z)^{100000}",
    "a large binomial": "\\binom{10^9}{10^8}",
    "a long sum": "\\sum_{k=1}^{10^{12}} k^{k}",
    "a long product": "\\prod_{k=1}^{10^{9}} \\sin k",
    "an integral": "\\int_0^{10} \\sin(\\cos(\\sin(x^x))) e^{x^2} dx",
    "a limit": "\\lim_{n \\to \\infty} (1 + \\frac{1}{n})^{n^{n^{n}}}",
    "many digits": "9" * 9000,
    "many digits after the point": "0." + "3" * 9000,
    "a large exponent": "1e999999999",
    "deep brackets": "(" * 2000 + "4" + ")" * 2000,
    "deep braces": "{" * 2000 + "4" + "}" * 2000,
    "deep fractions": "\\frac{1}{" * 400 + "4" + "}" * 400,
    "deep roots": "\\sqrt{" * 400 + "4" + "}" * 400,
    "nested powers": "2^{" * 400 + "4" + "}" * 400,
    "a long sum of ones": "1+" * 4000 + "1",
    "a long product of variables": "xyzw" * 1000,
    "a large matrix": "\\begin{pmatrix}" + "\\\\".join("&".join("12345") for _ in range(200)) + "\\end{pmatrix}",
    "a power of a matrix": "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}^{10^9}",
    "many dollar signs": "$a" * 3000,
    "many answers": "the final answer is " * 400,
    "many equations": "=".join(str(i) for i in range(2000)),
    "a large set": "\\{" + ",".join(str(i) for i in range(2000)) + "\\}",
    "ten million characters": "4" + " " * 10_000_000 + "4",
    "half a surrogate pair": "4\ud800",
    "a null": "4\x004",
    "text from right to left": "\u202e4\u202c \u0664",
    "superscripts": "9⁹⁹⁹⁹⁹",
    "combining marks": "4" + "\u0301" * 5000,
    "broken commands": "\\frac{}{}{}{\\sqrt[}{]}\\left(\\right.",
    "unknown commands": "\\csname\\expandafter\\input{/etc/passwd}\\loop\\iftrue\\repeat",
    "python": "__import__('os').system('true')",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_whatever_a_model_writes_is_a_wrong_answer_and_no_failure(text: str) -> None:
    for right in ("41", "x^2 + 1"):
        assert reward(f"\\boxed{{{text}}}", right) == 0.0
        assert reward(text, right) == 0.0


def test_a_hostile_answer_takes_a_tenth_of_a_second_and_costs_the_others_nothing() -> None:
    rubric = MathRubric()
    rubric.score_rollout_sync("?", "x + 1", "1 + x", {})  # the workers are there
    states = [rollout(f"\\boxed{{{POWER_TOWER} + {i}}}") for i in range(10)]
    states += [rollout(f"\\boxed{{{i} + x - x}}") for i in range(10)]
    began = time.monotonic()
    rubric.score_group(states)
    assert time.monotonic() - began < 30  # generous: other processes run beside this one
    assert [state["reward"] for state in states] == [0.0] * 10 + [float(i == 4) for i in range(10)]


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet="0123456789xi^_{}()[]\\,=<≤!|$%&~ .frac sqrt text sum", max_size=60))
def test_no_text_fails_a_rollout(text: str) -> None:
    assert reward(f"\\boxed{{{text}}}", "x^7 + 41") in (0.0, 1.0)


@pytest.mark.parametrize("label", ["}{", "\\text{}"])
def test_a_right_answer_that_cannot_be_read_is_told_and_blamed_on_the_data_set(label: str) -> None:
    with pytest.raises(GraderError, match=r"the row's answer .* cannot be parsed as mathematics"):
        reward("\\boxed{5}", label)


EQUAL = [
    ("3x+2y=6", "6x+4y=12"), ("\\frac{x^2}{4}+y^2=1", "x^2+4y^2=4"),
    ("5", "5th"), ("0.05", "5 percent"), ("5\\%", "5 percent"),
    ("5", "5 dollars"), ("\\$5", "5 dollars"), ("5", "5~\\mathrm{m/s}"), ("5 m/s", "5~\\mathrm{m/s}"),
    ("5\\text{ meters per second}", "5 \\mathrm{m}/\\mathrm{s}"), ("25", "25\\text{ cm}^2"),
    ("60 mph", "60 miles per hour"), ("6\\sqrt{3}\\text{ m}", "6\\sqrt{3}"),
    ("7\\text{ students}", "7\\text{ people}"), ("90", "90°"), ("3x", "3x \\text{ cm}"), ("-1", "i^2"),
    ("2i", "(1+i)^2"), ("-1", "e^{i\\pi}"), ("[0,1)", "0≤x<1"), ("[0,1)", "0 \\le x < 1"), ("0 \\le x < 1", "[0,1)"),
    ("(5,\\infty)", "x > 5"), ("1/3", "0.\\overline{3}"), ("\\frac{1}{6}", "0.1\\overline{6}"),
    ("\\frac{7}{3}", "2.\\bar{3}"), ("1000", "1e3"), ("10^3", "1E3"), ("0.0015", "1.5e-3"),
    ("1.5 \\times 10^3", "1.5e3"), ("\\emptyset", "\\varnothing"), ("\\varnothing", "\\emptyset"),
    ("\\emptyset", "∅"), ("\\emptyset", "\\{\\}"), ("5", "x=5"), ("x=5", "5"), ("5", "5=x"), ("5", "f(2)=5"),
    ("4", "2+2=4"), ("25", "a^2+b^2=25"), ("3.14", "22/7=3.14"), ("y=2x+1", "2x+1"), ("x=1, y=2", "y=2, x=1"),
    ("2, 3", "x=2 \\text{ or } x=3"), ("|x-1|", "|1-x|"), ("\\sqrt{x^2+2x+1}", "|x+1|"),
    ("\\sqrt{4x+8}", "2\\sqrt{x+2}"),
]  # fmt: skip
DIFFERENT = [
    ("x-y=0", "2x-3y=0"), ("x+y=3", "x+y=4"), ("x+y=0", "xy+y^2=0"), ("x^2=y^2", "x=y"), ("|xy|", "xy"),
    ("5", "5 million"), ("5", "5\\text{ million}"), ("5", "5 squared"), ("5", "5 dozen"),
    ("5", "4=5"), ("5", "x=4=5"), ("5,6", "4=5,6"), ("x=5", "4=5"), ("6", "2+2=6"), ("5", "5=6"), ("5 km", "5 m"),
    ("5\\text{ km}", "5\\text{ m}"), ("5 m", "5 cm"), ("5\\text{ m}", "5\\text{ m}^2"), ("5 L", "5 mL"),
    ("5 dollars", "5 cents"), ("\\$5", "5 euros"), ("60 mph", "60 km/h"),
    ("6\\sqrt{3}\\text{ m}", "6\\sqrt{3}\\text{ cm}"), ("12:30 \\text{ PM}", "12:30 \\text{ AM}"),
    ("20^\\circ\\text{C}", "20^\\circ\\text{F}"), ("5x", "5"), ("5", "5c"), ("1000", "1e4"),
    ("1/3", "0.\\overline{4}"), ("1", "i^2"), ("\\emptyset", "0"), ("[0,1)", "0<x<1"), ("[0,1)", "[0,1]"),
    ("(0,1)", "0\\le x<1"), ("|x|", "x"), ("\\sqrt{x^2}", "x"),
    ("x+1", "|x+1|"), ("|2x+3|", "2x+3"), ("x+1", "\\max(x+1,0)"), ("x+100", "\\sqrt{(x+100)^2}"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "response"), EQUAL)
def test_one_answer_in_two_notations_is_one_answer(answer: str, response: str) -> None:
    assert reward(f"\\boxed{{{response}}}", answer) == 1.0


@pytest.mark.parametrize(("answer", "response"), DIFFERENT)
def test_a_false_equation_or_another_unit_is_another_answer(answer: str, response: str) -> None:
    assert reward(f"\\boxed{{{response}}}", answer) == 0.0


def test_a_row_without_an_answer_cannot_be_graded() -> None:
    with pytest.raises(GraderError, match="the row has no answer"):
        reward("\\boxed{4}", "")


def test_plain_numbers_and_repeated_questions_need_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def count(function: Any, kwargs: Any, *, timeout_s: float) -> bool:
        asked.append(kwargs)
        return True

    monkeypatch.setattr(module, "call_in_worker", count)
    rubric = MathRubric()
    for response in ("4", "4.0", "\\$4", "5", "x", "x", "x"):
        rubric.score_rollout_sync("?", response, "4", {})
    assert asked == [{"answers": ["4"], "responses": ["x"], "limit_s": 0.1}]


def test_what_is_remembered_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def always(function: Any, kwargs: Any, *, timeout_s: float) -> bool:
        return True

    monkeypatch.setattr(module, "call_in_worker", always)
    monkeypatch.setattr(module, "MAX_REMEMBERED", 3)
    rubric = MathRubric()
    for i in range(10):
        rubric.score_rollout_sync("?", f"x+{i}", "4", {})
    assert len(rubric._remembered) <= 3


def test_many_loops_in_a_row_use_the_same_workers() -> None:
    rubric = MathRubric()
    began = time.monotonic()
    for i in range(5):
        assert rubric.score_rollout_sync("?", f"\\boxed{{x+{i}}}", f"{i}+x", {})["reward"] == 1.0
    assert time.monotonic() - began < 30


def test_bad_arguments_are_refused_and_one_without_effect_warns() -> None:
    with pytest.raises(ValueError, match="timeout_seconds=0"):
        MathRubric(timeout_seconds=0)
    with pytest.warns(UserWarning, match="max_workers has no effect"):
        MathRubric(max_workers=4)


def test_without_math_verify_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'verifiers\[math\]'"):
        MathRubric()


def test_the_application_never_imports_sympy() -> None:
    script = (
        "import sys, verifiers as vf\n"
        "rubric = vf.MathRubric()\n"
        "assert rubric.score_rollout_sync('', r'\\boxed{1+x}', 'x+1', {})['reward'] == 1.0\n"
        "assert not {'sympy', 'math_verify'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-W", "always", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# --- plain numbers ------------------------------------------------------------------------------------------------

FORMS = [
    "0", "-0", "1", "-1", "+1", "02", "007", "7", "1000", "1,000", "1{,}000", "1 000", "1,000,000", "12,345",
    "12.345", ".5", "0.50", "1/2", "2/4", "\\frac{1}{2}", "\\dfrac{1}{2}", "\\frac12", "-1/2", "-\\frac{1}{2}",
    "\\frac{-1}{2}", "50%", "50\\%", "0.5%", "50", "\\$50", "$50$", "\\boxed{50}", "5", "5.00", "1/3", "0.333333",
    "0.33", "3.14159", "22/7", "1.5", "1 1/2", "0.0000001", "0.0000002", "0.000002", "0.00001", "0.1",
    "0.10000001", "123456789.1", "123456789.2", "1234567890123456789", "1234567890123456788", "−5", "5/0", "x", "5x",
]  # fmt: skip


def test_math_verify_agrees_with_every_verdict_on_plain_numbers() -> None:
    code = (
        "import itertools, json, logging, sys; logging.disable(50)\n"
        "from math_verify import parse, verify\n"
        "pairs = json.load(sys.stdin); forms = dict.fromkeys(itertools.chain(*pairs))\n"
        "read = {form: parse(f'\\\\boxed{{{form}}}', parsing_timeout=None) for form in forms}\n"
        "print(json.dumps([verify(read[a], read[b], timeout_seconds=None) for a, b in pairs]))\n"
    )
    rng = random.Random(0)
    decimals = [f"{rng.uniform(-2, 2):.{rng.choice([1, 2, 5, 6, 7])}f}" for _ in range(300)]
    near = [(a, f"{float(a) + rng.choice([1e-3, 1e-5, 1e-6, 1e-7]):.8f}") for a in decimals]
    verdicts = {pair: compare_plainly(*pair) for pair in [*itertools.product(FORMS, FORMS), *near]}
    decided = {pair: verdict for pair, verdict in verdicts.items() if verdict is not None}
    assert len(decided) > 1500
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(list(decided)), capture_output=True, text=True, check=True
    )
    theirs = json.loads(done.stdout)
    different = [(pair, ours) for (pair, ours), other in zip(decided.items(), theirs, strict=True) if ours != other]
    assert different == []


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("5", "5."),
        ("1000", "1\\,000"),
        ("5.0", "\\text{5}"),
        ("5", " $ 5 $ "),
        ("5", "\\(5\\)"),
        ("Evelyn", "Evelyn"),
        ("1e3", "1000"),
        ("5", "5 cm"),
        ("5 cm", "5 centimeters"),
        ("1/3", "0.\\overline{3}"),
        ("12", "12 red apples"),
    ],
)
def test_what_everyone_reads_as_equal_is_equal(answer: str, response: str) -> None:
    assert compare_plainly(answer, response) is True
    assert compare_plainly(response, answer) is True


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("50", "50%"),
        ("1/3", "0.333333"),
        ("1,23", "123"),
        ("(1,2)", "1,2"),
        ("x+1", "1+x"),
        ("A", "a"),
        ("1/0", "2/0"),
        ("12", "1 2"),
        ("", ""),
        ("1 1/2", "1.5"),
        ("٣", "3"),
        ("--5", "5"),
        ("-$-5", "5"),
    ],
)
def test_where_there_is_doubt_there_is_no_verdict(answer: str, response: str) -> None:
    assert compare_plainly(answer, response) is None


numbers = st.fractions(max_denominator=10**6)


def written(value: Fraction, style: str) -> str:
    if style == "tex":
        return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
    if style == "grouped":
        return f"{value.numerator:,}/{value.denominator:,}"
    return f"${value.numerator}/{value.denominator}$"


@given(numbers, numbers, st.sampled_from(["tex", "grouped", "plain"]), st.sampled_from(["tex", "grouped", "plain"]))
def test_exact_numbers_are_equal_if_and_only_if_their_values_are(
    a: Fraction, b: Fraction, style: str, other_style: str
) -> None:
    assert compare_plainly(written(a, style), written(b, other_style)) is (a == b)
    assert compare_plainly(written(a, style), written(a, other_style)) is True


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**9), max_value=10**9))
def test_decimals_are_read_exactly(value: Any) -> None:
    number = plain_number(f"{value:,f}")
    assert number is not None
    assert number.value == Fraction(value)
    assert number.is_exact is False


@given(st.text(alphabet="0123456789.,/%$\\{}[]()+-−frac textboxed!;~", max_size=60), st.text(max_size=20))
def test_any_text_has_a_verdict_that_does_not_depend_on_the_order(a: str, b: str) -> None:
    assert compare_plainly(a, b) == compare_plainly(b, a)


def test_what_is_around_an_answer_is_taken_off() -> None:
    assert normalised(" $\\boxed{ \\text{ \\left( a,\\; b \\right) } }$ ") == "( a, b )"


@pytest.mark.parametrize(
    "text",
    [
        "9" * 100_000,
        "1," * 50_000,
        " " * 100_000 + "x",
        "\\frac{" * 20_000,
        "{" * 50_000 + "}" * 50_000,
        "{" * 900 + "1" + "}" * 900,
        "$" * 100_000,
        "1" + "e9" * 1000,
        "9" * 190 + "." + "9" * 190,
        "\\," * 900,
        "(" * 1999,
    ],
    ids=range(11),
)
def test_no_text_takes_long(text: str) -> None:
    began = time.perf_counter()
    compare_plainly(text, "1")
    compare_plainly(text, text + " ")
    assert time.perf_counter() - began < 0.5
