"""Two mathematical answers → are they equal, by math-verify. Only worker processes import this: it costs sympy."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Basic, Eq, Expr, Float, I, Rational

from verifiers.rubrics.bounded import Bounded, ChildEndedError, ExhaustedError

for name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(name).setLevel(logging.CRITICAL)

LABEL_S = 5.0
"""The right answer is the data set's, and may take longer to read than what a model wrote."""
SHARE = 0.75
"""Of its limit, what a comparison may compute: the rest is for a new child where it does not come to an end."""
BUSY, MORE = 1.2, 2.0
"""How many times its limit a comparison must have taken on the clock to be asked again, and how many times its limit
it then has."""
PLACES = 20
ROUGHLY = 1e-2
"""How far apart the sides of an equation between decimals may lie: ``22/7 = 3.14`` is meant well, ``4 = 5`` is not."""
_NUMERIC_ONLY = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)
# Units are taken off before (see math_units): what math-verify holds for one, "t" and "o" and "km", says too little.
_EXTRACTION = (
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
        )
    ),
    ExprExtractionConfig(),
)


def compare_answers(answers: list[str], responses: list[str], limit_s: float) -> bool | None:
    """Is any reading of the response equal to one of the answer's? None where the answer itself cannot be read.

    A response that takes longer than ``limit_s`` of processor time, or twice as long as the answer took to be read,
    is not equal. Where the machine was busy with other things it is asked again with more: caches that others have
    emptied make the same work take longer.
    """
    began = time.monotonic()
    try:
        return _asked(answers, responses, limit_s)
    except ExhaustedError as error:
        if not error.steps:
            return None
    waited = (time.monotonic() - began) / limit_s
    try:
        return waited > BUSY and _asked(answers, responses, limit_s * MORE)
    except ExhaustedError:
        return False


def _asked(answers: list[str], responses: list[str], limit_s: float) -> bool | None:
    try:
        *_, verdict = _compare(answers, responses, limit_s)
    except ChildEndedError:  # something else ended it: nothing was found out
        *_, verdict = _compare(answers, responses, limit_s)
    return None if verdict is None else bool(verdict)


def compare_steps(answers: list[str], responses: list[str], limit_s: float) -> Iterator[Any]:
    """Read the answer, then compare the response with it: see `bounded.Bounded` for what is yielded."""
    yield LABEL_S
    golds, took_s = _label(tuple(answers))
    if not golds:
        yield {"step": None}
        return
    yield {"step": "read"}
    yield max(SHARE * limit_s, 2 * took_s)
    targets = [read(text) for text in responses]
    yield {"step": any(are_equal(gold, target) for gold in golds for target in targets)}


@functools.lru_cache(maxsize=1024)
def _label(answers: tuple[str, ...]) -> tuple[list[list[Any]], float]:
    """The readings of an answer, and the processor time it took: that of a whole group of rollouts, once."""
    began = time.process_time()
    golds = [gold for text in answers if (gold := read(text))]
    return golds, time.process_time() - began


def read(text: str) -> list[Any]:
    """What math-verify reads in an answer: a sympy object and its text; nothing where it reads none."""
    found = parse(f"\\boxed{{{text}}}", extraction_config=_EXTRACTION, parsing_timeout=None)
    return [_with_imaginary_unit(item) if isinstance(item, Basic) else item for item in found]


def _with_imaginary_unit(item: Basic) -> Basic:
    units = {symbol: I for symbol in item.free_symbols if symbol.name == "i"}
    return item.subs(units) if units else item


def are_equal(gold: list[Any], target: list[Any]) -> bool:
    """Do two readings agree? Without math-verify's own limits: they are signals, and the child has a better one."""
    left, right = gold[0], target[0] if target else None
    if isinstance(right, Basic):
        if any(_is_false(equation) for equation in _equations(right)):
            return False
        right = _turned(right)
        target = [right, *target[1:]]
    if _are_same_numbers(left, right) or _are_same_equations(left, right):
        return True
    return bool(verify(gold, target, allow_set_relation_comp=True, timeout_seconds=None))


def _equations(item: Basic) -> list[Eq]:
    """The equations that an answer states, one beside the other or in a chain."""
    if isinstance(item, Eq):
        return [item]
    return [inner for inner in item.args if isinstance(inner, Eq)]


