"""Replies with thoughts: what is the answer, and what is good form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.parsers import MaybeThinkParser, ThinkParser, extract_boxed_answer


def test_the_answer_follows_the_last_thought() -> None:
    reply = "<think>a</think> b <think>c</think>\n 4 "
    assert ThinkParser().parse(reply) == "4"
    assert MaybeThinkParser().parse(reply) == "4"


def test_thinking_that_never_ends_has_the_empty_answer() -> None:
    assert ThinkParser().parse("<think>still at it: 4") == ""
    assert ThinkParser().parse_answer([{"role": "assistant", "content": "4"}]) == ""


def test_thoughts_are_optional_for_the_lenient_parser() -> None:
    assert MaybeThinkParser().parse(" 4 ") == "4"
    assert MaybeThinkParser().parse_answer([{"role": "assistant", "content": "4"}]) == "4"


def test_the_function_sees_only_what_follows_the_thoughts() -> None:
    reply = r"<think>\boxed{3}?</think> It is \boxed{4}."
    assert ThinkParser(extract_boxed_answer).parse_answer(reply) == "4"
    assert MaybeThinkParser(extract_boxed_answer).parse_answer(reply) == "4"
    assert ThinkParser(extract_boxed_answer).parse_answer(r"<think>\boxed{3}") == ""
    assert ThinkParser(lambda text: text or "nothing").parse("no thoughts") == "nothing"


@given(st.text(), st.text())
@settings(max_examples=100, deadline=None)
def test_an_answer_after_a_thought_is_read_whole(thought: str, answer: str) -> None:
    reply = f"<think>{thought}</think>{answer}"
    expected = answer.rpartition("</think>")[2].strip()
    assert ThinkParser().parse(reply) == MaybeThinkParser().parse(reply) == expected


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>2+2</think>4", 1.0),
        ("\n<think>\n2+2\n</think>\n4", 1.0),
        ("<think>2+2</think>", 0.0),
        ("<think>2+2</think> \n", 0.0),
        ("2+2</think>4", 0.0),
        ("<think>2+2 4", 0.0),
        ("Hm <think>2+2</think>4", 0.0),
        ("<think>a</think><think>b</think>4", 0.0),
        ("4", 0.0),
        (None, 0.0),
    ],
)
def test_good_form_is_one_thought_first_and_then_something(text: Any, score: float) -> None:
    assert ThinkParser().get_format_reward_func()([{"role": "assistant", "content": text}]) == score


def test_the_format_reward_is_the_share_of_good_messages() -> None:
    chat = [{"role": "assistant", "content": text} for text in ("<think>a</think>b", "b", "<think>a</think>c", "c")]
    assert ThinkParser().get_format_reward_func()(chat, answer="b") == 0.5
    assert ThinkParser().get_format_reward_func()([]) == 0.0
    assert MaybeThinkParser().get_format_reward_func()(chat) == 1.0
