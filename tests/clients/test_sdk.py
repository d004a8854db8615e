"""Other people's client objects: what they are called with, and what their replies and exceptions become."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import httpx2
import openai
import pytest

from verifiers import errors
from verifiers.clients import Completion, FakeServer, Request, SDKClient

QUESTION = [{"role": "user", "content": "2+2?"}]
REPLY = {"choices": [{"message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}]}
TEXT_REPLY = {"choices": [{"text": "4", "finish_reason": "stop"}]}


def ask(client: SDKClient, **changes: Any) -> Completion:
    return asyncio.run(client.complete(Request(**{"model": "m", "prompt": QUESTION, **changes})))


def host(create: Any, **attributes: Any) -> Any:
    """The least that a host's client object can be."""
    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)), **attributes)


class Recorder:
    def __init__(self, reply: Any = REPLY) -> None:
        self.kwargs: dict[str, Any] = {}
        self.thread = ""
        self.reply = reply

    def __call__(self, **kwargs: Any) -> Any:
        self.kwargs, self.thread = kwargs, threading.current_thread().name
        return self.reply

    async def later(self, **kwargs: Any) -> Any:
        return self(**kwargs)


def test_sync_objects_run_in_a_worker_thread_and_async_ones_on_the_loop() -> None:
    sync, asynchronous = Recorder(), Recorder()
    assert ask(SDKClient(host(sync))).text == "4"
    assert ask(SDKClient(host(asynchronous.later))).text == "4"
    assert sync.thread != threading.current_thread().name
    assert asynchronous.thread == threading.current_thread().name


def test_a_sync_object_never_blocks_the_loop_however_quick_it_was_before() -> None:
    pauses_s = iter([0.0] * 5 + [0.3])

    def create(**kwargs: Any) -> Any:
        time.sleep(next(pauses_s))
        return REPLY

    async def main() -> int:
        client, beats = SDKClient(host(create)), 0
        for _ in range(5):
            await client.complete(Request(model="m", prompt=QUESTION))
        slow = asyncio.create_task(client.complete(Request(model="m", prompt=QUESTION)))
        while not slow.done():
            await asyncio.sleep(0.01)
            beats += 1
        return beats

    assert asyncio.run(main()) > 5


def test_none_is_dropped_max_tokens_renamed_for_chats_and_the_callers_dict_left_alone() -> None:
    recorder = Recorder()
    sampling = {"max_tokens": 9, "seed": None, "temperature": 0.5}
    ask(SDKClient(host(recorder)), sampling=sampling, tools=[])
    assert recorder.kwargs == {"model": "m", "messages": QUESTION, "max_completion_tokens": 9, "temperature": 0.5}
    assert sampling == {"max_tokens": 9, "seed": None, "temperature": 0.5}
    ask(SDKClient(host(recorder)), tools=[{"type": "function"}])
    assert recorder.kwargs["tools"] == [{"type": "function"}]


def test_completions_keep_max_tokens() -> None:
    recorder = Recorder(TEXT_REPLY)
    sdk = SimpleNamespace(completions=SimpleNamespace(create=recorder))
    request = {"prompt": "2+2=", "message_type": "completion", "sampling": {"max_tokens": 9}}
    assert ask(SDKClient(sdk), **request).text == "4"
    assert recorder.kwargs == {"model": "m", "prompt": "2+2=", "max_tokens": 9}
    with pytest.raises(errors.RequestRefusedError, match="does not support chat requests"):
        ask(SDKClient(sdk))


def test_arguments_that_openais_function_does_not_know_go_into_the_extra_body() -> None:
    with FakeServer("4") as server, openai.OpenAI(base_url=server.url, api_key="k") as sdk:
        sampling = {"top_k": 20, "min_p": 0.1, "temperature": 1, "extra_body": {"min_p": 0.2}}
        assert ask(SDKClient(sdk), sampling=sampling).text == "4"
        body = server.requests[0].body
    assert {name: body[name] for name in ("top_k", "min_p", "temperature")} == {
        "top_k": 20,
        "min_p": 0.2,
        "temperature": 1,
    }


def test_openais_own_objects_work_sync_and_async() -> None:
    with FakeServer(lambda prompt: "4", tokens=True) as server:
        with openai.OpenAI(base_url=server.url, api_key="k") as sdk:
            completions = [ask(SDKClient(sdk)), ask(SDKClient(sdk), prompt="2+2=", message_type="completion")]
        completions.append(ask(SDKClient(openai.AsyncOpenAI(base_url=server.url, api_key="k"))))
    assert [completion.text for completion in completions] == ["4"] * 3
    assert all(completion.tokens is not None for completion in completions)
    assert all(completion.usage is not None for completion in completions)


