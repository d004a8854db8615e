"""An arithmetic expression → its value, by its syntax tree; every operation is checked for size first."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

MAX_CHARS = 2_000
MAX_BITS = 4_096  # of an integer: about 1,200 digits
MAX_DEPTH = 60

Number = int | float

_NAMES: dict[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau, "inf": math.inf}
_COMPARISONS: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** (or ^), parentheses, comparisons, pi, e, and functions such as sqrt, sin,
            log, exp, abs, round, min, max, factorial, gcd, comb.

    Returns:
        The value as text, or "Error: ..." with the reason.

    Examples:
        calculator("2 + 2") -> "4"
        calculator("sqrt(16)") -> "4.0"
    """
    try:
        return str(evaluate(expression))
    except (ValueError, ArithmeticError, TypeError) as error:
        return f"Error: {error}"


def evaluate(expression: str) -> Number:
    """The value of an expression; raises ValueError if it is invalid or too large to compute.

    >>> evaluate("2 * (3 + 4)"), evaluate("2^10"), evaluate("sqrt(16)")
    (14, 1024, 4.0)
    >>> evaluate("9**9**9")
    Traceback (most recent call last):
    ValueError: 9 ** 387420489 is too large: whole numbers may have up to 1,233 digits
    """
    if not isinstance(expression, str):
        raise TypeError(f"an expression must be a text, not {expression!r:.60}")
    text = expression.strip()
    if len(text) > MAX_CHARS:
        raise ValueError(f"the expression has {len(text):,} characters; at most {MAX_CHARS:,} are allowed")
    try:
        tree = ast.parse(text.replace("^", "**"), mode="eval")  # Python's ^ is XOR, with a low precedence
    except (
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ):  # the last two: Python's parser, for deep nesting
        raise ValueError(f"{_short(text)!r} is not an arithmetic expression") from None
    return _value(tree.body, 0)


def _value(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise ValueError(f"the expression is nested more than {MAX_DEPTH} deep")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        return _sized(node.value)
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.UnaryOp):
        return _unary(node, depth)
    if isinstance(node, ast.BinOp):
        return _binary(node, depth)
    if isinstance(node, ast.Compare):
        return _compare(node, depth)
    if isinstance(node, ast.Call):
        return _call(node, depth)
    if isinstance(node, ast.Name):
        raise ValueError(f"the name {_short(node.id)!r} is unknown; the names are {', '.join(_NAMES)}")
    raise ValueError(f"the expression contains a {type(node).__name__}, which is not arithmetic")


def _unary(node: ast.UnaryOp, depth: int) -> Number:
    value = _value(node.operand, depth + 1)
    if isinstance(node.op, ast.USub):
        return -value
    if isinstance(node.op, ast.UAdd):
        return +value
    raise ValueError("the only signs allowed before a number are + and -")


def _binary(node: ast.BinOp, depth: int) -> Number:
    # A loop instead of recursion: a sum of a thousand terms is nested a thousand deep on its left.
    terms: list[tuple[ast.operator, ast.expr]] = []
    left: ast.expr = node
    while isinstance(left, ast.BinOp):
        terms.append((left.op, left.right))
        left = left.left
    value = _value(left, depth + 1)
    for op, right in reversed(terms):
        value = _apply(op, value, _value(right, depth + 1))
    return value


def _apply(op: ast.operator, a: Number, b: Number) -> Number:
    if isinstance(op, ast.Pow):
        return power(a, b)
    if isinstance(op, ast.Mult):
        return _product(a, b)
    plain: dict[type, Callable[[Any, Any], Any]] = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
    }
    if type(op) not in plain:
        raise ValueError(f"the operator {type(op).__name__} is not arithmetic")
    return _sized(plain[type(op)](a, b))


def _compare(node: ast.Compare, depth: int) -> bool:
    left = _value(node.left, depth + 1)
    for op, comparator in zip(node.ops, node.comparators, strict=True):
        if type(op) not in _COMPARISONS:
            raise ValueError(f"the comparison {type(op).__name__} is not arithmetic")
        right = _value(comparator, depth + 1)
        if not _COMPARISONS[type(op)](left, right):
            return False
        left = right
    return True