def _is_false(equation: Eq) -> bool:
    """Does an equation between numbers say what is not so?"""
    sides = (equation.lhs, equation.rhs)
    if not all(isinstance(side, Expr) and side.is_number for side in sides):
        return False
    gap, size = (abs(complex(value.evalf(PLACES))) for value in (sides[0] - sides[1], sides[1]))
    tolerance = ROUGHLY if any(side.has(Float) for side in sides) else 10.0 ** (4 - PLACES)
    return bool(gap > tolerance * max(size, 10.0 ** (4 - PLACES)))


def _turned(item: Basic) -> Basic:
    """``5 = x`` as ``x = 5``."""
    if isinstance(item, Eq) and not item.lhs.free_symbols and item.rhs.is_Symbol:
        return Eq(item.rhs, item.lhs, evaluate=False)
    return item


def _are_same_numbers(a: Any, b: Any) -> bool:
    """Do two expressions have the same value, to twenty places, wherever their variables were put?

    Far quicker than simplifying their difference; what it does not see is left to that.
    """
    if not isinstance(a, Expr) or not isinstance(b, Expr) or a.free_symbols != b.free_symbols:
        return False
    if a.has(*_NUMERIC_ONLY) or b.has(*_NUMERIC_ONLY) or (a.is_Atom and b.is_Atom):
        return False
    values = _values(a, b, (1, -2, -1))
    return bool(values) and all(abs(x - y) <= Float(10) ** -PLACES * max(1, abs(x)) for x, y in values)


def _are_same_equations(a: Any, b: Any) -> bool:
    """Are the sides of two equations in several variables apart in the same ratio everywhere?"""
    if not isinstance(a, Eq) or not isinstance(b, Eq) or len(a.free_symbols) < 2 or a.free_symbols != b.free_symbols:
        return False
    if not all(isinstance(side, Expr) and not side.has(*_NUMERIC_ONLY) for side in (*a.args, *b.args)):
        return False
    values = _values(a.lhs - a.rhs, b.lhs - b.rhs, (1, -2, -1, 3, 6))
    if not values or not all(values[0]):
        return False
    left, right = values[0]
    near = Float(10) ** -PLACES * (abs(left * right) + 1)
    return all(abs(left * y - right * x) <= near for x, y in values)


def _values(a: Expr, b: Expr, seeds: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """The values of two expressions in the same variables, at one point for each seed; none if one has none."""
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    values = []
    for seed in seeds if symbols else seeds[:1]:
        point = {symbol: Rational(7 * seed + 3 * k * k + 5, 2 * k + 12) for k, symbol in enumerate(symbols)}
        pair = [item.subs(point).evalf(PLACES + 10) for item in (a, b)]
        if not all(value.is_number and value.is_finite for value in pair):
            return []
        values.append((pair[0], pair[1]))
    return values


_compare = Bounded(compare_steps)

_WARM_UP = r"""
\frac{1}{2} ~ x
x^2 + 2x + 1 ~ (x+1)^2
\frac{\sqrt{2}}{2} ~ \frac{1}{\sqrt[3]{2} - 1}
i^2 ~ 3 + 4i
[0,1) ~ 0 \le x < 1
x \in (1, 2] ~ x > 5
(-\infty, 2) \cup (2, \infty) ~ x \neq 2
(1, 2, 3) ~ \left( \frac{1}{2}, 0.5 \right)
\{1, 2\} ~ x = 1, 2
y = 2x + 1 ~ 2y = 4x + 2
f(2) = 5 ~ a_{1} = x_1
\sin^2 x + \cos 2x ~ \tan\frac{\pi}{4}
\ln 2 + \log_2 8 ~ \arctan(1)
e^{x} \cdot e^{-y} ~ 2^{x+1}
\sum_{k=1}^n k^2 ~ \frac{n(n+1)}{6}
\int_0^1 x^2 dx ~ \frac13
\binom{2n}{n} ~ \frac{(2n)!}{n!}
\begin{pmatrix} 1 & 2 \\ 3 & x \end{pmatrix} ~ \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}
|x - 1| ~ \lfloor 3.7 \rfloor
\pm 3 ~ 1\frac{1}{2}
1.5 \times 10^3 ~ 75\%
\text{yes} ~ (A)
90^\circ ~ x^{-1}
\alpha + \beta ~ 2 \pi r
a, b \text{ and } c ~ \infty
"""


def warm_up() -> None:
    """Build the grammar's tables and import what sympy imports late, so that no answer is charged for it."""
    for pair in _WARM_UP.split("\n")[1:-1]:
        answer, response = pair.split(" ~ ")
        are_equal(read(answer), read(response))


warm_up()
