"""The responses dialect: what is sent and read, checked against the types of OpenAI's SDK."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from openai.types.responses import Response
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from tests.clients.scripted import KEY, Server, ask, check_params, hurry, run
from verifiers import errors
from verifiers.clients.responses import ResponsesClient, read_reply

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "add what you see"},
            {"type": "image_url", "image_url": {"url": "https://host/cat.png", "detail": "low"}},
        ],
    },
    {"role": "assistant", "content": "I will.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "system", "content": "Now rhyme."},
]


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


def response(*items: Any, **fields: Any) -> dict[str, Any]:
    value = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1700000000.0,
        "model": "gpt",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": list(items),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": 1.0,
        "top_p": 1.0,
        "usage": {
            "input_tokens": 10,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 2},
            "total_tokens": 15,
        },
        **fields,
    }
    Response.model_validate(value)  # a reply that the SDK would read
    return value


async def complete(*script: Any, request: Any, **options: Any) -> tuple[Any, Server]:
    async with Server(*script) as server:
        client = ResponsesClient(f"{server.url}/v1", KEY, **options)
        hurry(client)
        return await client.complete(request), server


def send(**kwargs: Any) -> dict[str, Any]:
    """The body that a request becomes; the SDK's own types must accept it."""
    _, server = run(complete(response(said("4")), request=ask(**kwargs)))
    body: dict[str, Any] = server.seen[0].body
    check_params(ResponseCreateParamsNonStreaming, body)
    return body


def test_a_conversation_is_sent_as_instructions_and_items() -> None:
    body = send(prompt=copy.deepcopy(TALK), tools=TOOLS)
    assert body["instructions"] == "Be brief."
    assert body["tools"] == [
        {"type": "function", "name": "add", "description": "Adds.", "parameters": PARAMETERS, "strict": False}
    ]
    assert body["input"] == [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "add what you see"},
                {"type": "input_image", "image_url": "https://host/cat.png", "detail": "low"},
            ],
        },
        {"role": "assistant", "content": "I will."},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"role": "system", "content": "Now rhyme."},
    ]


def test_sampling_arguments_are_translated() -> None:
    schema = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    body = send(
        sampling={
            "max_tokens": 9,
            "temperature": 0.5,
            "reasoning_effort": "low",
            "response_format": {"type": "json_schema", "json_schema": schema},
            "verbosity": "low",
            "tool_choice": {"type": "function", "function": {"name": "add"}},
            "n": 1,
            "store": False,
        }
    )
    del body["input"], body["model"]
    assert body == {
        "max_output_tokens": 9,
        "temperature": 0.5,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", **schema}, "verbosity": "low"},
        "tool_choice": {"type": "function", "name": "add"},
        "store": False,
    }


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask(sampling={"stop": ["x"], "seed": 1}), "stop, seed"),
        (ask(sampling={"logprobs": True}), "logprobs"),
        (ask("2+2=", message_type="completion"), "only takes chats"),
        (ask([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]), "input_audio"),
    ],
)
def test_what_the_endpoint_has_no_word_for_is_refused_by_name(request_: Any, words: str) -> None:
    with pytest.raises(errors.RequestRefusedError, match=words):
        run(complete(response(said("4")), request=request_))


def test_a_reply_with_thoughts_and_tool_calls_reads_like_a_chats_and_goes_back_whole() -> None:
    thoughts = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "one"}, {"type": "summary_text", "text": "two"}],
        "encrypted_content": "sealed",
    }
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
    reply = response(thoughts, call)
    completion, _ = run(complete(reply, request=ask(), prices={"prompt": 1.0, "completion": 2.0}))
    assert completion.message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [CALL],
        "reasoning_content": "one\n\ntwo",
        "reasoning_items": [thoughts],
    }
    assert (completion.finish_reason, completion.model) == ("tool_calls", "gpt")
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (10, 5)
    assert completion.usage.cost_usd == pytest.approx(20e-6)
    assert completion.choices[0].message.tool_calls[0].function.name == "add"
    assert completion.raw["responses"] == reply
    json.dumps(completion.raw)

    body = send(prompt=[*ask().prompt, completion.message, {"role": "tool", "tool_call_id": "c1", "content": "2"}])
    assert [item.get("type", "message") for item in body["input"]] == [
        *("message", "reasoning", "function_call", "function_call_output")
    ]


def test_a_reply_cut_short_is_truncated_even_before_it_said_anything() -> None:
    cut = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    assert read_reply(response(said("4"), **cut)).is_truncated
    assert read_reply(response(**cut)).is_truncated
    filtered = {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}
    assert read_reply(response(said("4"), **filtered)).finish_reason == "content_filter"


def test_a_refusal_is_kept_apart_from_the_text() -> None:
    item = {**said(""), "content": [{"type": "refusal", "refusal": "no"}]}
    assert read_reply(response(item)).message == {"role": "assistant", "content": "", "refusal": "no"}


def test_replies_without_output_failed_ones_and_unfinished_ones_are_errors() -> None:
    failed = {"status": "failed", "error": {"code": "server_error", "message": "boom"}}
    for reply, kind in (
        (response(), errors.EmptyModelResponseError),
        (response(**failed), errors.ServerError),
        ({**response(**failed), "error": None}, errors.ServerError),
        (response(status="in_progress"), errors.BadReplyError),
    ):
        with pytest.raises(kind):
            run(complete(reply, request=ask(), max_retries=1))


@pytest.mark.parametrize("usage", [None, {}], ids=str)
def test_a_response_that_does_not_say_its_usage_has_none_instead_of_zero_tokens(usage: Any) -> None:
    completion, _ = run(complete({**response(said("4")), "usage": usage}, request=ask()))
    assert completion.usage is None
    assert completion.raw["usage"] is None
