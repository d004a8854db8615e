"""Two mathematical answers → equal, different, or undecided without algebra.

It uses arithmetic only, in linear time, and decides only if there is no doubt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from verifiers.rubrics.math_units import Quantity, split_unit

MAX_CHARS = 2000
MAX_NUMBER_CHARS = 200
MAX_WRAPPERS = 8
ROUNDING = Fraction(1, 10**5)
"""Numbers with a decimal point that differ by less may be roundings of one another."""
RELATIVE_ROUNDING = Fraction(1, 10**9)

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_PLAIN = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:\\?\$\s*(?P<inner_sign>[+-]?))?\s*"
    rf"(?:(?P<number>{_NUMBER})(?:\s*/\s*(?P<over>{_NUMBER})|\s*(?P<percent>\\?%))?"
    rf"|\\frac\s*(?:\{{\s*(?P<top>[+-]?(?:{_NUMBER}))\s*\}}\s*\{{\s*(?P<bottom>{_NUMBER})\s*\}}"
    rf"|(?P<top_digit>\d)(?P<bottom_digit>\d)))\s*",
    re.ASCII,
)
_FRACTION = re.compile(r"\\[dt]frac(?![A-Za-z])")
_SIZED = re.compile(r"\\(?:left|right)(?![A-Za-z])\s?")
_SPACE = re.compile(r"(?:\\[,;:! ]|(?<!\\)~|\s)+")
_DIGIT_GROUP = re.compile(r"(?<=\d)(?:\{,\}|\\[,;: ]|\\!)(?=\d{3}(?!\d))", re.ASCII)
_WRAPPERS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"))
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(?:\d{1,50}(?:\.\d{0,50})?|\.\d{1,50})[eE][+-]?\d{1,2}(?![\w.])", re.ASCII)
_REPEATING = re.compile(r"(?<![\d.])(\d{0,50})\.(\d{0,50})\\(?:overline|bar|dot)\s?(?:\{(\d{1,50})\}|(\d))", re.ASCII)
_EMPTY_SET = re.compile(r"\\varnothing(?![A-Za-z])|\\\{\s?\\\}")
_SIGNS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "∅": "\\emptyset ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "≠": "\\ne ",
        "×": "\\times ",
        "·": "\\cdot ",
        "÷": "/",
        "π": "\\pi ",
        "∞": "\\infty ",
        "∪": "\\cup ",
        "∩": "\\cap ",
        "∈": "\\in ",
        "√": "\\sqrt ",
        "°": "^\\circ ",
        "²": "^2",
        "³": "^3",
        "½": "\\frac{1}{2}",
        "¼": "\\frac{1}{4}",
        "¾": "\\frac{3}{4}",
    }
)
_COMMANDS = ("\\boxed{", "\\text{", "\\textbf{", "\\mathrm{", "\\mathbf{", "\\displaystyle{", "{")


@dataclass(frozen=True, slots=True)
class Number:
    """A number as written: its value, whether it has no decimal point, and whether it is a percentage."""

    value: Fraction
    is_exact: bool
    is_percent: bool


def compare_plainly(answer: str, response: str) -> bool | None:
    r"""True if they are certainly equal, False if they certainly differ, None if algebra must decide.

    If both have a unit, the units must be equal; a unit that only one has is ignored.

    >>> compare_plainly("1,234", r"\$1234.00"), compare_plainly("1/3", "0.5"), compare_plainly("x+1", "1+x")
    (True, False, None)
    >>> compare_plainly("5 km", "5 m"), compare_plainly("5", "5 dollars")
    (False, True)
    """
    a, b = plain_number(answer.strip()), plain_number(response.strip())
    if a is None or b is None:
        left, right = normalised(answer), normalised(response)
        if left == right:
            return True if left else None
        one, other = _quantity(left), _quantity(right)
        if one.unit and other.unit and one.unit != other.unit:
            return False
        a, b = plain_number(one.value), plain_number(other.value)
    return _compare_numbers(a, b)


def _compare_numbers(a: Number | None, b: Number | None) -> bool | None:
    if a is None or b is None or a.is_percent != b.is_percent:
        return None
    if a.value == b.value:
        return True
    if a.is_exact and b.is_exact:
        return False
    gap = abs(a.value - b.value)
    return False if gap > max(ROUNDING, RELATIVE_ROUNDING * abs(a.value)) else None


def readings(text: str) -> list[str]:
    r"""The forms of an answer to compare by algebra: as it is written, and without its unit.

    >>> readings(r"\frac{x}{2} \text{ km}"), readings("1e3 x")
    (['\\frac{x}{2} \\text{ km}', '\\frac{x}{2}'], ['1000 x'])
    """
    written, value = rewritten(text), _quantity(normalised(text)).value
    return [written] if value in (written, normalised(text)) else [written, value]


def _quantity(text: str) -> Quantity:
    return split_unit(text) if len(text) <= MAX_CHARS else Quantity(text, None)


def rewritten(text: str) -> str:
    r"""Replace signs and notations that algebra systems do not know by those that they know.

    >>> rewritten("1.5e3"), rewritten(r"0.1\overline{6}"), rewritten("0 ≤ x < 1")
    ('1500', '\\frac{1}{6}', '0 \\le  x < 1')
    """
    text = _SCIENTIFIC.sub(lambda found: f"{Decimal(found[0]):f}", text.translate(_SIGNS))
    return _EMPTY_SET.sub(r"\\emptyset ", _REPEATING.sub(_as_fraction, text))


def _as_fraction(found: re.Match[str]) -> str:
    """``0.1\\overline{6}`` is (16 - 1) / 90."""
    whole, fixed, repeated = found[1], found[2], found[3] or found[4]
    bottom = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    value = Fraction(int((whole + fixed + repeated) or "0") - int((whole + fixed) or "0"), bottom)
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def normalised(text: str) -> str:
    r"""The text without surrounding dollar signs, boxes, spacing and sizing commands, which do not change its value.

    >>> normalised(r" $\boxed{\dfrac{1}{2}}$ ")
    '\\frac{1}{2}'
    """
    text = text.strip()
    if len(text) > MAX_CHARS:
        return text
    text = _DIGIT_GROUP.sub(",", rewritten(text))
    text = _FRACTION.sub(r"\\frac", _SIZED.sub("", text))
    text = _SPACE.sub(" ", text).strip()
    for _ in range(MAX_WRAPPERS):
        text = _unwrapped(text)
    return text


def _unwrapped(text: str) -> str:
    for opening, closing in _WRAPPERS:
        if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
            inner = text[len(opening) : -len(closing)]
            if "$" not in inner and "\\(" not in inner and "\\[" not in inner:
                return inner.strip()
    for opening in _COMMANDS:
        if text.startswith(opening) and text.endswith("}") and _is_one_group(text, len(opening)):
            return text[len(opening) : -1].strip()
    return text


def _is_one_group(text: str, start: int) -> bool:
    """Whether the last character closes the brace just before ``start``."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position == len(text) - 1
    return False


def plain_number(text: str) -> Number | None:
    r"""An integer, a decimal, a fraction or a percentage, with or without separators and a dollar sign; else None.

    >>> plain_number("-1,234.5").value
    Fraction(-2469, 2)
    >>> plain_number("1e400") is plain_number("1,23") is plain_number("2x") is None
    True
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    found = _PLAIN.fullmatch(text)
    if found is None or (found["sign"] and found["inner_sign"]):
        return None
    top = found["number"] or found["top"] or found["top_digit"]
    bottom = found["over"] or found["bottom"] or found["bottom_digit"] or "1"
    if _exact(bottom) == 0:
        return None
    value = _exact(top) / _exact(bottom) / (100 if found["percent"] else 1)
    is_negative = (found["sign"] or found["inner_sign"]) == "-"
    is_exact = "." not in top and "." not in bottom
    return Number(-value if is_negative else value, is_exact, bool(found["percent"]))


def _exact(number: str) -> Fraction:
    return Fraction(number.replace(",", "").removesuffix("."))
