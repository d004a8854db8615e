"""The server: the client of OpenAI and ours talk to it; streams, tools, logprobs, keys, full queues, lost clients."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
openai = pytest.importorskip("openai")

from tests.engine import tiny  # noqa: E402
from verifiers import errors  # noqa: E402
from verifiers.clients.http import HTTPClient  # noqa: E402
from verifiers.clients.protocol import Request  # noqa: E402
from verifiers.engine import LocalModel, LocalServer  # noqa: E402

ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
USER: Any = [{"role": "user", "content": "hello world"}]
SAID = 'Let me see 🎉.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'


class Setup:
    """A server over a model that says what it is told to."""

    def __init__(self) -> None:
        self.tokenizer = tiny.tokenizer(tiny.HERMES)
        self.module = tiny.model(self.tokenizer)
        self.local = LocalModel(self.module, self.tokenizer, rows=4, name="tiny")
        self.server = LocalServer(self.local)

    def say(self, reply: str, prompt: Any = USER, tools: Any = None) -> tiny.Scripted:
        script = tiny.Scripted(self.module)
        shown = self.local.load().template.render(prompt, tools)
        ids = self.tokenizer.encode(shown, add_special_tokens=False)
        script.say(self.tokenizer.encode(reply, add_special_tokens=False), after=len(ids))
        return script


@pytest.fixture(scope="module")
def running() -> Iterator[Setup]:
    setup = Setup()
    with setup.local, setup.server:
        yield setup


@pytest.fixture
def setup(running: Setup) -> Iterator[Setup]:
    yield running
    running.module._forward_hooks.clear()
    running.module._forward_hooks_with_kwargs.clear()


@pytest.fixture
def client(setup: Setup) -> Iterator[Any]:
    with openai.OpenAI(base_url=setup.server.url, api_key="none", max_retries=0) as made:
        yield made


def call(url: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], Any]:
    """A bare request: status, headers, and the body as JSON where it is."""
    content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            status, found, read = response.status, dict(response.headers), response.read()
    except urllib.error.HTTPError as error:
        with error:
            status, found, read = error.code, dict(error.headers), error.read()
    try:
        return status, found, json.loads(read)
    except ValueError:
        return status, found, read.decode()


# --- OpenAI's client ----------------------------------------------------------------------------------------------


def test_openais_client_lists_the_model_and_chats(setup: Setup, client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 512
    setup.say("the answer<|im_end|>")
    reply = client.chat.completions.create(model="tiny", messages=USER, temperature=0)
    assert reply.choices[0].message.content == "the answer"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert not hasattr(reply, "prompt_token_ids")


def test_openais_client_gets_logprobs_of_the_tokens_it_reads(setup: Setup, client: Any) -> None:
    setup.say("the answer<|im_end|>")
    reply = client.chat.completions.create(model="tiny", messages=USER, temperature=0, logprobs=True)
    content = reply.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == "the answer<|im_end|>"
    assert bytes(content[0].bytes).decode() == content[0].token
    assert all(entry.logprob <= 0 for entry in content)
    assert reply.choices[0].token_ids == setup.tokenizer.encode("the answer<|im_end|>", add_special_tokens=False)
    assert reply.prompt_token_ids


def test_openais_client_calls_tools(setup: Setup, client: Any) -> None:
    setup.say(SAID, tools=[ADD])
    reply = client.chat.completions.create(model="tiny", messages=USER, tools=[ADD], temperature=0)
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.choices[0].message.tool_calls[0].function.name == "add"
    history = [*USER, reply.choices[0].message, {"role": "tool", "tool_call_id": "x", "content": "2"}]
    assert client.chat.completions.create(model="tiny", messages=history, tools=[ADD], max_tokens=2).choices


def test_a_stream_adds_up_to_the_whole_reply(setup: Setup, client: Any) -> None:
    setup.say("naïve 🎉 answer<|im_end|>")
    asked = {"model": "tiny", "messages": USER, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "naïve 🎉 answer"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [token for c in chunks if c.choices for token in c.choices[0].token_ids] == whole.choices[0].token_ids
    streamed = [entry.logprob for c in chunks if c.choices for entry in c.choices[0].logprobs.content]
    assert streamed == pytest.approx([entry.logprob for entry in whole.choices[0].logprobs.content], abs=1e-4)
    assert len(chunks) > 5


def test_a_streamed_tool_call_comes_as_one_and_never_as_text(setup: Setup, client: Any) -> None:
    setup.say(SAID, tools=[ADD])
    asked = {"model": "tiny", "messages": USER, "tools": [ADD], "temperature": 0, "stream": True}
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked)]
    assert "".join(c.delta.content or "" for c in chunks).strip() == "Let me see 🎉."
    assert chunks[-1].delta.tool_calls[0].function.arguments == '{"a": 1}'
    assert chunks[-1].finish_reason == "tool_calls"
    cut = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, max_tokens=40)]
    assert "<tool_call>" in "".join(c.delta.content or "" for c in cut)
    assert not any(c.delta.tool_calls for c in cut)


def test_a_stream_of_several_choices_with_a_stop_string(setup: Setup, client: Any) -> None:
    setup.say("hello world")
    stream = client.chat.completions.create(
        model="tiny", messages=USER, temperature=0, n=2, stop=["wor"], stream=True, max_tokens=8
    )
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["hello ", "hello "]


def test_plain_completions_of_one_prompt_or_many(client: Any) -> None:
    one = client.completions.create(model="tiny", prompt="hello", max_tokens=4, seed=1, logprobs=1)
    assert len(one.choices[0].logprobs.token_logprobs) == one.usage.completion_tokens
    many = client.completions.create(model="tiny", prompt=["hello", "the"], max_tokens=4, seed=1, n=2)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text == one.choices[0].text
    pieces = list(client.completions.create(model="tiny", prompt="hello", max_tokens=4, seed=1, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == one.choices[0].text
    by_ids = client.completions.create(model="tiny", prompt=one.prompt_token_ids, max_tokens=4, seed=1)
    assert by_ids.choices[0].text == one.choices[0].text


def test_openais_async_client_many_at_once(setup: Setup) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=setup.server.url, api_key="none") as client:

            async def one(n: int) -> str:
                stream = await client.chat.completions.create(
                    model="tiny", messages=USER, max_tokens=6, seed=n % 2, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(n) for n in range(12)))

    texts = asyncio.run(main())
    assert len(set(texts)) == 2
    assert texts[0] == texts[2]


# --- our client ---------------------------------------------------------------------------------------------------


def test_our_client_gets_exact_tokens(setup: Setup) -> None:
    request = Request(
        model="tiny", prompt=USER, sampling={"max_tokens": 6, "seed": 1, "logprobs": True, "return_token_ids": True}
    )
    over_http = asyncio.run(HTTPClient(setup.server.url).complete(request))
    here = asyncio.run(setup.local.complete(request))
    assert over_http.tokens is not None
    assert here.tokens is not None
    assert over_http.tokens.prompt_ids == here.tokens.prompt_ids
    assert over_http.tokens.completion_ids == here.tokens.completion_ids
    assert over_http.tokens.logprobs == pytest.approx(here.tokens.logprobs, abs=1e-4)
    assert over_http.raw["sampling"]["temperature"] == 1.0


def test_our_client_knows_an_overlong_prompt_and_a_refusal(setup: Setup, client: Any) -> None:
    def ask(content: str, **sampling: Any) -> None:
        prompt = [{"role": "user", "content": content}]
        asyncio.run(HTTPClient(setup.server.url).complete(Request(model="tiny", prompt=prompt, sampling=sampling)))

    with pytest.raises(errors.OverlongPromptError):
        ask("x" * 600)
    with pytest.raises(errors.RequestRefusedError, match="top_logprobs"):
        ask("x", logprobs=True, top_logprobs=30)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 600}])
    assert caught.value.code == "context_length_exceeded"


# --- the rest of the house ----------------------------------------------------------------------------------------


def test_health_and_metrics(setup: Setup, client: Any) -> None:
    client.chat.completions.create(model="tiny", messages=USER, max_tokens=2)
    assert call(f"{setup.server.root}/health")[2]["status"] == "ok"
    status, headers, text = call(f"{setup.server.root}/metrics")
    assert (status, headers["Content-Type"].partition(";")[0]) == (200, "text/plain")
    values = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
    assert int(values["verifiers_requests_total"]) >= 1
    assert int(values["verifiers_completion_tokens_total"]) >= 1
    assert values["verifiers_rows"] == "4"


def test_weights_and_cache_can_be_changed_from_another_process(setup: Setup, client: Any, tmp_path: Path) -> None:
    def greedy() -> str:
        reply = client.chat.completions.create(model="tiny", messages=USER, temperature=0, max_tokens=8)
        text: str = reply.choices[0].message.content
        return text

    setup.module.save_pretrained(tmp_path / "old")
    tiny.model(setup.tokenizer, seed=5).save_pretrained(tmp_path / "new")
    old = greedy()
    status, _, body = call(f"{setup.server.root}/update_weights", {"path": str(tmp_path / "new")})
    assert (status, body["status"]) == (200, "ok")
    assert greedy() != old
    assert call(f"{setup.server.root}/update_weights", {"path": str(tmp_path / "old")})[0] == 200
    assert call(f"{setup.server.root}/reset_prefix_cache", {})[0] == 200
    assert greedy() == old
    status, _, body = call(f"{setup.server.root}/update_weights", {"path": str(tmp_path)})
    assert status == 400
    assert "holds no .safetensors" in body["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/chat/completions", b"{", 400, "invalid_request"),
        ("/v1/chat/completions", b"\xff\xfe", 400, "invalid_request"),
        ("/v1/chat/completions", [], 400, "invalid_request"),
        ("/v1/chat/completions", {"model": "tiny"}, 400, "invalid_request"),
        ("/v1/chat/completions", {"model": "tiny", "messages": "hi"}, 400, "invalid_request"),
        ("/v1/chat/completions", {"model": "tiny", "messages": [3]}, 400, "invalid_request"),
        ("/v1/chat/completions", {"model": "tiny", "messages": USER, "nonsense": 1}, 400, "invalid_request"),
        ("/v1/chat/completions", {"model": "tiny", "messages": USER, "tools": "x"}, 400, "invalid_request"),
        ("/v1/chat/completions", {"model": "tiny", "messages": USER, "tools": [{}]}, 400, "invalid_request"),
        ("/v1/chat/completions", {"model": "tiny", "messages": USER, "stream": "yes"}, 400, "invalid_request"),
        ("/v1/chat/completions", {"model": "other", "messages": USER}, 404, "model_not_found"),
        ("/v1/chat/completions", {"model": "tiny", "messages": USER, "stream": True, "n": 0}, 400, "invalid_request"),
        ("/v1/completions", {"model": "tiny"}, 400, "invalid_request"),
        ("/v1/completions", {"model": "tiny", "prompt": [[10**9]]}, 400, "invalid_request"),
        ("/v1/completions", {"model": "tiny", "prompt": ["a", 3]}, 400, "invalid_request"),
        ("/v1/completions", {"model": "tiny", "prompt": ["a", 3], "stream": True}, 400, "invalid_request"),
        ("/v1/nowhere", {}, 404, "not_found"),
        ("/v1/models", {}, 405, "invalid_request"),
        ("/update_weights", {}, 400, "invalid_request"),
    ],
)
def test_bad_requests_get_openais_kind_of_error(setup: Setup, path: str, body: Any, status: int, code: str) -> None:
    found, _, said = call(setup.server.root + path, body)
    assert (found, said["error"]["code"]) == (status, code)
    assert said["error"]["message"]


def test_a_field_in_extra_body_counts_as_one_beside_it(setup: Setup) -> None:
    further = {"return_token_ids": True, "n": 2}
    status, _, said = call(
        f"{setup.server.url}/completions", {"prompt": "hello", "max_tokens": 2, "extra_body": further}
    )
    assert (status, len(said["choices"])) == (200, 2)
    assert all(choice["token_ids"] for choice in said["choices"])
    status, _, said = call(f"{setup.server.url}/completions", {"prompt": ["a"] * 600, "extra_body": further})
    assert (status, "at most 1024 replies" in said["error"]["message"]) == (400, True)


def test_a_key_is_asked_for_and_never_repeated(setup: Setup) -> None:
    with LocalServer(setup.local, api_key="sk-right") as server:
        assert call(f"{server.root}/health")[0] == 200
        for headers in ({}, {"Authorization": "Bearer sk-wrong"}):
            status, _, body = call(f"{server.url}/models", headers=headers)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            assert "sk-" not in json.dumps(body)
        assert call(f"{server.url}/models", headers={"Authorization": "Bearer sk-right"})[0] == 200


@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
def test_a_key_that_is_no_text_is_a_wrong_key(setup: Setup, header: str) -> None:
    with LocalServer(setup.local, api_key="sk-right") as server:
        status, _, body = call(f"{server.url}/models", headers={header: "\xff\xfe"})  # sent as two bytes, no UTF-8
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")


def test_it_listens_on_this_machine_only_and_not_to_web_pages(setup: Setup) -> None:
    assert setup.server.url.startswith("http://127.0.0.1:")
    body = {"model": "tiny", "messages": USER, "max_tokens": 1}
    assert call(f"{setup.server.url}/chat/completions", body, {"Origin": "https://evil.example"})[0] == 403


def test_a_full_queue_is_a_429_with_retry_after(setup: Setup) -> None:
    with (
        LocalModel(setup.module, setup.tokenizer, rows=1, max_waiting=1, name="tiny") as local,
        LocalServer(local) as server,
    ):
        body = {"model": "tiny", "messages": USER, "n": 2}
        for stream in (False, True):
            status, headers, said = call(f"{server.url}/chat/completions", {**body, "stream": stream})
            assert (status, said["error"]["code"]) == (429, "queue_full")
            assert float(headers["Retry-After"]) > 0
        assert "verifiers_refused_full_total 2" in call(f"{server.root}/metrics")[2]


def test_a_client_that_hangs_up_in_mid_stream_is_no_error_of_the_server(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    """By an end and by a reset; what aiohttp would log as an error, with a traceback, is one line for who debugs."""
    caplog.set_level("DEBUG", "verifiers.clients")
    body = json.dumps({"model": "tiny", "messages": USER, "stream": True, "max_tokens": 400}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    deadline = time.monotonic() + 60
    linger = 1
    while "disconnected" not in caplog.text:  # else, if the engine is between tokens, the handler is cancelled
        assert time.monotonic() < deadline
        linger = 1 - linger
        with socket.create_connection(("127.0.0.1", setup.server.port)) as connection:
            connection.sendall(head + body)
            connection.recv(100)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", linger, 0))
    while setup.local.engine.running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "disconnected before the end of POST /v1/chat/completions" in caplog.text
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_its_client_dropped_is_freed(setup: Setup, stream: bool) -> None:
    engine = setup.local.engine
    body = {
        "messages": USER,
        "max_tokens": 490,
        "stream": stream,
        "logit_bias": {str(setup.tokenizer.eos_token_id): -100},
    }
    content = json.dumps(body).encode()
    sampled = engine.tokens
    with socket.create_connection(("127.0.0.1", setup.server.port)) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        wait_until(lambda: bool(engine.running))
    wait_until(lambda: not engine.running)
    assert engine.tokens - sampled < 490


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_failure_in_the_middle_of_a_stream_is_said_in_the_stream(setup: Setup, client: Any) -> None:
    script = setup.say("the")
    script.ids = [*script.ids, 3, 4, 5]
    seen = []

    def fail(module: Any, args: Any, output: Any) -> Any:
        seen.append(1)
        if len(seen) > 3:
            output.logits.fill_(float("nan"))
        return output

    setup.module.register_forward_hook(fail)
    with pytest.raises(openai.APIError, match="NaN"):
        list(client.chat.completions.create(model="tiny", messages=USER, temperature=0, stream=True))


def test_a_server_is_used_in_a_block_and_a_taken_port_is_said(setup: Setup) -> None:
    server = LocalServer(setup.local)
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.url
    with pytest.raises(OSError, match=r"address already in use|error while attempting to bind"):
        LocalServer(setup.local, port=setup.server.port).start()
