"""`/v1/responses` and `/v1/messages` over HTTP: whole, as events, with tools, with structure; and what they refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")

from tests.engine.support.served import NAME, Served
from verifiers.dialects.responses import Conversations
from verifiers.errors import RequestRefusedError

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SIZES: dict[str, Any] = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}},
    "required": ["size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "name": "sizes", "schema": SIZES, "strict": True}
FIND = {"type": "function", "name": "find", "description": "Find.", "parameters": SIZES}
TOOL = {"name": "find", "description": "Find.", "input_schema": SIZES}
USER: Any = [{"role": "user", "content": "hello world"}]


def is_sized(text: str) -> bool:
    return json.loads(text)["size"] in ("small", "large")


# --- responses ----------------------------------------------------------------------------------------------------


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def test_a_response_is_the_reply_that_the_chat_gives(served: Served) -> None:
    response = served.ask(RESPONSES, input="hello world", seed=3)
    assert response["object"] == "response"
    assert response["status"] == "completed"
    assert text_of(response) == served.chat("hello world", seed=3)["message"]["content"]
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_instructions_and_items_are_the_messages_of_a_chat(served: Served) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "1", "name": "find", "arguments": '{"size": "small"}'},
        {"type": "function_call_output", "call_id": "1", "output": "Ulm"},
    ]
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"size": "small"}'}}
    messages = [
        {"role": "system", "content": "Be nice."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Ulm"},
    ]
    response = served.ask(RESPONSES, input=items, instructions="Be nice.", max_output_tokens=1, min_tokens=1)
    chat = served.ask("/v1/chat/completions", messages=messages, max_tokens=1)
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_response_has_the_structure_of_its_text_format_and_calls_functions(served: Served) -> None:
    assert is_sized(text_of(served.ask(RESPONSES, input="go", text={"format": FORMAT})))
    for choice in ("required", {"type": "function", "name": "find"}):
        (item,) = served.ask(RESPONSES, input="go", tools=[FIND], tool_choice=choice)["output"]
        assert (item["type"], item["name"]) == ("function_call", "find")
        assert is_sized(item["arguments"])


def test_the_events_of_a_response_add_up_to_the_whole(served: Served) -> None:
    events = served.events(RESPONSES, input="hello world", seed=3)
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.completed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == text_of(events[-1]["response"]) == text_of(served.ask(RESPONSES, input="hello world", seed=3))


def test_a_streamed_function_call_comes_with_its_arguments(served: Served) -> None:
    events = served.events(RESPONSES, input="go", tools=[FIND], tool_choice="required")
    done = next(event for event in events if event["type"] == "response.function_call_arguments.done")
    assert is_sized(done["arguments"])
    assert events[-1]["response"]["output"][0]["call_id"]


def test_a_previous_response_is_gone_on_with_unless_it_was_not_to_be_stored(served: Served) -> None:
    first = served.ask(RESPONSES, input="hello")
    second = served.ask(RESPONSES, input="and then?", previous_response_id=first["id"])
    whole = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": text_of(first)}]
    chat = served.ask("/v1/chat/completions", messages=[*whole, {"role": "user", "content": "and then?"}], max_tokens=1)
    assert second["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    for unknown in ("resp_unknown", served.ask(RESPONSES, input="hello", store=False)["id"]):
        status, reply = served.post(RESPONSES, {"input": "hi", "previous_response_id": unknown})
        assert status == 400
        assert "send the whole conversation" in reply["error"]["message"]


def test_conversations_are_kept_within_a_bound() -> None:
    kept = Conversations(kept_chars=1000)
    for i in range(50):
        kept.keep(f"r{i}", [{"role": "user", "content": "x" * 100}])
    assert kept.find("r49")
    with pytest.raises(RequestRefusedError):
        kept.find("r0")
    kept.keep("huge", [{"role": "user", "content": "x" * 2000}])
    with pytest.raises(RequestRefusedError):
        kept.find("huge")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "'input' is missing"),
        ({"input": 3}, "'input' must be a text or a list"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "'web_search' are not supported"),
        ({"input": "x", "background": True}, "background=True"),
        ({"input": "x", "conversation": "c"}, "'conversation'"),
        ({"input": "x", "text": 3}, "'text' must be an object"),
        ({"input": "x", "include": 3}, "'include' must be a list"),
        ({"input": "x", "max_output_tokens": "many"}, "'max_tokens' must be"),
    ],
)
def test_what_responses_cannot_do_is_refused_by_name(served: Served, body: Any, said: str) -> None:
    status, reply = served.post(RESPONSES, body)
    assert status == 400
    assert said in reply["error"]["message"]


# --- messages -----------------------------------------------------------------------------------------------------


def test_a_message_is_the_reply_that_the_chat_gives(served: Served) -> None:
    message = served.ask(MESSAGES, messages=USER, max_tokens=50, seed=3)
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", NAME)
    assert message["content"][0]["text"] == served.chat(seed=3, max_tokens=50)["message"]["content"]
    assert message["stop_reason"] == "end_turn"
    assert served.ask(MESSAGES, messages=USER, max_tokens=1, min_tokens=1, seed=4)["stop_reason"] == "max_tokens"


def test_a_stop_sequence_is_named_and_the_system_prompt_is_read(served: Served) -> None:
    asked = {"messages": USER, "max_tokens": 200, "stop_sequences": ["}", "]"], "ignore_eos": True, "seed": 1}
    message = served.ask(MESSAGES, **asked)
    assert message["stop_reason"] == "stop_sequence"
    assert message["stop_sequence"] in ("}", "]")
    assert message["stop_sequence"] not in message["content"][0]["text"]
    delta = next(event for event in served.events(MESSAGES, **asked) if event["type"] == "message_delta")
    assert delta["delta"]["stop_sequence"] == message["stop_sequence"]
    bare = served.ask(MESSAGES + "/count_tokens", messages=USER)["input_tokens"]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert served.ask(MESSAGES + "/count_tokens", messages=USER, system=system)["input_tokens"] > bare
    chat = served.ask("/v1/chat/completions", messages=USER, max_tokens=1)
    assert bare == chat["usage"]["prompt_tokens"]


def test_messages_call_tools_and_read_their_results(served: Served) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "find"}):
        message = served.ask(MESSAGES, messages=USER, max_tokens=200, tools=[TOOL], tool_choice=choice)
        assert message["stop_reason"] == "tool_use"
        (block,) = message["content"]
        assert block["input"]["size"] in ("small", "large")
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "Ulm"}]}
    history = [*USER, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    assert served.ask(MESSAGES, messages=history, tools=[TOOL], max_tokens=4)["content"]


def test_the_events_of_a_message_add_up_to_the_whole(served: Served) -> None:
    events = served.events(MESSAGES, messages=USER, max_tokens=50, seed=3)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == served.ask(MESSAGES, messages=USER, max_tokens=50, seed=3)["content"][0]["text"]
    events = served.events(MESSAGES, messages=USER, max_tokens=200, tools=[TOOL], tool_choice={"type": "any"})
    written = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert is_sized("".join(delta["partial_json"] for delta in written))


def test_messages_have_structured_output(served: Served) -> None:
    wanted = {"type": "json_schema", "schema": SIZES}
    for field in ({"output_format": wanted}, {"output_config": {"format": wanted}}):
        assert is_sized(served.ask(MESSAGES, messages=USER, max_tokens=100, **field)["content"][0]["text"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": USER}, "'max_tokens' is missing"),
        ({"max_tokens": 4}, "'messages' must be a non-empty list"),
        ({"max_tokens": 4, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ({"max_tokens": 4, "messages": USER, "tools": [{"type": "web_search_20250305"}]}, "are not supported"),
        ({"max_tokens": 4, "messages": USER, "tool_choice": "any"}, "'tool_choice' must be an object"),
        ({"max_tokens": 4, "messages": USER, "tool_choice": {"type": {}}}, "'tool_choice' must be an object"),
    ],
)
def test_what_messages_cannot_do_is_refused_in_anthropics_words(served: Served, body: Any, said: str) -> None:
    status, reply = served.post(MESSAGES, body)
    assert status == 400
    assert reply["type"] == "error"
    assert reply["error"]["type"] == "invalid_request_error"
    assert said in reply["error"]["message"]
