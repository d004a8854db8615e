"""Two mathematical answers → whether they are equal, by math-verify. Only worker processes import it (with sympy)."""

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
"""CPU time to parse the right answer. It comes from the data set, so it may take longer than a model's answer."""
SHARE = 0.75
"""The share of its limit that a comparison may use for computing; the rest is for forking a new child if it fails."""
BUSY, MORE = 1.2, 2.0
"""A comparison that ran out of CPU time is repeated if it took at least `BUSY` times its limit of wall-clock time, with
`MORE` times the limit."""
PLACES = 20
ROUGHLY = 1e-2
"""The tolerance for equations between decimals: ``22/7 = 3.14`` counts as true, ``4 = 5`` does not."""
_KINKED = (sympy.Abs, sympy.Max, sympy.Min, sympy.floor, sympy.ceiling, sympy.sign)
LARGEST_KINK = 10**6
_NUMERIC_ONLY = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)
# Units are removed before (see math_units): math-verify does not handle them reliably ("t", "o", "km").
_EXTRACTION = (
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
        )
    ),
    ExprExtractionConfig(),
)


def compare_answers(answers: list[str], responses: list[str], limit_s: float) -> bool | None:
    """Whether any reading of the response equals one of the answer. None if the answer itself cannot be parsed.

    A response is not equal if it takes more CPU time than ``limit_s`` and than twice the time to parse the answer. If
    the machine was busy, the comparison is repeated with a larger limit, because the same work takes more CPU time
    when other processes evict the caches.
    """
    began = time.monotonic()
    try:
        return _compare_in_child(answers, responses, limit_s)
    except ExhaustedError as error:
        if not error.steps:
            return None
    waited = (time.monotonic() - began) / limit_s
    try:
        return waited > BUSY and _compare_in_child(answers, responses, limit_s * MORE)
    except ExhaustedError:
        return False


def _compare_in_child(answers: list[str], responses: list[str], limit_s: float) -> bool | None:
    try:
        *_, verdict = _compare(answers, responses, limit_s)
    except ChildEndedError:  # killed from outside, so try once more
        *_, verdict = _compare(answers, responses, limit_s)
    return None if verdict is None else bool(verdict)


def compare_steps(answers: list[str], responses: list[str], limit_s: float) -> Iterator[Any]:
    """Parse the answer, then compare the response with it. For what it yields, see `bounded.Bounded`."""
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
    """The readings of an answer and the CPU time they took; cached, because a group has the same answer."""
    began = time.process_time()
    golds = [gold for text in answers if (gold := read(text))]
    return golds, time.process_time() - began


def read(text: str) -> list[Any]:
    """The result of math-verify's parser: a sympy object and its text, or [] if it cannot parse the answer."""
    found = parse(f"\\boxed{{{text}}}", extraction_config=_EXTRACTION, parsing_timeout=None)
    return [_with_imaginary_unit(item) if isinstance(item, Basic) else item for item in found]


def _with_imaginary_unit(item: Basic) -> Basic:
    units = {symbol: I for symbol in item.free_symbols if symbol.name == "i"}
    return item.subs(units) if units else item


def are_equal(gold: list[Any], target: list[Any]) -> bool:
    """Whether two readings are equal. math-verify's own timeouts are off, because the child has a CPU time limit."""
    left, right = gold[0], target[0] if target else None
    if isinstance(right, Basic):
        if any(_is_false(equation) for equation in _equations(right)):
            return False
        right = _variable_first(right)
        target = [right, *target[1:]]
    if _are_same_numbers(left, right) or _are_same_equations(left, right):
        return True
    return bool(verify(gold, target, allow_set_relation_comp=True, timeout_seconds=None))


def _equations(item: Basic) -> list[Eq]:
    """The equations in an answer, listed or in a chain."""
    if isinstance(item, Eq):
        return [item]
    return [inner for inner in item.args if isinstance(inner, Eq)]


def _is_false(equation: Eq) -> bool:
    """Whether this is an equation between numbers that is false."""
    sides = (equation.lhs, equation.rhs)
    if not all(isinstance(side, Expr) and side.is_number for side in sides):
        return False
    gap, size = (abs(complex(value.evalf(PLACES))) for value in (sides[0] - sides[1], sides[1]))
    tolerance = ROUGHLY if any(side.has(Float) for side in sides) else 10.0 ** (4 - PLACES)
    return bool(gap > tolerance * max(size, 10.0 ** (4 - PLACES)))


def _variable_first(item: Basic) -> Basic:
    """``5 = x`` as ``x = 5``."""
    if isinstance(item, Eq) and not item.lhs.free_symbols and item.rhs.is_Symbol:
        return Eq(item.rhs, item.lhs, evaluate=False)
    return item


def _are_same_numbers(a: Any, b: Any) -> bool:
    """Whether two expressions have the same value, to twenty places, at several points.

    This is far faster than simplifying their difference. Whatever it does not decide is left to math-verify.
    """
    if not isinstance(a, Expr) or not isinstance(b, Expr) or a.free_symbols != b.free_symbols:
        return False
    if a.has(*_NUMERIC_ONLY) or b.has(*_NUMERIC_ONLY) or (a.is_Atom and b.is_Atom):
        return False
    values = _values(a, b, (1, -2, -1, *_beyond_kinks(a, b)))
    return bool(values) and all(abs(x - y) <= Float(10) ** -PLACES * max(1, abs(x)) for x, y in values)


def _beyond_kinks(a: Expr, b: Expr) -> tuple[int, ...]:
    """Seeds of points on both sides of every kink; near zero, ``|x + 1|`` equals ``x + 1``."""
    roots = (power for item in (a, b) for power in item.atoms(sympy.Pow))
    has_root = any(power.base.free_symbols and not power.exp.is_Integer for power in roots)
    if not (has_root or a.has(*_KINKED) or b.has(*_KINKED)):
        return ()
    numbers = (abs(int(number)) for item in (a, b) for number in item.atoms(Rational, Float) if number.is_finite)
    far = 4 * (1 + min(max(numbers, default=0), LARGEST_KINK))
    return far, -far


def _are_same_equations(a: Any, b: Any) -> bool:
    """Whether two equations in several variables are multiples of each other, tested at several points."""
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
    """The values of two expressions at one point per seed; [] if one has no finite value at a point."""
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
    """Build the parser's tables and trigger sympy's late imports, so that they do not count against a time limit."""
    for pair in _WARM_UP.split("\n")[1:-1]:
        answer, response = pair.split(" ~ ")
        are_equal(read(answer), read(response))


warm_up()