def _call(node: ast.Call, depth: int) -> Number:
    name = node.func.id if isinstance(node.func, ast.Name) else f"<{type(node.func).__name__}>"
    if name not in FUNCTIONS:
        raise ValueError(f"there is no function {_short(name)!r}; the functions are {', '.join(FUNCTIONS)}")
    if node.keywords or any(isinstance(arg, ast.Starred) for arg in node.args):
        raise ValueError(f"{name} only takes plain numbers as arguments")
    return _sized(FUNCTIONS[name](*[_value(arg, depth + 1) for arg in node.args]))


# --- sizes --------------------------------------------------------------------------------------------------------


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}…"


def _sized(value: Any) -> Number:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise _too_large(f"a number of {value.bit_length():,} bits")
    if not isinstance(value, (int, float)):
        raise ValueError("the result is not a real number")
    return value


def _too_large(what: str) -> ValueError:
    digits = int(MAX_BITS * math.log10(2))
    return ValueError(f"{what} is too large: whole numbers may have up to {digits:,} digits")


def _product(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int) and a.bit_length() + b.bit_length() > MAX_BITS + 1:
        raise _too_large("the product")
    return a * b


def power(a: Number, b: Number) -> Number:
    """``a ** b``; raises ValueError if it would be too large.

    >>> power(2, 100)
    1267650600228229401496703205376
    """
    is_growing = isinstance(a, int) and isinstance(b, int) and b > 0 and abs(a) > 1
    if is_growing and (b > MAX_BITS or b * math.log2(abs(a)) > MAX_BITS):
        raise _too_large(f"{_short(str(a))} ** {_short(str(b))}")
    return _sized(a**b)


def _factorial(n: Number) -> Number:
    if n > 500:
        raise _too_large(f"factorial({_short(str(n))})")
    return math.factorial(_whole(n))


def _ways(function: Callable[[int, int], int], name: str) -> Callable[[Number, Number], int]:
    def count(n: Number, k: Number) -> int:
        whole_n, whole_k = _whole(n), _whole(k)
        steps = min(whole_k, whole_n - whole_k) if name == "comb" else whole_k
        if whole_n.bit_length() * max(steps, 0) > 4 * MAX_BITS:
            raise _too_large(f"{name}({_short(str(n))}, {_short(str(k))})")
        return function(whole_n, whole_k)

    return count


def _lcm(*numbers: Number) -> Number:
    whole = [_whole(n) for n in numbers]
    if sum(n.bit_length() for n in whole) > 4 * MAX_BITS:
        raise _too_large("the least common multiple")
    return math.lcm(*whole)


def _whole(n: Number) -> int:
    if isinstance(n, float) and not n.is_integer():
        raise ValueError(f"{n} is not a whole number")
    return int(n)


def _round(x: Number, digits: Number = 0) -> Number:
    if not -400 <= digits <= 400:
        raise ValueError(f"round takes between -400 and 400 digits, not {_short(str(digits))}")
    return round(x, _whole(digits)) if digits else round(x)


_PLAIN: tuple[Callable[..., Any], ...] = (
    *(math.sqrt, math.cbrt, math.exp, math.log, math.log2, math.log10, math.hypot),
    *(math.sin, math.cos, math.tan, math.asin, math.acos, math.atan, math.atan2, math.sinh, math.cosh, math.tanh),
    *(math.degrees, math.radians, math.floor, math.ceil, math.trunc, abs, min, max),
)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{function.__name__: function for function in _PLAIN},
    "ln": math.log,
    "round": _round,
    "pow": power,
    "factorial": _factorial,
    "gcd": lambda *numbers: math.gcd(*[_whole(n) for n in numbers]),
    "lcm": _lcm,
    "comb": _ways(math.comb, "comb"),
    "perm": _ways(math.perm, "perm"),
}
