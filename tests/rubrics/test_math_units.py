"""Units of measure: spellings of one unit are one, variables are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.rubrics.math_units import split_unit

M_PER_S = (("m", 1), ("s", -1))


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("5 m/s", "5", M_PER_S),
        ("5 \\mathrm{m/s}", "5", M_PER_S),
        ("5 \\mathrm{m}/\\mathrm{s}", "5", M_PER_S),
        ("5\\text{ meters per second}", "5", M_PER_S),
        ("5 \\text{m} \\cdot \\text{s}^{-1}", "5", M_PER_S),
        ("5\\text{ cm}^2", "5", (("cm", 2),)),
        ("5 square centimetres", "5", (("cm", 2),)),
        ("5 sq cm", "5", (("cm", 2),)),
        ("-$5", "-5", (("$", 1),)),
        ("\\$5 per hour", "5", (("$", 1), ("h", -1))),
        ("20^\\circ\\text{C}", "20", (("°C", 1),)),
        ("x = 5 m", "x = 5", (("m", 1),)),
        ("\\frac{3}{4} m", "\\frac{3}{4}", (("m", 1),)),
        ("2\\sqrt{3}\\text{ km}", "2\\sqrt{3}", (("km", 1),)),
    ],
)
def test_units_are_read_in_every_spelling(text: str, value: str, unit: object) -> None:
    assert split_unit(text) == (value, unit)


@pytest.mark.parametrize(
    "text", ["12th", "12^{th}", "12^{\\text{th}}", "12 red apples", "12\\text{ apples}", "12 \\text{ of them}"]
)
def test_words_that_measure_nothing_are_dropped(text: str) -> None:
    assert split_unit(text) == ("12", None)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "5x",
            "3 ab",
            "5 x",
            "2 pi",
            "5e",
            "10 N",
            "\\sin 30^\\circ",
            "5 or 6",
            "3 \\text{ or } 4",
            "\\text{yes}",
            "m",
        ),
        *("5x m", "2\\pi r", "5!", "kg", "3 sin", "", "=", "[0,1)", "5abc"),
        *("5 million", "5\\text{ million}", "5 percent", "5 squared", "2 thirds"),
    ],
)
def test_variables_and_functions_are_no_units(text: str) -> None:
    assert split_unit(text) == (text, None)


def test_a_variable_before_a_unit_stays_in_the_value() -> None:
    assert split_unit("3x \\text{ cm}") == ("3x", (("cm", 1),))


@given(st.text(alphabet="0123456789mkgsx$€°/^{}\\ text=.,per", max_size=80))
def test_no_text_is_too_much(text: str) -> None:
    value, _ = split_unit(text)
    assert len(value) <= len(text) + 1