def test_an_async_object_works_in_one_loop_after_another() -> None:
    async def many(client: SDKClient) -> list[str]:
        replies = await asyncio.gather(*(client.complete(Request(model="m", prompt=QUESTION)) for _ in range(20)))
        return [reply.text for reply in replies]

    with FakeServer("4", latency_s=0.02) as server:
        http = httpx2.AsyncClient(timeout=5)
        sdk = openai.AsyncOpenAI(base_url=server.url, api_key="k", max_retries=0, http_client=http)
        for _ in range(3):
            assert asyncio.run(many(SDKClient(sdk))) == ["4"] * 20
        assert len(server.requests) == 60


def test_mocks_pass() -> None:
    sdk = MagicMock(spec=openai.AsyncOpenAI)
    message = MagicMock(content="4", role="assistant", tool_calls=None)
    sdk.chat.completions.create = AsyncMock(return_value=MagicMock(choices=[MagicMock(message=message)]))
    assert ask(SDKClient(sdk)).text == "4"
    sdk = MagicMock()
    sdk.chat.completions.create = MagicMock(return_value=REPLY)
    assert ask(SDKClient(sdk)).text == "4"


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (errors.RateLimitError("slow down"), errors.RateLimitError),
        (errors.ServerError("oh"), errors.ServerError),
        (errors.OverlongPromptError("maximum context length is 10 tokens"), errors.OverlongPromptError),
        (errors.RequestRefusedError("no such model"), errors.RequestRefusedError),
        (errors.ConnectionFailedError("gone"), errors.ConnectionFailedError),
        (errors.EmptyModelResponseError("nothing"), errors.EmptyModelResponseError),
        (errors.BadReplyError("<html>"), errors.ModelError),
    ],
)
def test_what_the_sdk_raises_becomes_ours_with_the_cause(raised: errors.Error, expected: type[errors.Error]) -> None:
    with FakeServer(raised) as server, openai.OpenAI(base_url=server.url, api_key="k", max_retries=0) as sdk:
        with pytest.raises(errors.Error) as caught:
            ask(SDKClient(sdk))
        assert len(server.requests) == 1, "the object's own retries are all there are"
    assert isinstance(caught.value, expected)
    if not isinstance(caught.value, errors.EmptyModelResponseError):
        assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (type("RateLimitError", (Exception,), {})("x"), errors.RateLimitError),
        (type("HostError", (Exception,), {"status_code": 503})("x"), errors.ServerError),
        (type("HostError", (Exception,), {"status_code": 404})("x"), errors.RequestRefusedError),
        (type("ReadTimeout", (Exception,), {})("x"), errors.DeadlineError),
        (TimeoutError("x"), errors.DeadlineError),
        (ConnectionResetError("x"), errors.ConnectionFailedError),
        (ValueError("prompt is too long: 9 tokens > 8 maximum"), errors.OverlongPromptError),
        (KeyError("x"), errors.ModelError),
    ],
)
def test_exceptions_of_other_hosts_are_read_by_name_and_status(raised: Exception, expected: type[Exception]) -> None:
    def create(**kwargs: Any) -> Any:
        raise raised

    with pytest.raises(errors.Error) as caught:
        ask(SDKClient(host(create)))
    assert type(caught.value) is expected


def test_a_key_never_leaves_in_an_exception_its_cause_or_its_traceback() -> None:
    with FakeServer("4", api_key="right") as server:
        sdk = openai.OpenAI(base_url=server.url, api_key="sk-secret-123", max_retries=0)
        with sdk, pytest.raises(errors.RequestRefusedError) as caught:
            ask(SDKClient(sdk))
    shown = str(errors.describe(caught.value)) + "".join(traceback.format_exception(caught.value))
    assert "sk-secret-123" not in shown
    assert "[hidden]" in shown


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_deadline_of_a_request_holds(kind: str) -> None:
    async def create_later(**kwargs: Any) -> Any:
        await asyncio.sleep(5)

    sdk = host(create_later) if kind == "async" else host(lambda **kwargs: time.sleep(0.5))
    began = time.monotonic()
    with pytest.raises(errors.DeadlineError, match=r"no reply within 0\.05 s"):
        ask(SDKClient(sdk), timeout_s=0.05)
    assert time.monotonic() - began < 0.4


def test_an_object_without_create_is_refused_when_the_client_is_made() -> None:
    with pytest.raises(TypeError, match=r"a dict has neither \.chat\.completions\.create nor"):
        SDKClient({})


def test_base_url_and_key_are_read_if_they_are_there() -> None:
    client = SDKClient(host(Recorder(), base_url="http://x/v1/", api_key="k"))
    assert (client.base_url, client.api_key) == ("http://x/v1", "k")
    assert (SDKClient(host(Recorder())).base_url, SDKClient(host(Recorder())).api_key) == ("", None)
