"""Anthropic's dialect: what is sent and read, checked against the types of its own SDK."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.clients.scripted import KEY, Server, ask, check_params, hurry, run
from verifiers import errors
from verifiers.clients.anthropic import AnthropicClient, read_reply

types = pytest.importorskip("anthropic.types")
params = pytest.importorskip("anthropic.types.message_create_params")

USAGE = {
    "input_tokens": 10,
    "output_tokens": 5,
    "cache_creation_input_tokens": 3,
    "cache_read_input_tokens": 2,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
    }
]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "developer", "content": "Be kind."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "add what you see"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
            {"type": "image_url", "image_url": {"url": "https://host/cat.png", "detail": "low"}},
        ],
    },
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
            {"id": "t2", "type": "function", "function": {"name": "add", "arguments": '{"a": '}},
        ],
    },
    {"role": "tool", "tool_call_id": "t1", "content": "3"},
    {"role": "tool", "tool_call_id": "t2", "content": ""},
    {"role": "user", "content": "so?"},
    {"role": "assistant", "content": "3"},
    {"role": "system", "content": "Now rhyme."},
]


def message(*blocks: Any, stop_reason: str = "end_turn") -> dict[str, Any]:
    value = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": list(blocks),
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": USAGE,
    }
    types.Message.model_validate(value)  # a reply that the SDK would read
    return value


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "citations": None}


async def complete(*script: Any, request: Any, **options: Any) -> tuple[Any, Server]:
    async with Server(*script) as server:
        client = AnthropicClient(server.url, KEY, **options)
        hurry(client)
        return await client.complete(request), server


def send(**kwargs: Any) -> dict[str, Any]:
    """The body that a request becomes; the SDK's own types must accept it."""
    _, server = run(complete(message(text("4")), request=ask(**kwargs)))
    body: dict[str, Any] = server.seen[0].body
    # The endpoint's older models take these; the SDK's newest types no longer say so.
    named = {key: value for key, value in body.items() if key not in ("temperature", "top_k", "top_p")}
    check_params(params.MessageCreateParamsNonStreaming, named)
    return body


def test_a_conversation_is_sent_in_anthropics_words() -> None:
    body = send(prompt=copy.deepcopy(TALK), tools=TOOLS)
    assert body["system"] == "Be brief.\n\nBe kind."
    assert body["tools"] == [
        {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
    ]
    assert body["max_tokens"] == 4096
    assert [turn["role"] for turn in body["messages"]] == ["user", "assistant", "user", "assistant", "user"]
    assert body["messages"][0]["content"] == [
        {"type": "text", "text": "add what you see"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
        {"type": "image", "source": {"type": "url", "url": "https://host/cat.png"}},
    ]
    assert body["messages"][1]["content"] == [
        {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "t2", "name": "add", "input": {"arguments": '{"a": '}},
    ]
    assert body["messages"][2]["content"] == [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}]},
        {"type": "tool_result", "tool_use_id": "t2"},
        {"type": "text", "text": "so?"},
    ]


def test_the_callers_messages_are_not_touched() -> None:
    talk = copy.deepcopy(TALK)
    send(prompt=talk)
    assert talk == TALK


def test_the_key_and_the_version_go_into_their_own_headers() -> None:
    _, server = run(complete(message(text("4")), request=ask(), headers={"anthropic-beta": "b1"}))
    seen = server.seen[0]
    assert seen.path == "/v1/messages"
    assert (seen.headers["x-api-key"], seen.headers["anthropic-version"]) == (KEY, "2023-06-01")
    assert seen.headers["anthropic-beta"] == "b1"
    assert "Authorization" not in seen.headers


def test_a_base_url_that_ends_in_v1_is_not_doubled() -> None:
    async def go() -> str:
        async with Server(message(text("4"))) as server:
            await AnthropicClient(f"{server.url}/v1").complete(ask())
            return server.seen[0].path

    assert run(go()) == "/v1/messages"


def test_sampling_arguments_are_translated() -> None:
    sampling = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 3,
        "stop": "END",
        "n": 1,
        "logprobs": False,
        "user": "u1",
        "parallel_tool_calls": False,
        "tool_choice": "required",
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        "extra_body": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    }
    body = send(tools=TOOLS, sampling=sampling)
    del body["messages"], body["model"], body["tools"]
    assert body == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 3,
        "stop_sequences": ["END"],
        "metadata": {"user_id": "u1"},
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }


