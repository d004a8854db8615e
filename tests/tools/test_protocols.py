"""Tool calls as models write them: cut off at every byte, full of garbage, or thousands of them; nothing raises."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.chat import tool_calls
from verifiers.errors import ToolParseError
from verifiers.parsers import MaybeThinkParser, ThinkParser, XMLParser
from verifiers.tools.faults import BadJSONError, NoCallError
from verifiers.tools.protocols import describe_tools, native_calls, read_arguments, tagged_calls

WHOLE = (
    '<tool>{"name": "add", "arguments": {"a": 1, "text": "é </tool> <tool> \\" \\\\", "b": [1, {"c": null}]}}</tool>'
)


def native(arguments: Any, name: Any = "add") -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "7", "function": {"name": name, "arguments": arguments}}]}


# --- tags ---------------------------------------------------------------------------------------------------------


def test_a_call_is_read_with_tags_inside_of_its_strings() -> None:
    reply = tagged_calls(f"first {WHOLE} then")
    (call,) = reply.calls
    assert call.problem is None
    assert call.arguments["text"] == 'é </tool> <tool> " \\'
    assert reply.outside == "first  then"


@pytest.mark.parametrize("key", ["arguments", "args", "parameters"])
def test_arguments_go_by_several_names_or_are_left_out(key: str) -> None:
    assert tagged_calls(f'<tool>{{"name": "f", "{key}": {{"x": 1}}}}</tool>').calls[0].arguments == {"x": 1}
    assert tagged_calls('<tool>{"name": "f"}</tool>').calls[0].arguments == {}


def test_several_calls_keep_their_order_one_to_a_tag_or_in_a_list() -> None:
    text = '<tool>{"name": "a"}</tool> and <tool> [{"name": "b"}, {"name": "c"}] </tool>'
    reply = tagged_calls(text)
    assert [call.name for call in reply.calls] == ["a", "b", "c"]
    assert len({call.id for call in reply.calls}) == 3
    assert reply.outside == " and "


def test_a_call_cut_off_at_any_byte_is_a_clean_message() -> None:
    whole = WHOLE.encode()
    for n in range(len(whole)):
        text = whole[:n].decode("utf-8", "replace")
        calls = tagged_calls(text).calls
        assert all(isinstance(call.problem, ToolParseError) for call in calls)
        assert bool(calls) == ("<tool>" in text)
        assert all(len(str(call.problem)) < 500 for call in calls)


def test_words_about_the_tag_are_no_call() -> None:
    reply = tagged_calls('<reasoning>I may write <tool> here.</reasoning><tool>{"name": "add"}</tool>')
    assert [call.name for call in reply.calls] == ["add"]
    assert reply.calls[0].problem is None


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ("{'name': 'add'}", "not valid JSON"),
        ("add(1, 2)", r"not valid JSON .*: add\(1, 2\)"),
        ('{"name": "add"} and more', "not valid JSON"),
        ("", "not valid JSON"),
        ("3", "not an object"),
        ("[]", "the list of calls is empty"),
        ("{}", 'a JSON object with "name" and "arguments", not {}'),
        ('{"name": 3}', "a JSON object with"),
        ('["add"]', "a JSON object with"),
        ("{" * 100_000, "not valid JSON"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_call_says_why_and_how_to_write_one(inside: str, message: str) -> None:
    (call,) = tagged_calls(f"<tool>{inside}</tool>").calls
    with pytest.raises(BadJSONError, match=message):
        raise call.problem  # type: ignore[misc]


def test_an_unclosed_call_after_a_good_one_is_told_apart() -> None:
    good, cut = tagged_calls('<tool>{"name": "a"}</tool><tool>{"name": "b"').calls
    assert good.problem is None
    assert isinstance(cut.problem, NoCallError)


def test_an_answer_inside_of_a_call_is_outside_of_nothing() -> None:
    text = '<tool>{"name": "python", "arguments": {"code": "print(\'<answer>4</answer>\')"}}</tool>'
    assert tagged_calls(text).outside == ""


PIECES = ["<tool>", "</tool>", "{", "}", "[", "]", '"name"', '"add"', ": ", '"', "\\", "<answer>", "é", "1", ","]
GARBAGE = st.lists(st.sampled_from(PIECES) | st.text(max_size=3)).map("".join)


@given(GARBAGE)
def test_no_text_raises_and_none_is_lost(text: str) -> None:
    reply = tagged_calls(text)
    assert len(reply.outside) <= len(text)
    if "<tool>" not in text:
        assert (reply.calls, reply.outside) == ([], text)


@given(st.lists(st.dictionaries(st.text(), st.text() | st.integers() | st.none()), max_size=4), st.text(max_size=10))
def test_what_was_written_as_json_is_read_back(arguments: list[dict[str, Any]], between: str) -> None:
    between = between.replace("<", "")
    written = [f"<tool>{json.dumps({'name': 'f', 'arguments': one})}</tool>" for one in arguments]
    reply = tagged_calls(between.join(written))
    assert [call.arguments for call in reply.calls] == arguments
    assert all(call.problem is None for call in reply.calls)


# --- as endpoints list them ---------------------------------------------------------------------------------------


def test_arguments_cut_off_at_any_byte_are_a_clean_message() -> None:
    whole = json.dumps({"a": 1, "b": ["x", None], "c": {"d": "é\n"}}, ensure_ascii=False).encode()
    for n in range(1, len(whole)):
        with pytest.raises(BadJSONError) as caught:
            read_arguments(whole[:n].decode("utf-8", "replace"))
        assert "not valid JSON" in str(caught.value)
    assert read_arguments(whole.decode()) == {"a": 1, "b": ["x", None], "c": {"d": "é\n"}}


@pytest.mark.parametrize("given_as", [None, "", "{}", "null", {}, '"{}"'])
def test_no_arguments_are_written_in_many_ways(given_as: Any) -> None:
    assert read_arguments(given_as) == {}


@pytest.mark.parametrize("arguments", ["[1]", "3", [1], 3, '"x"', "[" * 100_000, "9" * 5_000, '"' + "x" * 10_000])
def test_arguments_that_are_no_object_are_a_short_message(arguments: Any) -> None:
    with pytest.raises(BadJSONError) as caught:
        read_arguments(arguments)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "listed",
    [
        [None],
        [3],
        ["not json"],
        [[]],
        [{}],
        [{"function": None}],
        [{"function": "add"}],
        [{"function": {"name": None}}],
        [{"function": {"name": ""}}],
        [{"function": {"arguments": "{}"}}],
        [{"id": 3, "function": {}}],
    ],
)
def test_calls_of_a_wrong_shape_are_answered_by_their_place(listed: list[Any]) -> None:
    (call,) = native_calls({"tool_calls": listed})
    assert call.id == "call_0"
    with pytest.raises(BadJSONError, match="has no function name"):
        raise call.problem  # type: ignore[misc]


@pytest.mark.parametrize("message", [None, 3, "text", {}, {"tool_calls": None}, {"tool_calls": "x"}, {"tool_calls": 3}])
def test_a_message_without_calls_has_none(message: Any) -> None:
    assert native_calls(message) == []


def test_calls_may_be_objects_of_an_sdk_or_json() -> None:
    plain = native('{"a": 1}')["tool_calls"][0]
    function = SimpleNamespace(name="add", arguments='{"a": 1}')
    for call in (plain, json.dumps(plain), SimpleNamespace(id="7", function=function)):
        (read,) = native_calls(SimpleNamespace(tool_calls=[call]))
        assert (read.id, read.name, read.arguments) == ("7", "add", '{"a": 1}')


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["id", "function", "name", "arguments"]), inner),
    max_leaves=12,
)


def complaint(arguments: Any) -> str:
    try:
        read_arguments(arguments)
    except ToolParseError as error:
        return str(error)
    return ""


@given(JSON)
def test_no_list_of_calls_raises(listed: Any) -> None:
    for call in native_calls({"tool_calls": listed}):
        assert call.id
        assert len(complaint(call.arguments)) < 500


@given(st.sampled_from(["hermes", "llama3", "mistral"]), GARBAGE)
def test_whatever_the_engine_reads_as_a_call_has_arguments_that_can_be_read(style: tool_calls.Style, text: str) -> None:
    for call in tool_calls.parse(text, style).calls:
        assert isinstance(read_arguments(call["function"]["arguments"]), dict)


# --- time ---------------------------------------------------------------------------------------------------------

REPEATED = [
    " ",
    "<answer>",
    "<tool>",
    "</tool>",
    "<tool> ",
    "<tool>{",
    "<tool>[[",
    "<tool>{}",
    '<tool>{"a":"',
    '<tool>"',
    '<tool>{"\\',
    "<tool>{}</tool>",
    '<tool>{"name":"a"}</tool>',
    "<tool>\n{'",
]


def seconds(work: Any, n: int) -> float:
    best = []
    for _ in range(3):
        began = time.process_time()
        work(n)
        best.append(time.process_time() - began)
    return min(best)


@pytest.mark.parametrize("piece", REPEATED, ids=[str(i) for i in range(len(REPEATED))])
def test_tags_are_read_in_linear_time(piece: str) -> None:
    small = max(seconds(lambda n: tagged_calls(piece * n), 2_000), 1e-4)
    assert seconds(lambda n: tagged_calls(piece * n), 32_000) < 16 * 5 * small


@pytest.mark.parametrize("text", [" " * 4_096, "<answer>" * 64_000, "<tool>" * 64_000, "</answer>" * 64_000])
@pytest.mark.parametrize(
    "parser",
    [XMLParser(["reasoning", ("tool", "answer")]), ThinkParser(), MaybeThinkParser()],
    ids=["xml", "think", "may"],
)
def test_replies_that_regular_expressions_choke_on_cost_milliseconds(parser: Any, text: str) -> None:
    def work(_: int) -> None:
        parser.parse(text)
        parser.parse_answer([{"role": "assistant", "content": text}])
        parser.get_format_reward_func()([{"role": "assistant", "content": text}])
        tagged_calls(text)

    assert seconds(work, 1) < 0.5


# --- what the model is told ---------------------------------------------------------------------------------------


def test_tools_are_described_with_their_arguments() -> None:
    schema = {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {
                "properties": {"a": {"type": "integer", "description": "First."}, "b": {"type": "integer"}},
                "required": ["a"],
            },
        },
    }
    assert describe_tools([schema]) == (
        'add: Add.\nArguments:\n- a ({"type": "integer"}): First.\n- b ({"type": "integer"}, optional)'
    )
