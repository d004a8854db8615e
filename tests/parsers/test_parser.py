"""The plain parser, and what holds for every parser on any input."""

from __future__ import annotations

import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.parsers import (
    JSONParser,
    MaybeThinkParser,
    Parser,
    ThinkParser,
    XMLParser,
    extract_boxed_answer,
    extract_hash_answer,
)

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "5"},
    {"role": "tool", "content": "no", "tool_call_id": "1"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Correct!"},
]

PARSERS = [
    Parser(),
    XMLParser(["think", ("tool", "answer")]),
    ThinkParser(),
    MaybeThinkParser(),
    JSONParser(["think", "answer"]),
]

# Every code point, lone surrogates too, mixed with the marks that parsers look for.
MARKS = [
    "<answer>",
    "</answer>",
    "<tool>",
    "<think>",
    "</think>",
    "\\boxed{",
    "{",
    "}",
    "####",
    " ",
    "\n",
    "\x00",
    "\udc80",
]
any_text = st.text(st.characters(exclude_categories=())) | st.lists(
    st.sampled_from(MARKS) | st.text(max_size=3), max_size=12
).map("".join)
leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=8) | any_text
part = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url"])}, optional={"text": leaf, "image_url": leaf}
)
content = leaf | st.lists(part | leaf, max_size=3)
message = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(["assistant", "user", "tool"]) | leaf, "content": content}
)
any_completion = leaf | message | st.lists(message | leaf, max_size=4)


@given(any_completion)
@settings(max_examples=300, deadline=None)
def test_no_parser_raises_on_anything(completion: Any) -> None:
    for parser in PARSERS:
        parser.parse(completion)
        parser.parse_answer(completion)
        parser.get_assistant_messages(completion)
        assert 0.0 <= parser.get_format_reward_func()(completion=completion, answer="4") <= 1.0
    assert isinstance(extract_boxed_answer(completion), str)
    assert isinstance(extract_hash_answer(completion), str)


@given(any_text)
@settings(max_examples=100, deadline=None)
def test_a_string_and_a_chat_that_ends_with_it_parse_alike(text: str) -> None:
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    for parser in PARSERS:
        assert parser.parse(text) == parser.parse(chat)


def test_parse_gives_what_the_function_makes_of_the_text() -> None:
    assert Parser().parse(" 4 ") == " 4 "
    assert Parser(extract_fn=str.strip).parse(" 4 ") == "4"


def test_parse_of_a_chat_reads_the_last_assistant_message() -> None:
    assert Parser().parse(CHAT) == "4"
    assert Parser().parse_answer(CHAT) == "4"


def test_an_answer_is_none_where_no_assistant_speaks() -> None:
    assert Parser().parse_answer([{"role": "user", "content": "2+2?"}]) is None
    assert Parser().parse_answer([]) is None
    assert Parser().parse_answer(None) is None  # type: ignore[arg-type]


def test_text_parts_of_a_multimodal_reply_are_read() -> None:
    parts = [{"type": "text", "text": "4"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    assert Parser().parse_answer([{"role": "assistant", "content": parts}]) == "4"


def test_a_message_without_text_is_an_empty_reply() -> None:
    assert Parser().parse_answer([{"role": "assistant", "content": None, "tool_calls": []}]) == ""
    assert Parser().parse_answer([{"role": "assistant"}]) == ""


def test_one_message_alone_a_tuple_and_sdk_objects_are_completions_too() -> None:
    sdk_message = SimpleNamespace(role="assistant", content="4")
    for completion in [{"role": "assistant", "content": "4"}, sdk_message, (sdk_message,), iter(CHAT)]:
        assert Parser().parse_answer(completion) == "4"  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [Parser, ThinkParser, MaybeThinkParser, lambda f: XMLParser(["answer"], extract_fn=f)])
def test_a_function_that_raises_gives_none(make: Any) -> None:
    def extract(text: str) -> str:
        raise RuntimeError("cannot read this")

    reply = "<think>…</think><answer>4</answer>"
    assert make(extract).parse_answer(reply) is None
    assert make(extract).parse_answer([{"role": "assistant", "content": reply}]) is None


def test_a_parser_without_a_function_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="extract_fn"):
        Parser(extract_fn="strip")  # type: ignore[arg-type]


def test_messages_are_found_by_role() -> None:
    parser = Parser()
    assert parser.get_assistant_messages(CHAT) == [CHAT[2], CHAT[4]]
    assert parser.get_system_messages(CHAT) == [CHAT[0]]
    assert parser.get_user_messages(CHAT) == [CHAT[1], CHAT[5]]
    assert parser.get_tool_messages(CHAT) == [CHAT[3]]


def test_a_completion_that_is_a_string_is_one_assistant_message() -> None:
    assert Parser().get_assistant_messages("4") == [{"role": "assistant", "content": "4"}]
    assert Parser().get_user_messages("4") == []


def test_free_text_always_follows_the_format() -> None:
    assert Parser().get_format_reward_func()(completion="anything", answer="4", state={}) == 1.0


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: type(parser).__name__)
def test_the_format_reward_is_a_function_that_can_be_renamed(parser: Parser) -> None:
    reward = parser.get_format_reward_func()
    assert reward.__name__ == "format_reward_func"
    assert next(iter(inspect.signature(reward).parameters)) == "completion"
    reward.__name__ = "format"


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: type(parser).__name__)
def test_a_parser_survives_pickling(parser: Parser) -> None:
    parser.logger.debug("used once")
    reply = "<think>2+2</think><answer>4</answer>"
    assert pickle.loads(pickle.dumps(parser)).parse_answer(reply) == parser.parse_answer(reply)


def test_a_subclass_need_only_say_how_it_parses() -> None:
    class LastWord(Parser):
        def parse(self, text: Any) -> Any:
            return text.split()[-1]

    assert LastWord().parse_answer([{"role": "assistant", "content": "it is 4"}]) == "4"
