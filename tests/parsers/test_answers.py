"""Final answers: boxes, hashes, digits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.parsers import (
    BOXED_SYSTEM_PROMPT,
    THINK_BOXED_SYSTEM_PROMPT,
    extract_boxed_answer,
    extract_hash_answer,
    strip_non_numeric,
)

balanced = st.recursive(
    st.text(st.characters(exclude_characters="{}"), max_size=5),
    lambda inner: st.builds("{}{{{}}}{}".format, inner, inner, inner),
    max_leaves=8,
)


@given(st.text(), balanced, st.text(st.characters(exclude_characters="\\")))
@settings(max_examples=200, deadline=None)
def test_a_box_gives_back_what_was_put_into_it(before: str, answer: str, after: str) -> None:
    assert extract_boxed_answer(before + "\\boxed{" + answer + "}" + after) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{3} or rather \boxed{4}", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{4}}", "4"),
        (r"\boxed{}", ""),
        (r"\boxed{ 4 }", " 4 "),
        (r"\boxed 4", r"\boxed 4"),
    ],
)
def test_the_last_box_counts(text: str, answer: str) -> None:
    assert extract_boxed_answer(text) == answer


@pytest.mark.parametrize("text", ["four", r"\boxed{4", r"\boxed{\frac{1}{2}", r"\boxed{3} and \boxed{4", ""])
def test_without_a_complete_last_box_the_text_is_the_answer_unless_strict(text: str) -> None:
    assert extract_boxed_answer(text) == text
    assert extract_boxed_answer(text, strict=True) == ""


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("2 + 2 = 4\n#### 4", "4"),
        ("####4", "4"),
        ("#### 3 #### 4", "3"),
        ("####", ""),
        ("### 4", "### 4"),
        ("4", "4"),
    ],
)
def test_a_hash_answer_follows_the_first_mark(text: str, answer: str) -> None:
    assert extract_hash_answer(text) == answer


def test_no_text_has_the_empty_answer() -> None:
    assert extract_boxed_answer(None) == ""
    assert extract_hash_answer(None) == ""


def test_answers_are_read_out_of_messages_too() -> None:
    assert extract_boxed_answer([{"role": "assistant", "content": r"\boxed{4}"}]) == "4"


def test_digits_and_points_remain() -> None:
    assert strip_non_numeric("$1,234.50 (approx)") == "1234.50"
    assert strip_non_numeric("none") == ""


def test_the_prompts_ask_for_what_the_parsers_read() -> None:
    assert "\\boxed{}" in BOXED_SYSTEM_PROMPT
    assert all(mark in THINK_BOXED_SYSTEM_PROMPT for mark in ("<think>", "</think>", "\\boxed{}"))
