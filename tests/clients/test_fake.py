"""The fake client: every kind of reply, what it records, and the tokens it can give."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers import errors
from verifiers.clients import Completion, FakeClient, Request
from verifiers.clients.fake import END, decode_tokens, encode_prompt

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


def ask(client: FakeClient, prompt: Any = QUESTION, **kwargs: Any) -> Completion:
    return asyncio.run(client.complete(Request(model="m", prompt=prompt, **kwargs)))


def test_a_text_is_the_reply_to_everything() -> None:
    completion = ask(FakeClient("4"))
    assert completion.message == {"role": "assistant", "content": "4"}
    assert completion.finish_reason == "stop"
    assert completion.model == "m"


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize("prompt", ["a\ud800", [{"role": "user", "content": "a\ud800"}]])
def test_half_a_surrogate_pair_is_a_text_as_it_is_for_other_clients(prompt: Any, with_tokens: bool) -> None:
    completion = ask(FakeClient("b\udfff", tokens=with_tokens), prompt)
    assert completion.text == "b\udfff"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 3


async def _later(messages: Any) -> str:
    await asyncio.sleep(0)
    return messages[-1]["content"] + " 4"


@pytest.mark.parametrize(
    "reply",
    [
        lambda messages: messages[-1]["content"] + " 4",
        lambda request: request.prompt[-1]["content"] + " 4",
        _later,
        {"2+2?": "2+2? 4"},
        {"2+2?": lambda request: f"{request.prompt[-1]['content']} 4"},
        [_later],
        {"role": "assistant", "content": "2+2? 4"},
        {"content": "2+2? 4"},
        Completion(message={"role": "assistant", "content": "2+2? 4"}),
        lambda messages: Completion(message={"role": "assistant", "content": "2+2? 4"}),
        {"choices": [{"message": {"role": "assistant", "content": "2+2? 4"}, "finish_reason": "stop"}]},
    ],
)
def test_a_reply_can_be_a_function_a_message_a_completion_or_a_table(reply: Any) -> None:
    assert ask(FakeClient(reply)).text == "2+2? 4"


def test_a_list_is_used_in_order_and_then_again() -> None:
    client = FakeClient(["a", lambda messages: "b"])
    assert [ask(client).text for _ in range(5)] == ["a", "b", "a", "b", "a"]


def test_a_tool_call_ends_the_turn_for_that_reason() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    completion = ask(FakeClient({"role": "assistant", "tool_calls": [call]}))
    assert completion.finish_reason == "tool_calls"
    assert completion.message["content"] is None
    assert completion.choices[0].message.tool_calls[0].function.name == "add"


@pytest.mark.parametrize("reply", [errors.RateLimitError("slow down"), [errors.RateLimitError], lambda m: 1 / 0])
def test_an_error_is_raised_as_one_of_ours(reply: Any) -> None:
    with pytest.raises(errors.ModelError) as caught:
        ask(FakeClient(reply))
    if callable(reply):
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    else:
        assert isinstance(caught.value, errors.RateLimitError)


def test_a_question_that_is_not_in_the_table_is_named() -> None:
    with pytest.raises(errors.RequestRefusedError, match=r"no reply to '2\+2\?'; it knows \['3\+3\?'\]"):
        ask(FakeClient({"3+3?": "6"}))


@pytest.mark.parametrize("reply", [42, [], ["a", 42]])
def test_what_cannot_be_a_reply_is_refused_when_the_client_is_made(reply: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="repl"):
        FakeClient(reply)


def test_a_function_that_returns_nonsense_is_a_model_error() -> None:
    with pytest.raises(errors.ModelError, match="not 42"):
        ask(FakeClient(lambda messages: 42))


def test_requests_are_kept_as_they_were_when_they_were_made() -> None:
    client, messages = FakeClient("4"), list(QUESTION)
    ask(client, messages, sampling={"temperature": 0})
    messages.append({"role": "user", "content": "later"})
    assert client.requests[0].prompt == QUESTION
    assert client.requests[0].sampling == {"temperature": 0}


def test_the_deadline_of_a_request_holds() -> None:
    with pytest.raises(errors.DeadlineError, match=r"0\.01 s"):
        ask(FakeClient("4", latency_s=5), timeout_s=0.01)


def test_completion_requests_get_the_prompt_as_a_string() -> None:
    assert ask(FakeClient(lambda prompt: prompt + "4"), "2+2=", message_type="completion").text == "2+2=4"


def test_it_also_looks_like_an_openai_client_to_sync_and_async_code() -> None:
    client = FakeClient("4")
    assert client.chat.completions.create(model="m", messages=QUESTION, temperature=0).choices[0].message.content == "4"
    assert client.completions.create(model="m", prompt="2+2=").choices[0].text == "4"
    assert client.requests[0].sampling == {"temperature": 0}

    async def main() -> str:
        return (await client.chat.completions.create(model="m", messages=QUESTION)).text

    assert asyncio.run(main()) == "4"


def test_usage_is_the_same_with_and_without_tokens() -> None:
    assert ask(FakeClient("vier")).usage == ask(FakeClient("vier", tokens=True)).usage


texts = st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=20)


@given(question=texts, reply=texts, next_question=texts)
def test_tokens_are_exact_and_the_next_turns_prompt_begins_with_this_turn(
    question: str, reply: str, next_question: str
) -> None:
    client, first = FakeClient(reply, tokens=True), [{"role": "user", "content": question}]
    completion = ask(client, first)
    tokens = completion.tokens
    assert tokens is not None
    assert decode_tokens(tokens.completion_ids) == reply
    assert tokens.completion_ids[-1] == END
    assert tokens.prompt_ids == encode_prompt(first)
    assert all(logprob < 0 for logprob in tokens.logprobs)
    second = [*first, completion.message, {"role": "user", "content": next_question}]
    turn = tokens.prompt_ids + tokens.completion_ids
    assert encode_prompt(second)[: len(turn)] == turn
    assert ask(client, first).tokens == tokens
