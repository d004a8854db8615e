"""Tool calls in replies: three ways of writing, every way of being cut off, and no text that takes long or raises."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.chat.tool_calls import OPEN, Style, call_id, parse, shown_length, style_of

CALL = {"name": "add", "arguments": {"a": 1, "b": ["x", None], "c": {"d": "é\n"}}}
LLAMA_CALL = {"name": "add", "parameters": CALL["arguments"]}
WRITTEN: dict[Style, str] = {
    "hermes": f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
    "llama3": json.dumps(LLAMA_CALL),
    "mistral": f"[TOOL_CALLS][{json.dumps(CALL)}]",
}
STYLES: list[Style] = ["hermes", "llama3", "mistral"]


@pytest.mark.parametrize("style", STYLES)
def test_a_call_is_read_with_its_arguments_as_json(style: Style) -> None:
    reply = parse(WRITTEN[style], style)
    assert reply.content is None
    assert [call["function"]["name"] for call in reply.calls] == ["add"]
    assert json.loads(reply.calls[0]["function"]["arguments"]) == CALL["arguments"]
    assert reply.calls[0]["type"] == "function"


@pytest.mark.parametrize("style", STYLES)
def test_a_call_cut_off_at_any_byte_is_text(style: Style) -> None:
    whole = WRITTEN[style].encode()
    for n in range(len(whole)):
        text = whole[:n].decode("utf-8", "replace")
        reply = parse(text, style)
        assert not reply.calls
        assert reply.content == text


def test_several_calls_keep_their_order_and_the_text_around_them() -> None:
    text = f"First {WRITTEN['hermes']} then {WRITTEN['hermes'].replace('add', 'subtract')}"
    reply = parse(text, "hermes")
    assert [call["function"]["name"] for call in reply.calls] == ["add", "subtract"]
    assert reply.content == "First  then"
    assert len({call["id"] for call in reply.calls}) == 2


def test_a_broken_call_beside_a_good_one_stays_in_the_text() -> None:
    reply = parse(f"{WRITTEN['hermes']}<tool_call>{{oops}}</tool_call>", "hermes")
    assert len(reply.calls) == 1
    assert reply.content == "<tool_call>{oops}</tool_call>"


def test_a_list_of_calls_in_one_block_as_smollm2_writes_them() -> None:
    reply = parse(f"<tool_call>{json.dumps([CALL, CALL])}</tool_call>", "hermes")
    assert len(reply.calls) == 2


def test_llama_calls_may_follow_one_another_and_have_a_tag() -> None:
    text = f"<|python_tag|>{WRITTEN['llama3']}; {WRITTEN['llama3']}"
    assert len(parse(text, "llama3").calls) == 2


def test_a_json_reply_that_names_no_tool_is_no_call() -> None:
    text = '{"name": "Ada", "parameters": {}}'
    assert parse(text, "llama3", tools={"add": None}) == (text, [])
    assert parse(text.replace("Ada", "add"), "llama3", tools={"add": None}).calls
    assert parse(WRITTEN["llama3"] + " and so on", "llama3").calls == []


def test_mistral_writes_name_and_arguments_apart_in_its_newer_models() -> None:
    reply = parse('Sure.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now{}', "mistral")
    assert [call["function"] for call in reply.calls] == [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert reply.content == "Sure."
    assert parse('[TOOL_CALLS]add[ARGS]{"a": 1', "mistral").calls == []


def test_arguments_that_are_json_in_a_text_are_unwrapped() -> None:
    reply = parse('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "hermes")
    assert reply.calls[0]["function"]["arguments"] == '{"a": 1}'


@pytest.mark.parametrize(
    "inner",
    [
        "[]",
        "null",
        "3",
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "a", "arguments": [1]}',
        '{"name": "a", "arguments": {"x": NaN}}',
        '{"name": "a", "arguments": {"x": 1e999}}',
        '{"name": "\\ud83d", "arguments": {}}',
        '{"name": "a", "arguments": ' + "[" * 100_000 + "}",
        '{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}",
    ],
)
def test_what_is_not_a_call_stays_text(inner: str) -> None:
    text = f"<tool_call>{inner}</tool_call>"
    assert parse(text, "hermes") == (text, [])


def test_half_a_surrogate_pair_in_arguments_can_be_sent_on() -> None:
    reply = parse('<tool_call>{"name": "a", "arguments": {"x": "\\ud83d"}}</tool_call>', "hermes")
    reply.calls[0]["function"]["arguments"].encode()


PIECES = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "{", "}", "[", "]", '"name"', ": ", '"a"', ";", "é"]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3)).map("".join), st.sampled_from(STYLES))
def test_nothing_raises(text: str, style: Style) -> None:
    reply = parse(text, style)
    assert reply.calls or reply.content == text


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "piece", ["<tool_call>", "</tool_call>", "<tool_call>{", "[TOOL_CALLS]", "{", "[TOOL_CALLS]a{"]
)
def test_time_is_linear_in_the_length(style: Style, piece: str) -> None:
    def seconds(n: int) -> float:
        text = piece * n
        start = time.perf_counter()
        parse(text, style)
        return time.perf_counter() - start

    small = max(min(seconds(5_000) for _ in range(3)), 1e-4)
    assert min(seconds(50_000) for _ in range(3)) < 60 * small


def test_ids_are_the_same_for_the_same_sampling_and_of_the_kind_mistral_wants() -> None:
    one, other = parse(WRITTEN["hermes"], "hermes", salt="7"), parse(WRITTEN["hermes"], "hermes", salt="8")
    assert one == parse(WRITTEN["hermes"], "hermes", salt="7")
    assert one.calls[0]["id"] != other.calls[0]["id"]
    assert len(call_id("x", 0)) == 9
    assert call_id("x", 0).isalnum()


def test_the_style_is_told_from_the_template() -> None:
    assert style_of("{%- if tools %}<tool_call>{% endif %}") == "hermes"
    assert style_of("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert style_of("<|start_header_id|>ipython") == "llama3"
    assert style_of("nothing of the kind") == "hermes"


def test_a_stream_shows_what_is_surely_no_call() -> None:
    text = "Let me see. " + OPEN
    for n in range(len(text) + 1):
        assert "<" not in text[: shown_length(text[:n], "hermes")]
    assert shown_length("a < b", "hermes") == 5
    assert shown_length("anything", "mistral") == 0
