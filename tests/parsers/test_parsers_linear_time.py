"""No text makes a parser slow: on each of these a method that backtracks or rescans takes many seconds."""

from __future__ import annotations

import time

import pytest

from verifiers.parsers import (
    JSONParser,
    MaybeThinkParser,
    Parser,
    ThinkParser,
    XMLParser,
    extract_boxed_answer,
    extract_hash_answer,
)

N = 64_000
HOSTILE = {
    "spaces": " " * 8 * N,
    "a field of spaces": "<answer>" + " " * 8 * N,
    "spaces between words": "<answer>" + " x" * 4 * N + "</answer",
    "opening tags": "<answer>" * N,
    "closing tags": "</answer>" * N,
    "opening, then closing tags": "<answer>" * N + "</answer>" * N,
    "pairs of tags": "<answer></answer>" * N,
    "pairs with an unclosed end": "<answer></answer>" * N + "<answer>" * N,
    "brackets": "<" * 8 * N,
    "halves of tags": "<answer" * N,
    "ends of thoughts": "</think>" * N,
    "thoughts": "<think>" * N + "</think>" * N,
    "boxes": "\\boxed{" * N,
    "closed boxes": "\\boxed{" * N + "}" * N,
    "braces in a box": "\\boxed{" + "{}" * N + "{" * N,
    "deep braces in a box": "\\boxed{" + "{" * N + "}" * N,
    "hashes": "#" * 8 * N,
    "objects that begin": '{"a":' * N,
    "objects that begin and end": '{"a":' * N + "1" + "}" * N,
    "objects with a long number": '{"a":' * 900 + "1" * 8 * N,
    "lists in an object": '{"a":' + "[" * N,
    "one object after another": '{"answer": 1}' * N,
    "objects that never end": '{"a": "' * N,
}
PARSERS: list[Parser] = [
    Parser(extract_boxed_answer),
    Parser(extract_hash_answer),
    XMLParser(["reasoning", ("tool", "answer")]),
    ThinkParser(extract_boxed_answer),
    MaybeThinkParser(extract_boxed_answer),
    JSONParser(["reasoning", "answer"]),
]


@pytest.mark.parametrize("name", HOSTILE)
def test_half_a_megabyte_of_anything_is_read_in_no_time(name: str) -> None:
    text = HOSTILE[name]
    chat = [{"role": "assistant", "content": text}]
    start_s = time.process_time()
    for parser in PARSERS:
        parser.parse(text)
        parser.parse_answer(text)
        parser.parse_answer(chat)
        parser.get_format_reward_func()(chat)
    assert time.process_time() - start_s < 1.0


def test_a_long_chat_without_an_answer_is_read_once() -> None:
    chat = [{"role": "assistant", "content": "<answer>" * 20}] * 20_000
    start_s = time.process_time()
    assert XMLParser(["answer"]).parse_answer(chat) is None
    assert time.process_time() - start_s < 1.0
