"""An answer such as ``5~\\mathrm{m/s}`` → its value and its unit of measure, with different spellings unified.

It works on names only, in linear time, and converts nothing: 1 km does not equal 1000 m here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

MAX_UNIT_CHARS = 80
MAX_EXPONENT = 9

Unit = tuple[tuple[str, int], ...]
"""Base units and their exponents, sorted: ``(("m", 1), ("s", -1))``."""


class Quantity(NamedTuple):
    """A value as text, and its unit; None if it has none, or only words that are not units (``5 apples``)."""

    value: str
    unit: Unit | None


@dataclass(frozen=True, slots=True)
class _Reading:
    unit: Unit | None
    has_bare_letter: bool


_PREFIXES = {"k": "kilo", "c": "centi", "d": "deci", "m": "milli", "M": "mega", "G": "giga", "μ": "micro", "n": "nano"}
_METRIC = {  # symbol → words; both take the prefixes above
    "m": "meter metre",
    "g": "gram gramme",
    "s": "second",
    "L": "liter litre",
    "A": "ampere amp",
    "V": "volt",
    "W": "watt",
    "J": "joule",
    "N": "newton",
    "Hz": "hertz",
    "Pa": "pascal",
    "K": "kelvin",
    "mol": "mole",
    "B": "byte",
    "eV": "electronvolt",
    "cal": "calorie",
    "Wh": "watthour",
    "Ω": "ohm",
    "T": "tesla",
    "F": "farad",
}
_OTHERS = {
    "min": "minute mins",
    "h": "hour hr hrs",
    "day": "",
    "week": "wk",
    "month": "",
    "year": "yr yrs",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "lb": "pound lbs",
    "oz": "ounce",
    "ton": "tonne",
    "gal": "gallon",
    "qt": "quart",
    "pt": "pint",
    "cup": "",
    "acre": "",
    "ha": "hectare",
    "$": "dollar buck usd",
    "¢": "cent",
    "€": "euro eur",
    "£": "gbp",
    "¥": "yen jpy",
    "₹": "rupee rs inr",
    "deg": "degree °",
    "rad": "radian",
    "°C": "celsius",
    "°F": "fahrenheit",
    "dB": "decibel",
    "bit": "",
    "am": "",
    "pm": "",
}
_COMPOUND: dict[str, Unit] = {
    "mph": (("h", -1), ("mi", 1)),
    "kph": (("h", -1), ("km", 1)),
    "kmh": (("h", -1), ("km", 1)),
    "kmph": (("h", -1), ("km", 1)),
    "mpg": (("gal", -1), ("mi", 1)),
    "cc": (("cm", 3),),
}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_BARE_LETTERS = frozenset("mgshlL")
"""Without ``\\text`` or ``\\mathrm`` only these letters are units; any other is a variable."""
_MATHS = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "lim", "max", "min", "mod", "gcd", "lcm", "sqrt", "frac"}
    | {"inf", "infinity", "and", "for", "not", "det", "dim", "arg", "alpha", "beta", "gamma", "delta", "epsilon"}
    | {"theta", "lambda", "sigma", "omega", "phi", "psi", "rho", "tau", "eta", "zeta"}
)
_NUMERALS = frozenset(
    {"percent", "percentage", "pct", "dozen", "hundred", "thousand", "million", "billion", "trillion", "factorial"}
    | {"half", "halves", "third", "thirds", "quarter", "quarters", "tenth", "tenths", "hundredths", "times", "plus"}
    | {"minus", "over", "choose", "modulo", "divided", "percents", "thousands", "millions", "billions", "hundreds"}
)
"""Words that change the value: without them, 5 million would equal 5."""


def _known() -> tuple[dict[str, str], dict[str, str]]:
    """Case-sensitive symbols and case-insensitive words, each with its unit."""
    symbols = {"l": "L", "ml": "mL", "cl": "cL", "dl": "dL", "µm": "μm", "µg": "μg", "µs": "μs", "hr": "h", "Ohm": "Ω"}
    words: dict[str, str] = {}
    for symbol, names in _METRIC.items():
        for short, long in [("", ""), *_PREFIXES.items()]:
            symbols[short + symbol] = short + symbol
            for name in names.split():
                words[long + name] = words[f"{long}{name}s"] = short + symbol
    for symbol, names in _OTHERS.items():
        symbols[symbol] = symbol
        for name in [*([symbol] if symbol.isalpha() else []), *names.split()]:
            words[name] = words[f"{name}s"] = symbol
    return symbols, words


_SYMBOLS, _WORDS = _known()

_TEXT = r"\\(?:text|mathrm|textrm|textbf|textit|mathbf|mathit|mbox|rm|operatorname)\s?\{[^{}]*\}"
_DEGREE = r"\^\s?(?:\{\s?\\circ\s?\}|\\circ)|\\degree|°"
_IN_TEXT = re.compile(r"\\(?:text|mathrm|textrm|textbf|textit|mathbf|mathit|mbox|rm|operatorname)\s?\{([^{}]*)\}")
_AS_DEGREE = re.compile(_DEGREE)
_LETTERS = re.compile(r"[^\W\d_]+")
_ORDINAL = re.compile(r"\^?\{?(?:\\(?:text|mathrm)\{)?(?:st|nd|rd|th)\}?\}?")
_START = re.compile(_TEXT)
_TOKEN = re.compile(r"\s*(?:(per\b|/|\\cdot|\*|·)|(\^|\*\*)\s?\{?\s?(-?\d)\s?\}?|([^\W\d_]+|[$€£¥₹¢°][CF]?)\.?)")
_NUMBER = re.compile(r"[+-]?\s?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:\s?/\s?\d+)?", re.ASCII)
_CURRENCY = re.compile(r"([+-]?)\s?(\\?\$|\\?[€£¥₹])\s?(?=[-+.\d])", re.ASCII)
_LAST_WORD = re.compile(
    r"(?<=[\d})\s])\s?((?:(?:square|sq|cubic|cu) )?[A-Za-z]+(?:\s?/\s?[A-Za-z]+)?(?:\s?\^\s?\{?\d\}?)?)\.?$", re.ASCII
)
_COMMAND = re.compile(r"\\(?:frac|sqrt|pi|times|cdot)(?![A-Za-z])")


def split_unit(text: str) -> Quantity:
    r"""The value and the unit of an answer without its spacing commands (see `plain_answers.normalised`).

    >>> split_unit(r"5 \mathrm{m/s}"), split_unit("5 dollars")
    (Quantity(value='5', unit=(('m', 1), ('s', -1))), Quantity(value='5', unit=(('$', 1),)))
    >>> split_unit("12 red apples"), split_unit("5x")
    (Quantity(value='12', unit=None), Quantity(value='5x', unit=None))
    """
    money = _CURRENCY.match(text)
    if money is None:
        return _split_after_value(text)
    rest = _split_after_value(money[1] + text[money.end() :])
    exponents = {money[2].removeprefix("\\"): 1, **dict(rest.unit or ())}
    return Quantity(rest.value, tuple(sorted(exponents.items())))


def _split_after_value(text: str) -> Quantity:
    number = _NUMBER.match(text)
    if number is not None:
        rest_text = text[number.end() :]
        if _ORDINAL.fullmatch(rest_text):
            return Quantity(number[0].strip(), None)
        found = _read(rest_text)
        if found is not None and rest_text.strip() and (found.unit or rest_text[0] in " \\"):
            return Quantity(number[0].strip(), found.unit)
    name, equals, value = text.rpartition("=")
    if equals and name.strip() and name[-1] not in "\\<>!:":
        inner = _split_after_value(value.strip())
        return Quantity(f"{name}= {inner.value}" if inner.value != value.strip() else text, inner.unit)
    return _split_after_expression(text)


def _split_after_expression(text: str) -> Quantity:
    """The unit after a value that is not a plain number: in ``\\text{…}``, or a known word of two or more letters."""
    start = max(0, len(text) - MAX_UNIT_CHARS)
    for opening in _START.finditer(text, start):
        value = text[: opening.start()].rstrip()
        found = _read(text[opening.start() :])
        if value and found is not None and value[-1] not in "=+-*/^_({[,<>&\\":
            return Quantity(value, found.unit)
    last = _LAST_WORD.search(text, start)
    found = None if last is None else _read(last[1])
    if last is None or found is None or not found.unit:
        return Quantity(text, None)
    value = text[: last.start()].rstrip()
    has_variables = any(letter.isalpha() for letter in _COMMAND.sub("", value))
    return Quantity(text, None) if found.has_bare_letter and has_variables else Quantity(value, found.unit)


def _read(text: str) -> _Reading | None:
    """The unit in a text after a value, or a reading without one if it has only other words; None if it is neither."""
    if len(text) > MAX_UNIT_CHARS or not all(map(_may_stand_alone, _LETTERS.findall(_IN_TEXT.sub(" ", text)))):
        return None
    plain = _AS_DEGREE.sub(" °", _IN_TEXT.sub(r" \1 ", text)).replace("° C", "°C").replace("° F", "°F").rstrip(" .")
    if not _NUMERALS.isdisjoint(word.lower() for word in _LETTERS.findall(plain)):
        return None
    exponents: dict[str, int] = {}
    at, sign, power, last = 0, 1, 1, ""
    is_known, has_bare_letter = True, False
    while at < len(plain):
        token = _TOKEN.match(plain, at)
        if token is None:
            return None
        at = token.end()
        operator, caret, digit, word = token.groups()
        if operator:
            sign = -1 if operator in ("per", "/") else 1
        elif caret:
            if not last:
                return None
            exponents[last] *= int(digit)
        elif (lowered := word.lower()) in _POWERS:
            if lowered in ("squared", "cubed") and last:
                exponents[last] *= _POWERS[lowered]
            else:
                power = _POWERS[lowered]
        else:
            units = _unit_of(word)
            is_known = is_known and units is not None
            has_bare_letter = has_bare_letter or len(word) == 1
            for last, exponent in units or ():
                exponents[last] = exponents.get(last, 0) + sign * power * exponent
            power = 1
    if power != 1:  # "5 squared" is not a quantity
        return None
    unit = tuple(sorted((name, n) for name, n in exponents.items() if n and abs(n) <= MAX_EXPONENT))
    return _Reading(unit if is_known and unit else None, has_bare_letter)


def _may_stand_alone(word: str) -> bool:
    """Whether a word outside of ``\\text{…}`` may be a unit or a counted thing, not a variable or a function."""
    if len(word) == 1:
        return word in _BARE_LETTERS
    lowered = word.lower()
    if _unit_of(word) or lowered in _POWERS or lowered in ("per", "cdot", "circ", "degree"):
        return True
    return len(word) > 2 and lowered not in _MATHS


def _unit_of(word: str) -> Unit | None:
    known = _SYMBOLS.get(word) or _WORDS.get(word.lower())
    return ((known, 1),) if known else _COMPOUND.get(word.lower())
