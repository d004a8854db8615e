"""Two answers in mathematics → equal, different, or not to be told without algebra.

Arithmetic only, in time linear in the text. It says *equal* or *different* only where there is no doubt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 2000
MAX_NUMBER_CHARS = 200
MAX_WRAPPERS = 8
ROUNDING = Fraction(1, 10**5)
"""Numbers with a decimal point that are nearer than this may be roundings of one another."""
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
_COMMANDS = ("\\boxed{", "\\text{", "\\textbf{", "\\mathrm{", "\\mathbf{", "\\displaystyle{", "{")


@dataclass(frozen=True, slots=True)
class Number:
    """A number as written: its value, and whether it could be the rounding of another one."""

    value: Fraction
    is_exact: bool
    is_percent: bool


def compare_plainly(answer: str, response: str) -> bool | None:
    r"""True if they are surely equal, False if they are plain numbers that surely differ, None if algebra must tell.

    >>> compare_plainly("1,234", r"\$1234.00"), compare_plainly("1/3", "0.5"), compare_plainly("x+1", "1+x")
    (True, False, None)
    """
    left, right = normalised(answer), normalised(response)
    if left == right:
        return True if left else None
    a, b = plain_number(left), plain_number(right)
    if a is None or b is None or a.is_percent != b.is_percent:
        return None
    if a.value == b.value:
        return True
    if a.is_exact and b.is_exact:
        return False
    gap = abs(a.value - b.value)
    return False if gap > max(ROUNDING, RELATIVE_ROUNDING * abs(a.value)) else None


def normalised(text: str) -> str:
    r"""The text without dollar signs around it, boxes, spacing commands and sizes: nothing that changes what it says.

    >>> normalised(r" $\boxed{\dfrac{1}{2}}$ ")
    '\\frac{1}{2}'
    """
    text = text.strip()
    if len(text) > MAX_CHARS:
        return text
    text = _DIGIT_GROUP.sub(",", text)
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
    """Does the brace opened just before ``start`` close with the last character?"""
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
    found = _PLAIN.fullmatch(text.replace("−", "-"))
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