@pytest.mark.parametrize(
    ("choice", "written"),
    [
        ("auto", {"type": "auto"}),
        ("none", {"type": "none"}),
        ({"type": "function", "function": {"name": "add"}}, {"type": "tool", "name": "add"}),
        ({"type": "tool", "name": "add"}, {"type": "tool", "name": "add"}),
    ],
)
def test_tool_choices_are_translated(choice: Any, written: Any) -> None:
    assert send(tools=TOOLS, sampling={"tool_choice": choice})["tool_choice"] == written


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask(sampling={"logprobs": True, "seed": 1}), "logprobs, seed"),
        (ask(sampling={"n": 2}), "argument n;"),
        (ask(sampling={"response_format": {"type": "json_object"}}), "json_object"),
        (ask("2+2=", message_type="completion"), "only takes chats"),
        (ask([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]), "input_audio"),
    ],
)
def test_what_anthropic_has_no_word_for_is_refused_by_name(request_: Any, words: str) -> None:
    with pytest.raises(errors.RequestRefusedError, match=words):
        run(complete(message(text("4")), request=request_))


def test_a_reply_with_thoughts_and_tool_calls_reads_like_openais_and_goes_back_whole() -> None:
    thoughts = {"type": "thinking", "thinking": "let me see", "signature": "sig"}
    call = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}, "caller": None}
    reply = message(thoughts, text("I will "), text("add."), call, stop_reason="tool_use")
    completion, _ = run(complete(reply, request=ask(), prices={"prompt": 1.0, "completion": 2.0}))
    assert completion.message == {
        "role": "assistant",
        "content": "I will add.",
        "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}],
        "reasoning_content": "let me see",
        "thinking_blocks": [thoughts],
    }
    assert (completion.finish_reason, completion.model) == ("tool_calls", "claude")
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (15, 5)
    assert completion.usage.cost_usd == pytest.approx(25e-6)
    assert completion.choices[0].message.tool_calls[0].function.name == "add"
    assert completion.raw["anthropic"] == reply
    json.dumps(completion.raw)

    body = send(prompt=[*ask().prompt, completion.message, {"role": "tool", "tool_call_id": "t1", "content": "2"}])
    assert [block["type"] for block in body["messages"][1]["content"]] == ["thinking", "text", "tool_use"]


@pytest.mark.parametrize(
    ("stop_reason", "finish_reason"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "content_filter"),
    ],
)
def test_stop_reasons_become_finish_reasons(stop_reason: str, finish_reason: str) -> None:
    assert read_reply(message(text("4"), stop_reason=stop_reason)).finish_reason == finish_reason


def test_a_model_that_says_nothing_has_answered_but_a_reply_without_content_is_empty() -> None:
    assert read_reply(message()).message == {"role": "assistant", "content": ""}
    with pytest.raises(errors.EmptyModelResponseError):
        read_reply({"type": "message", "content": None})


def test_overload_is_waited_out_and_a_prompt_too_long_is_the_policys() -> None:
    overloaded = (529, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}})
    completion, server = run(complete(overloaded, message(text("4")), request=ask()))
    assert (completion.text, len(server.seen)) == ("4", 2)
    too_long = {"type": "invalid_request_error", "message": "prompt is too long: 201000 tokens > 200000 maximum"}
    with pytest.raises(errors.OverlongPromptError):
        run(complete((400, {"type": "error", "error": too_long}), request=ask()))


def test_content_of_another_shape_is_a_bad_reply() -> None:
    with pytest.raises(errors.BadReplyError):
        run(complete({"content": ["4"]}, request=ask(), max_retries=1))


@pytest.mark.parametrize("usage", [None, {}], ids=str)
def test_a_reply_that_does_not_say_its_usage_has_none_instead_of_zero_tokens(usage: Any) -> None:
    completion, _ = run(complete({**message(text("4")), "usage": usage}, request=ask()))
    assert completion.usage is None
    assert completion.raw["usage"] is None
