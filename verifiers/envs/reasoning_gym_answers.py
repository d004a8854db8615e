"""An answer to a puzzle of Reasoning Gym → whether its scorer may see it.

Some scorers evaluate the answer as Python, in the process that computes the score. Code in an answer could choose its
own score, so such a scorer gets formulas, lists and plain texts only. Others accept certain wrong answers as right.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from types import CodeType, ModuleType
from typing import Any

# Names in formulas, besides single letters. `Integral`, `expand` and the like would do the work of the puzzle.
FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "asec", "acsc", "acot", "sinh", "cosh", "tanh"}
    | {"asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "cbrt", "Abs", "erf", "erfi", "Si", "Ci", "Ei", "li"}
    | {"fresnels", "fresnelc", "gamma", "uppergamma", "polylog", "pi"}
)
COIN_FLIP_TOLERANCE = 1e-4

_NUMBERS = re.compile(r"[\d\s+\-*/^!%.,()]*", re.ASCII)
_NUMBER_LIST = re.compile(r"""\s*\[[\d\s+\-.,\[\]'"]*\]\s*""", re.ASCII)
_NAME = re.compile(r"[^\W\d]\w*")
_NOT_IN_FORMULAS = re.compile(r"[^\w\s+\-*/^!%.,()]|\.\s*[^\W\d]")


def may_be_scored(name: str, answer: str, right: str) -> bool:
    """Whether the scorer of the data set ``name`` may see this answer; otherwise it is wrong."""
    if name == "complex_arithmetic" and "nan" in answer.lower():  # its scorer gives a full score for it
        return False
    if name == "coin_flip":  # its scorer gives a full score to the first digits of the right number, even to "0"
        return _are_near(answer, right)
    if name == "puzzle24" and _integers(answer) != _integers(right):  # its scorer accepts any four small numbers
        return False
    return not evaluates_answers(name) or is_formula_or_text(answer, right)


def is_formula_or_text(answer: str, right: str) -> bool:
    """Whether an answer cannot run code if it is evaluated, and has no names if the right answer has none.

    >>> is_formula_or_text("(3 + 4) * 5", right="5*3 + 20"), is_formula_or_text("x/x + x/x", right="5*3 + 20")
    (True, False)
    >>> is_formula_or_text("sin(x)/2 + C", right="x + C"), is_formula_or_text("Integral(x, x)", right="x**2/2 + C")
    (True, False)
    >>> is_formula_or_text("_ Q\\nQ _", right="Q _\\n_ Q"), is_formula_or_text("exec('1')", right="Q _\\n_ Q")
    (True, False)
    """
    if not _NAME.search(right):
        return bool(_NUMBERS.fullmatch(answer) or _NUMBER_LIST.fullmatch(answer))
    if "(" not in answer:  # nothing is called
        return True
    known = FUNCTIONS.union(_NAME.findall(right))
    return not _NOT_IN_FORMULAS.search(answer) and all(len(n) == 1 or n in known for n in _NAME.findall(answer))


def _are_near(answer: str, right: str) -> bool:
    try:
        return abs(float(Fraction(answer.replace(",", ""))) - float(Fraction(right))) <= COIN_FLIP_TOLERANCE
    except (ValueError, ZeroDivisionError, OverflowError):
        return False


def _integers(text: str) -> list[str]:
    return sorted(re.findall(r"\d+", text))


@functools.cache
def evaluates_answers(name: str) -> bool:
    """Whether the scorer of a data set, or what it calls in Reasoning Gym, uses ``eval``, ``exec`` or sympy.

    >>> evaluates_answers("countdown"), evaluates_answers("gcd")
    (True, False)
    """
    from reasoning_gym.factory import DATASETS

    kind = DATASETS[name][0]
    waiting, seen = [kind.score_answer], set()
    while waiting:
        function = waiting.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        for value in _used_by(function, kind):
            package = (value.__name__ if isinstance(value, ModuleType) else _module_of(value)).partition(".")[0]
            if value is eval or value is exec or package == "sympy":
                return True
            if package == "reasoning_gym":
                waiting += filter(inspect.isfunction, vars(value).values() if inspect.isclass(value) else [value])
    return False


def _used_by(function: Callable[..., Any], kind: type) -> Iterator[Any]:
    """The objects that a function names: its globals, builtins and methods of its class."""
    for name in _names_in(function.__code__):
        for namespace in (function.__globals__, vars(builtins)):
            if name in namespace:
                yield namespace[name]
                break
        yield getattr(kind, name, None)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _module_of(value: Any) -> str:
    return getattr(value, "__module__", None) or ""
