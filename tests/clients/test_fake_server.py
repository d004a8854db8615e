"""The fake server: its three dialects as the real SDKs read them, its faults, and its life."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import aiohttp
import openai
import pytest

from verifiers import errors
from verifiers.clients import Chaos, FakeServer

QUESTION = [{"role": "user", "content": "2+2?"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":2}'}}


def sdk(server: FakeServer, **kwargs: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, **{"api_key": "k", "max_retries": 0, **kwargs})


def test_openais_sdk_reads_chat_completions_models_and_responses() -> None:
    with FakeServer(lambda prompt: "4", tokens=True) as server, sdk(server) as client:
        chat = client.chat.completions.create(model="m", messages=QUESTION, temperature=0)
        text = client.completions.create(model="m", prompt="2+2=")
        response = client.responses.create(model="m", input="2+2?", instructions="Be brief.")
        assert [chat.choices[0].message.content, text.choices[0].text, response.output_text] == ["4", "4", "4"]
        assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
        assert chat.choices[0].token_ids == [ord("4"), 257]
        assert len(chat.choices[0].logprobs.content) == 2
        assert [model.id for model in client.models.list()] == ["fake"]
        assert [request.path for request in server.requests] == [
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/responses",
        ]
        assert server.requests[0].body["temperature"] == 0
        assert server.requests[0].headers["Authorization"] == "Bearer k"


def test_a_prompt_of_token_ids_is_answered_and_one_of_anything_else_refused_in_a_sentence() -> None:
    with FakeServer(lambda prompt: prompt.upper(), tokens=True) as server, sdk(server) as client:
        for prompt in ([104, 105], [[104, 105]], ["hi"], "hi"):
            told = client.completions.create(model="m", prompt=prompt)
            assert (told.choices[0].text, told.prompt_token_ids) == ("HI", [104, 105])
        for prompt, why in (
            ([9707], "tokens are bytes|tokens of a FakeClient are bytes"),
            (["hi", "you"], "must be a text, a list of token ids"),
            ([1.5], "this one contains 1.5"),
        ):
            with pytest.raises(openai.BadRequestError, match=why):
                client.completions.create(model="m", prompt=prompt)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError, match="this one contains None"):
            client.chat.completions.create(model="m", messages=[None])  # type: ignore[list-item]


def test_tool_calls_survive_in_all_dialects() -> None:
    seen: list[Any] = []

    def reply(messages: Any) -> Any:
        seen.append(messages)
        return {"role": "assistant", "tool_calls": [CALL]} if len(messages) == 1 else "4"

    with FakeServer(reply) as server, sdk(server) as client:
        assert client.chat.completions.create(model="m", messages=QUESTION).choices[0].message.tool_calls[0].id == "c1"
        first = client.responses.create(model="m", input="2+2?").output[0]
        assert (first.type, first.name, first.arguments) == ("function_call", "add", '{"a":2}')
        result = {"type": "function_call_output", "call_id": "c1", "output": "4"}
        client.responses.create(model="m", input=[QUESTION[0], first.model_dump(exclude_none=True), result])
    assert seen[-1][1:] == [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]


def test_anthropics_sdk_reads_messages() -> None:
    anthropic = pytest.importorskip("anthropic")
    seen: list[Any] = []

    def reply(messages: Any) -> Any:
        seen.append(messages)
        return "4" if messages[-1]["role"] == "tool" else {"role": "assistant", "content": "Hm.", "tool_calls": [CALL]}

    with (
        FakeServer(reply) as server,
        anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), api_key="k") as client,
    ):
        args = {"model": "m", "max_tokens": 9, "system": "Be brief."}
        first = client.messages.create(messages=QUESTION, **args)
        assert [block.type for block in first.content] == ["text", "tool_use"]
        assert first.stop_reason == "tool_use"
        assert first.content[1].input == {"a": 2}
        used = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "4"}]}
        second = client.messages.create(messages=[*QUESTION, used, result], **args)
        assert second.content[0].text == "4"
        assert second.usage.output_tokens > 0
    assert [message["role"] for message in seen[1]] == ["system", "user", "assistant", "tool"]
    assert seen[1][2]["tool_calls"] == [CALL]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (errors.RateLimitError("slow down"), openai.RateLimitError),
        (errors.ServerError("oh"), openai.InternalServerError),
        (errors.OverlongPromptError("maximum context length is 10"), openai.BadRequestError),
        (errors.ConnectionFailedError("gone"), openai.APIConnectionError),
        (ZeroDivisionError("a bug in the reply function"), openai.InternalServerError),
    ],
)
def test_what_the_reply_raises_is_what_an_endpoint_would_say(raised: Exception, expected: type[Exception]) -> None:
    with FakeServer(raised) as server, sdk(server) as client, pytest.raises(expected):
        client.chat.completions.create(model="m", messages=QUESTION)


def test_a_wrong_key_is_refused_and_repeated_as_real_endpoints_do() -> None:
    with FakeServer("4", api_key="right") as server:
        with sdk(server, api_key="sk-wrong") as client, pytest.raises(openai.AuthenticationError, match="sk-wrong"):
            client.chat.completions.create(model="m", messages=QUESTION)
        with sdk(server, api_key="right") as client:
            assert client.chat.completions.create(model="m", messages=QUESTION).choices[0].message.content == "4"


@pytest.mark.parametrize("extra", [{"n": 2}, {"stream": True}])
def test_what_it_cannot_do_it_refuses(extra: dict[str, Any]) -> None:
    with (
        FakeServer("4") as server,
        sdk(server) as client,
        pytest.raises(openai.BadRequestError, match="leave out stream and n"),
    ):
        client.chat.completions.create(model="m", messages=QUESTION, **extra)


async def post(server: FakeServer, number: int, session: aiohttp.ClientSession) -> str:
    """How one request ends, in a word."""
    body = {"model": "m", "messages": [{"role": "user", "content": f"question {number}"}]}
    try:
        async with session.post(f"{server.url}/chat/completions", json=body) as response:
            if response.status != 200:
                return f"{response.status} {response.headers.get('Retry-After', '')}"
            return "4" if (await response.json())["choices"] else "empty"
    except aiohttp.ClientConnectionError:
        return "reset"
    except ValueError:
        return "broken"


async def post_all(server: FakeServer, numbers: range, at_once: int) -> list[str]:
    slots = asyncio.Semaphore(at_once)
    # One connection each: aiohttp repeats a request by itself when a connection it reuses is dropped.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:

        async def one(number: int) -> str:
            async with slots:
                return await post(server, number, session)

        return await asyncio.gather(*(one(number) for number in numbers))


def outcomes(*, seed: int, at_once: int) -> tuple[list[str], list[str], dict[str, int]]:
    chaos = Chaos(rate=0.5, retry_after_s=0.25, slow_s=0.01)
    with FakeServer("4", chaos=chaos, seed=seed) as server:
        first = asyncio.run(post_all(server, range(100), at_once))
        second = asyncio.run(post_all(server, range(100), at_once))
        assert server.faults == server.fault_kinds.total()
        return first, second, dict(server.fault_kinds)


def test_faults_depend_on_the_seed_and_the_request_and_not_on_the_concurrency() -> None:
    alone = outcomes(seed=1, at_once=1)
    assert outcomes(seed=1, at_once=64) == alone
    assert outcomes(seed=2, at_once=64) != alone
    first, second, kinds = alone
    assert first != second, "a second attempt at the same request meets its own fate"
    assert set(first) == {"4", "500 ", "429 0.25", "reset", "broken", "empty"}
    assert set(kinds) == {"rate_limit", "server_error", "reset", "slow", "broken_json", "empty"}
    assert 60 < sum(kinds.values()) < 140


@pytest.mark.parametrize("arguments", [{"rate": 1.5}, {"kinds": ("earthquake",)}, {"kinds": ()}])
def test_chaos_that_makes_no_sense_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"rate|kinds|faults"):
        Chaos(**arguments)


def test_it_works_from_async_code_and_stops_while_a_reply_is_due() -> None:
    async def main() -> float:
        async with FakeServer("4", latency_s=30) as server, aiohttp.ClientSession() as session:
            waiting = asyncio.create_task(post(server, 0, session))
            while not server.requests:
                await asyncio.sleep(0.005)
            began = time.monotonic()
            waiting.cancel()
        return time.monotonic() - began

    assert asyncio.run(main()) < 2


def test_outside_its_block_it_says_that_it_is_not_running() -> None:
    server = FakeServer("4")
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.url
    with server, pytest.raises(RuntimeError, match="already running"):
        server.start()
    server.stop()
    with server:
        assert server.url.endswith("/v1")


def test_it_answers_many_requests_quickly() -> None:
    with FakeServer("4") as server:
        replies = asyncio.run(post_all(server, range(1000), 64))
    assert replies == ["4"] * 1000
    assert len(server.requests) == 1000


def test_a_client_that_takes_no_more_of_an_endless_reply_is_no_error_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "verifiers.clients")
    body = b'{"model": "m", "messages": []}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with FakeServer("4", chaos=Chaos(rate=1.0, kinds=("endless",))) as server:
        with socket.create_connection((server.host, server.port)) as connection:
            connection.sendall(head + body)
            connection.recv(100)
        deadline = time.monotonic() + 60
        while "disconnected" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "disconnected before the end of POST /v1/chat/completions" in caplog.text
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]
