"""Reading replies: dicts, SDK objects and mocks give the same completion; refusals for length are recognised."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion as SDKCompletion
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from verifiers.clients.reading import is_overlong, read_response
from verifiers.errors import BadReplyError, EmptyModelResponseError

CALL = {"id": "call_9", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def reply(message: dict[str, Any] | None = None, **choice: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "4", **(message or {})}
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None, **choice}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12},
    }


def as_sdk(value: dict[str, Any]) -> ChatCompletion:
    return ChatCompletion.model_validate(value)


def as_namespace(value: Any) -> Any:
    if isinstance(value, dict):
        return SimpleNamespace(**{key: as_namespace(item) for key, item in value.items()})
    return [as_namespace(item) for item in value] if isinstance(value, list) else value


SHAPES = {"dict": copy.deepcopy, "sdk": as_sdk, "namespace": as_namespace}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({}, {"role": "assistant", "content": "4"}),
        ({"refusal": None, "tool_calls": None}, {"role": "assistant", "content": "4"}),
        ({"refusal": "no"}, {"role": "assistant", "content": "4", "refusal": "no"}),
        ({"reasoning_content": "hm"}, {"role": "assistant", "content": "4", "reasoning_content": "hm"}),
        ({"reasoning": "hm"}, {"role": "assistant", "content": "4", "reasoning_content": "hm"}),
        ({"content": None, "tool_calls": [CALL]}, {"role": "assistant", "content": None, "tool_calls": [CALL]}),
        ({"tool_calls": []}, {"role": "assistant", "content": "4"}),
    ],
)
def test_every_shape_of_reply_gives_the_same_message(shape: Any, message: Any, expected: Any) -> None:
    source = shape(reply(message))
    completion = read_response(source)
    assert completion.message == expected
    assert (completion.finish_reason, completion.model, completion.raw is source) == ("stop", "m", True)
    assert completion.usage is not None
    assert completion.usage.total_tokens == 12
    assert completion.choices[0].finish_reason == "stop"


def test_what_a_mock_makes_up_counts_as_missing() -> None:
    mock = MagicMock(spec=ChatCompletion)
    mock.choices = [MagicMock(spec=Choice)]
    mock.choices[0].message = MagicMock(spec=ChatCompletionMessage)
    mock.choices[0].message.content = "4"
    completion = read_response(mock)
    assert completion.message == {"role": "assistant", "content": "4"}
    assert (completion.finish_reason, completion.tokens, completion.usage, completion.model) == (None, None, None, "")

    bare = MagicMock()
    bare.choices = [MagicMock()]
    bare.choices[0].message.content = "5"
    bare.choices[0].finish_reason = "length"
    completion = read_response(bare)
    assert completion.message == {"role": "assistant", "content": "5"}
    assert (completion.is_truncated, completion.tokens, completion.usage) == (True, None, None)


def test_tool_calls_of_mocks_become_plain_dicts() -> None:
    mock = MagicMock(spec=ChatCompletion)
    call = MagicMock()
    call.id, call.function.name, call.function.arguments = "c1", "add", '{"a": 1}'
    mock.choices = [MagicMock(spec=Choice)]
    mock.choices[0].message = MagicMock(spec=ChatCompletionMessage, content=None, tool_calls=[call])
    assert read_response(mock).message["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ]


def test_tool_calls_without_an_id_or_with_arguments_as_an_object_are_made_usable() -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    source = reply({"content": None, "tool_calls": calls})
    assert read_response(source).message["tool_calls"] == [
        {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    ]
    assert calls[0]["function"]["arguments"] == {"a": 1}  # type: ignore[index]


def test_what_endpoints_hide_in_tool_calls_is_kept_for_the_next_turn() -> None:
    call = {**CALL, "extra_content": {"google": {"thought_signature": "abc"}}}
    for shape in (copy.deepcopy, as_sdk):
        message = read_response(shape(reply({"content": None, "tool_calls": [call]}))).message
        assert message["tool_calls"] == [call]


# --- tokens -------------------------------------------------------------------------------------------------------

LOGPROBS = {"content": [{"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:8", "logprob": -1.5}]}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("place", ["response", "choice"])
@pytest.mark.parametrize("ids", [[7, 8], None])
def test_tokens_come_from_every_place_that_engines_put_them(shape: Any, place: str, ids: Any) -> None:
    logprobs = {"content": [{**entry, "top_logprobs": []} for entry in LOGPROBS["content"]]}
    choice: dict[str, Any] = {"logprobs": logprobs}
    if ids:
        choice["token_ids"] = ids
    if place == "choice":
        choice["prompt_token_ids"] = [1, 2, 3]
    source = reply(**choice)
    if place == "response":
        source["prompt_token_ids"] = [1, 2, 3]
    tokens = read_response(shape(source)).tokens
    assert tokens is not None
    assert (tokens.prompt_ids, tokens.completion_ids, tokens.logprobs) == ([1, 2, 3], [7, 8], [-0.5, -1.5])


def test_tokens_of_plain_completions() -> None:
    logprobs = {"tokens": ["token_id:7", "token_id:8"], "token_logprobs": [-0.5, -1.5], "text_offset": [0, 1]}
    choice = {"index": 0, "text": "4", "finish_reason": "stop", "logprobs": logprobs, "prompt_token_ids": [1]}
    source = {"id": "x", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    for shape in (copy.deepcopy, SDKCompletion.model_validate):
        completion = read_response(shape(source), "completion")
        assert completion.text == "4"
        assert completion.tokens is not None
        assert (completion.tokens.completion_ids, completion.tokens.logprobs) == ([7, 8], [-0.5, -1.5])


@pytest.mark.parametrize(
    "choice",
    [
        {"logprobs": LOGPROBS},
        {"logprobs": LOGPROBS, "prompt_token_ids": []},
        {"token_ids": [7, 8], "prompt_token_ids": [1]},
        {"logprobs": {"content": []}, "token_ids": [], "prompt_token_ids": [1]},
        {"logprobs": {"content": [{"token": "4", "logprob": -1.0}]}, "prompt_token_ids": [1]},
        {"logprobs": {"content": [{"token": "4", "logprob": None}]}, "token_ids": [7], "prompt_token_ids": [1]},
    ],
)
def test_tokens_that_are_not_all_there_are_no_tokens(choice: Any) -> None:
    assert read_response(reply(**choice)).tokens is None


def test_token_ids_and_logprobs_of_different_lengths_are_an_error() -> None:
    with pytest.raises(BadReplyError, match="3 token ids but 2 logprobs"):
        read_response(reply(logprobs=LOGPROBS, token_ids=[7, 8, 9], prompt_token_ids=[1]))


# --- nothing, or something else -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "response",
    [None, {}, {"choices": None}, {"choices": []}, {"choices": [None]}, {"choices": [{}]}, SimpleNamespace(choices=[])],
)
def test_a_reply_without_choices_is_empty(response: Any) -> None:
    with pytest.raises(EmptyModelResponseError):
        read_response(response)


NAMES = [
    *("choices", "message", "content", "tool_calls", "function", "arguments", "logprobs", "usage", "prompt_tokens"),
    *("token_ids", "prompt_token_ids", "text", "role", "logprob", "token", "tokens", "token_logprobs"),
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=25,
)


@given(
    choice=st.dictionaries(st.sampled_from(NAMES), json_values),
    message=st.dictionaries(st.sampled_from(NAMES), json_values),
)
def test_no_json_whatever_makes_reading_fail_in_an_unknown_way(choice: Any, message: Any) -> None:
    for response in ({"choices": [{**choice, "message": message}]}, {"choices": [choice]}, choice):
        for message_type in ("chat", "completion"):
            try:
                read_response(response, message_type)  # type: ignore[arg-type]
            except (EmptyModelResponseError, BadReplyError):
                pass


# --- refusals for length ------------------------------------------------------------------------------------------

OVERLONG = [
    "This model's maximum context length is 4097 tokens. However, your messages resulted in 5000 tokens.",
    '{"error": {"message": "Your input exceeds the context window of this model.", "code": "context_length_exceeded"}}',
    "Please reduce the length of the messages or completion.",
    "'max_tokens' or 'max_completion_tokens' is too large: 4096. This model's maximum context length is 2048 tokens",
    "The decoder prompt (length 9000) is longer than the maximum model length of 8192.",
    "max_tokens must be at least 1, got -5.",
    "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
    "Requested token count exceeds the model's maximum context length of 8192 tokens.",
    "the request exceeds the available context size. try increasing the context size",
    '{"error":{"code":400,"message":"...","type":"exceed_context_size_error","n_prompt_tokens":9000}}',
    "prompt is too long: 213000 tokens > 200000 maximum",
    "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000",
    "request_too_large: Request exceeds the maximum size",
    "The input token count (1100000) exceeds the maximum number of tokens allowed (1048576).",
    "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum context length",
    "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8192. Given: 9000",
    "Input validation error: `inputs` must have less than 4096 tokens. Given: 5000",
    "Input is too long for requested model.",
    "This model's maximum prompt length is 131072 but the request contains 537812 tokens.",
    "too many tokens: total number of tokens in the prompt exceeds the limit",
    "The sum of prompt length (9000) and max_new_tokens should not exceed max_seq_len (8192)",
    "Prompt length of 40960 exceeds the configured limit",
    "input length exceeds the context length",
    "The number of tokens to keep from the initial prompt is greater than the context length",
]
OTHER = [
    "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
    "Rate limit reached for gpt-4o: Limit 30000 tokens per minute, Used 29000",
    "Request too large for model `x` on tokens per minute (TPM): Limit 6000, Requested 9000",
    "Invalid value for 'temperature': must be at most 2",
    "The model `gpt-9` does not exist",
    "max_tokens must be at least 1, got 0.",
    "Invalid 'messages[0].content': expected a string, got null",
    "you must provide a model parameter",
    "Failed to deserialize the JSON body: missing field `content`",
    "",
]


@pytest.mark.parametrize("text", OVERLONG)
def test_refusals_for_length_are_recognised(text: str) -> None:
    assert is_overlong(text)
    assert is_overlong(text.upper() if "`" not in text else text)


@pytest.mark.parametrize("text", OTHER)
def test_other_refusals_are_not_taken_for_length(text: str) -> None:
    assert not is_overlong(text)


# --- what got lost on the way -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_text_that_was_paid_for_and_is_not_there_is_a_bad_reply_and_no_empty_answer(shape: Any) -> None:
    with pytest.raises(BadReplyError, match="no content, although its usage counts 2 tokens"):
        read_response(shape(reply({"content": None})))


@pytest.mark.parametrize(
    "instead",
    [
        {"refusal": "no"},
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"tool_calls": [CALL]},
        {"function_call": {"name": "f", "arguments": "{}"}},
        {"audio": {"id": "a", "data": "…"}},
    ],
    ids=lambda instead: next(iter(instead)),
)
def test_what_stands_in_the_place_of_a_text_is_an_answer(instead: dict[str, Any]) -> None:
    assert not read_response(reply({"content": None, **instead})).text


def test_tokens_of_a_hidden_chain_of_thought_need_not_have_become_text() -> None:
    thinking = {"completion_tokens": 64, "prompt_tokens": 1, "completion_tokens_details": {"reasoning_tokens": 64}}
    assert read_response({**reply({"content": None}), "usage": thinking}).text == ""


def test_less_than_no_tokens_are_not_counted() -> None:
    less = [{"prompt_tokens": 9, "completion_tokens": -1}, {"prompt_tokens": -1, "completion_tokens": 9}]
    used = [read_response({**reply({"content": "4"}), "usage": usage}).usage for usage in less]
    assert [one and one.total_tokens for one in used] == [9, None]


def test_nothing_that_cost_nothing_is_an_empty_answer() -> None:
    assert read_response({**reply({"content": None}), "usage": None}).text == ""
    nothing = {"prompt_tokens": 9, "completion_tokens": 0}
    assert read_response({**reply({"content": None}), "usage": nothing}).text == ""


def test_a_filtered_reply_may_have_no_text() -> None:
    filtered = reply({"content": None})
    filtered["choices"][0]["finish_reason"] = "content_filter"
    assert read_response(filtered).finish_reason == "content_filter"


@pytest.mark.parametrize("content", [5, 1.5, True, {"text": "4"}])
def test_a_content_that_is_neither_text_nor_parts_is_a_bad_reply(content: Any) -> None:
    with pytest.raises(BadReplyError, match="content of the reply is a"):
        read_response(reply({"content": content}))


def test_a_plain_completion_whose_text_got_lost_is_a_bad_reply() -> None:
    lost = {"choices": [{"text": None, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1, "completion_tokens": 7}}
    with pytest.raises(BadReplyError, match="counts 7 tokens"):
        read_response(lost, "completion")


@pytest.mark.parametrize("role", ["model", "user", "", None])
def test_a_reply_is_the_assistants_whatever_its_server_calls_it(role: Any) -> None:
    assert read_response(reply({"role": role})).message == {"role": "assistant", "content": "4"}
