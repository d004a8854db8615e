"""The client for OpenAI-compatible endpoints: what it sends, what it gives back, and how it takes trouble."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
import time
import traceback
from base64 import b64encode
from email.utils import formatdate
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from tests.clients.scripted import CHAT, KEY, Server, ask, break_off, drip, drop, echo_key, hurry, run
from verifiers import errors
from verifiers.clients.fake_server import FakeServer
from verifiers.clients.http import HTTPClient
from verifiers.errors import describe

EMPTY = {**CHAT, "choices": []}


async def complete(*script: Any, request: Any = None, **options: Any) -> tuple[Any, Server, list[float]]:
    """Ask a scripted server once, in a hurry: what came of it, the server, and the waits between attempts."""
    async with Server(*script) as server:
        client = HTTPClient(f"{server.url}/v1", KEY, **options)
        sleeps = hurry(client)
        try:
            outcome: Any = await client.complete(request or ask())
        except errors.Error as error:
            outcome = error
        return outcome, server, sleeps.seconds


# --- what is sent -------------------------------------------------------------------------------------------------


def test_a_chat_goes_to_chat_completions_with_the_key_and_comes_back_whole() -> None:
    completion, server, _ = run(complete())
    assert (completion.text, completion.finish_reason, completion.model) == ("4", "stop", "m")
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (10, 2)
    assert completion.choices[0].message.content == "4"
    assert completion.raw == CHAT
    seen = server.seen[0]
    assert (seen.path, seen.body) == (
        "/v1/chat/completions",
        {"model": "m", "messages": [{"role": "user", "content": "2+2?"}]},
    )
    assert seen.headers["Authorization"] == f"Bearer {KEY}"
    assert seen.headers["Content-Type"] == "application/json"


def test_a_completion_goes_to_completions_and_keeps_max_tokens() -> None:
    reply = {"model": "m", "choices": [{"index": 0, "text": "4", "finish_reason": "length"}]}
    request = ask("2+2=", message_type="completion", sampling={"max_tokens": 5})
    completion, server, _ = run(complete(reply, request=request))
    assert (completion.text, completion.is_truncated) == ("4", True)
    assert (server.seen[0].path, server.seen[0].body) == (
        "/v1/completions",
        {"model": "m", "prompt": "2+2=", "max_tokens": 5},
    )


def test_sampling_arguments_are_translated_and_the_callers_dict_stays_as_it_was() -> None:
    sampling = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": None,
        "extra_body": {"return_token_ids": True},
        "extra_headers": {"X-Trace": "1"},
        "extra_query": {"version": "2"},
        "timeout": 30,
    }
    before = copy.deepcopy(sampling)
    _, server, _ = run(complete(request=ask(sampling=sampling)))
    seen = server.seen[0]
    assert sampling == before
    assert {key: value for key, value in seen.body.items() if key not in ("model", "messages")} == {
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "return_token_ids": True,
    }
    assert (seen.headers["X-Trace"], seen.query) == ("1", "version=2")


def test_tools_and_content_parts_pass_untouched_and_sound_asks_for_text() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    parts = [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk=", "detail": None}},
        {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
    ]
    prompt = [{"role": "user", "content": parts}]
    _, server, _ = run(complete(request=ask(prompt, tools=tools)))
    assert server.seen[0].body == {"model": "m", "messages": prompt, "tools": tools, "modalities": ["text"]}
    _, server, _ = run(complete(request=ask(prompt, sampling={"modalities": ["text", "audio"]})))
    assert server.seen[0].body["modalities"] == ["text", "audio"]


def test_half_a_surrogate_pair_in_the_prompt_does_not_end_the_run() -> None:
    prompt = [{"role": "user", "content": "half \ud83d, whole \ud83d\ude00, plain é"}]
    completion, server, _ = run(complete(request=ask(prompt)))
    assert completion.text == "4"
    assert server.seen[0].body["messages"][0]["content"] == "half \ufffd, whole 😀, plain é"


def test_numpy_prompts_and_numbers_are_sent_as_plain_json() -> None:
    prompt: Any = np.array([{"role": "user", "content": "2+2?"}], dtype=object)
    _, server, _ = run(complete(request=ask(prompt, sampling={"seed": np.int64(3)})))
    assert (server.seen[0].body["messages"], server.seen[0].body["seed"]) == ([{"role": "user", "content": "2+2?"}], 3)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask(sampling={"temperature": float("nan")}), "'temperature' is nan"),
        (ask(sampling={"stream": True}), "'stream'"),
        (ask(sampling={"timeout": "soon"}), "number of seconds"),
        (ask(sampling={"extra_headers": {"X-Bad": "a\r\nb"}}), "'X-Bad'"),
        (ask([{"role": "user", "content": object()}]), "JSON"),
        (ask("a string"), "list of messages"),
        (ask([{"role": "user", "content": "x"}], message_type="completion"), "not messages"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name_before_anything_is_sent(request_: Any, words: str) -> None:
    outcome, server, _ = run(complete(request=request_))
    assert isinstance(outcome, errors.RequestRefusedError)
    assert words in str(outcome)
    assert server.seen == []


def test_prices_give_a_cost() -> None:
    completion, _, _ = run(complete(prices={"prompt": 2.0, "completion": 10.0}))
    assert completion.usage.cost_usd == pytest.approx(40e-6)


def test_a_base_url_with_a_query_keeps_it_behind_the_path() -> None:
    async def go() -> Any:
        async with Server() as server:
            await HTTPClient(f"{server.url}/openai/?api-version=7", headers={"api-key": KEY}).complete(ask())
            return server.seen[0]

    seen = run(go())
    assert (seen.path, seen.query, seen.headers["api-key"]) == ("/openai/chat/completions", "api-version=7", KEY)
    assert "Authorization" not in seen.headers


# --- trouble ------------------------------------------------------------------------------------------------------

PASSING = {
    "rate limit": (429, {"error": {"message": "slow down"}}),
    "server error": (500, b"oops"),
    "overloaded": (529, {"type": "error", "error": {"type": "overloaded_error"}}),
    "request timeout": (408, b""),
    "conflict": (409, b""),
    "too early": (425, b""),
    "dropped": drop,
    "broken off": break_off,
    "half a body of json": b'{"choices": [',
    "a web page": b"<html>starting</html>",
    "not an object": [1, 2],
    "no choices": EMPTY,
    "null choices": {**CHAT, "choices": None},
    "an error with status 200": {"error": {"message": "upstream failed", "code": 502}},
    "vllm's error object": {"object": "error", "message": "engine died", "code": 500},
    "a reply that broke off": {
        "choices": [{"message": {"content": "4", "role": "assistant"}, "finish_reason": "error"}]
    },
    "choices of another shape": {"choices": ["4"]},
    "a message of another shape": {"choices": [{"message": "4"}]},
    "tool calls of another shape": {"choices": [{"message": {"tool_calls": [5]}}]},
    "fewer logprobs than tokens": {
        "prompt_token_ids": [1],
        "choices": [{"message": {"content": "4"}, "token_ids": [2, 3], "logprobs": {"content": [{"logprob": -1.0}]}}],
    },
}


@pytest.mark.parametrize("trouble", PASSING.values(), ids=PASSING.keys())
def test_what_may_pass_is_tried_again(trouble: Any) -> None:
    completion, server, waits = run(complete(trouble, trouble, CHAT))
    assert completion.text == "4"
    assert (len(server.seen), len(waits)) == (3, 2)


LASTING = {
    "rate limit": ((429, b"slow down"), errors.RateLimitError, "429 Too Many Requests: slow down"),
    "server error": ((503, b"starting"), errors.ServerError, "503 Service Unavailable: starting"),
    "dropped": (drop, errors.ConnectionFailedError, "ServerDisconnectedError"),
    "bad json": (b"<html>", errors.BadReplyError, "not a completion: <html>"),
    "no choices": (EMPTY, errors.EmptyModelResponseError, "no choices"),
    "200 with an error": ({"error": "model crashed"}, errors.ServerError, "model crashed"),
}


@pytest.mark.parametrize(("trouble", "kind", "words"), LASTING.values(), ids=LASTING.keys())
def test_what_does_not_pass_ends_in_an_error_named_for_it(trouble: Any, kind: type[Exception], words: str) -> None:
    outcome, server, _ = run(complete(trouble, max_retries=2))
    assert type(outcome) is kind
    assert f" after 3 attempts (POST {server.url}/v1/chat/completions)" in str(outcome)
    assert words in str(outcome)
    assert len(server.seen) == 3


FINAL = {
    "bad request": ((400, b"unknown field"), errors.RequestRefusedError),
    "bad key": ((401, b"who?"), errors.RequestRefusedError),
    "forbidden": ((403, b"no"), errors.RequestRefusedError),
    "no model": ((404, b"no such model"), errors.RequestRefusedError),
    "unprocessable": ((422, b"bad field"), errors.RequestRefusedError),
    "out of money": ((429, {"error": {"code": "insufficient_quota"}}), errors.RequestRefusedError),
    "moved": ((307, b"", {"Location": "https://elsewhere/v1"}), errors.RequestRefusedError),
    "told not to retry": ((500, b"", {"x-should-retry": "false"}), errors.ServerError),
    "too long": ((400, {"error": {"code": "context_length_exceeded"}}), errors.OverlongPromptError),
    "too long, in a 200": ({"error": {"message": "prompt is too long"}}, errors.OverlongPromptError),
    "too long, from a gateway": ((500, b"maximum context length is 9 tokens"), errors.OverlongPromptError),
}


@pytest.mark.parametrize(("trouble", "kind"), FINAL.values(), ids=FINAL.keys())
def test_what_will_not_pass_is_not_tried_again(trouble: Any, kind: type[errors.Error]) -> None:
    outcome, server, waits = run(complete(trouble))
    assert type(outcome) is kind
    assert (len(server.seen), waits) == (1, [])
    assert (outcome.blame == "policy") is (kind is errors.OverlongPromptError)


def test_a_refused_connection_and_an_unknown_host_end_as_connection_failures() -> None:
    async def go(url: str) -> str:
        client = HTTPClient(url, KEY, max_retries=1)
        hurry(client)
        with pytest.raises(errors.ConnectionFailedError) as caught:
            await client.complete(ask())
        return str(caught.value)

    assert "after 2 attempts" in run(go("http://127.0.0.1:9/v1"))
    assert "after 2 attempts" in run(go("http://no-such-host.invalid/v1"))


def test_a_password_in_the_url_and_a_key_as_well_are_refused_clearly_and_without_either() -> None:
    async def go() -> str:
        async with Server() as server:
            url = server.url.replace("http://", "http://me:pa55word@")
            with pytest.raises(errors.RequestRefusedError, match="AUTHORIZATION") as caught:
                await HTTPClient(url, KEY).complete(ask())
            return str(caught.value)

    said = run(go())
    assert KEY not in said
    assert "pa55word" not in said


def test_long_error_bodies_are_cut() -> None:
    outcome, _, _ = run(complete((400, b"x" * 100_000)))
    assert 500 < len(str(outcome)) < 700


@pytest.mark.parametrize(
    ("headers", "low", "high"),
    [
        ({"Retry-After": "7"}, 7, 7),
        ({"retry-after-ms": "1500", "Retry-After": "7"}, 1.5, 1.5),
        ({"Retry-After": "100000"}, 60, 60),
        ({"Retry-After": "-5"}, 0, 0),
        ({"Retry-After": "soon"}, 0, 0),
        ({"Retry-After": "nan"}, 0, 0),
    ],
)
def test_the_wait_an_endpoint_asks_for_is_kept_up_to_a_minute(headers: Any, low: float, high: float) -> None:
    status = 500  # a 429 would also pause the endpoint's limit, in real time
    _, _, waits = run(complete((status, b"", headers), CHAT))
    assert low <= waits[0] <= high


def test_a_date_to_come_back_at_is_understood() -> None:
    _, _, waits = run(complete((500, b"", {"Retry-After": formatdate(time.time() + 20, usegmt=True)}), CHAT))
    assert 17 < waits[0] <= 20


def test_a_rate_limited_endpoint_is_left_alone_by_everyone_until_it_said() -> None:
    async def go() -> list[float]:
        times: list[float] = []

        async def answer(request: web.Request) -> web.StreamResponse:
            times.append(time.monotonic())
            if len(times) == 1:
                return web.Response(status=429, headers={"Retry-After": "0.3"})
            return web.json_response(CHAT)

        async with Server(answer) as server:
            client, other = HTTPClient(f"{server.url}/v1"), HTTPClient(f"{server.url}/v1/")
            hurry(client)
            first = asyncio.create_task(client.complete(ask()))
            while not times:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            await asyncio.gather(first, other.complete(ask()))
        return times

    first, *rest = run(go())
    assert len(rest) == 2
    assert min(rest) - first >= 0.29


# --- deadlines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["client", "request", "sampling"])
def test_a_reply_that_drips_in_meets_the_deadline_of_its_attempt(where: str) -> None:
    options = {"timeout_s": 0.15} if where == "client" else {}
    request = ask(
        timeout_s=0.15 if where == "request" else None, sampling={"timeout": 0.15} if where == "sampling" else {}
    )
    began = time.monotonic()
    outcome, server, _ = run(complete(drip, request=request, **options))
    assert isinstance(outcome, errors.DeadlineError)
    assert "no complete reply within 0.15 s" in str(outcome)
    assert len(server.seen) == 2  # once more, in case a replica hung; not nine times
    assert time.monotonic() - began < 2


def test_a_cancelled_request_leaves_its_slot_to_the_next() -> None:
    async def go() -> str:
        async with Server(drip, CHAT) as server:
            client = HTTPClient(f"{server.url}/v1", max_concurrent=1)
            task = asyncio.create_task(client.complete(ask()))
            while not server.seen:
                await asyncio.sleep(0.005)
            waiting = asyncio.create_task(client.complete(ask()))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return str((await waiting).text)

    assert run(go()) == "4"


def test_max_concurrent_bounds_what_is_under_way_and_everything_finishes() -> None:
    async def go() -> tuple[int, int]:
        now = most = 0

        async def answer(request: web.Request) -> web.StreamResponse:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.01)
            now -= 1
            return web.json_response(CHAT)

        async with Server(answer) as server:
            client = HTTPClient(f"{server.url}/v1", max_concurrent=5)
            replies = await asyncio.gather(*(client.complete(ask()) for _ in range(40)))
        return most, len(replies)

    assert run(go()) == (5, 40)


def test_thirty_per_cent_of_every_kind_of_trouble_loses_no_request() -> None:
    async def go() -> int:
        troubles = [drop, break_off, (500, b""), b"{", EMPTY, (429, b"")]
        script: list[Any] = []
        for i in range(400):
            script += [troubles[i % len(troubles)]] if i % 10 in (0, 3, 7) else [CHAT]
        async with Server(*script, CHAT) as server:
            client = HTTPClient(f"{server.url}/v1", max_retries=12)
            hurry(client)
            replies = await asyncio.gather(*(client.complete(ask()) for _ in range(200)))
        return sum(reply.text == "4" for reply in replies)

    assert run(go()) == 200


# --- keys ---------------------------------------------------------------------------------------------------------


def everything_said(error: BaseException) -> str:
    """All that could end up in a log or a result: message, repr, causes, traceback."""
    chain: list[str] = []
    seen: BaseException | None = error
    while seen is not None:
        chain += [str(seen), repr(seen), repr(seen.args), repr(vars(seen))]
        seen = seen.__cause__ or seen.__context__
    return "\n".join([*chain, str(describe(error)), "".join(traceback.format_exception(error))])


def test_a_key_that_the_server_echoes_stays_out_of_errors_logs_and_reprs(caplog: pytest.LogCaptureFixture) -> None:
    async def again(request: web.Request) -> web.StreamResponse:
        response = await echo_key(request)
        response.set_status(500)
        return response

    caplog.set_level(logging.DEBUG)
    secret_header, password = "tok-abcdef-123456", "pa55word-xyz"
    for script in ((echo_key,), (again, echo_key), (again,)):

        async def go(script: Any = script) -> Any:
            async with Server(*script) as server:
                url = server.url.replace("http://", f"http://me:{password}@")
                client = HTTPClient(f"{url}/v1", headers={"X-Auth-Token": secret_header}, max_retries=1)
                hurry(client)
                sampling = {"extra_headers": {"X-Session-Secret": KEY}, "extra_query": {"api_key": "q-987654"}}
                with pytest.raises(errors.ModelError) as caught:
                    await client.complete(ask(sampling=sampling))
                return caught.value, client

        error, client = run(go())
        said = everything_said(error) + repr(client) + caplog.text
        for secret in (KEY, secret_header, password, "q-987654", b64encode(f"me:{password}".encode()).decode()):
            assert secret not in said
        assert "[hidden]" in str(error)


@pytest.mark.parametrize(
    "trouble",
    [echo_key, drop, break_off, drip, b"<html>", EMPTY],
    ids=["echo", "drop", "break_off", "drip", "html", "empty"],
)
def test_no_kind_of_failure_carries_the_key(trouble: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    outcome, _, _ = run(complete(trouble, max_retries=1, timeout_s=0.1))
    assert isinstance(outcome, errors.ModelError)
    assert KEY not in everything_said(outcome) + caplog.text
    assert outcome.__cause__ is None
    assert outcome.__context__ is None


def test_reprs_mask_the_key() -> None:
    assert repr(HTTPClient("http://me:hunter22@h/v1", KEY)) == "HTTPClient('http://me:[hidden]@h/v1', api_key='sk-…')"


# --- the object ---------------------------------------------------------------------------------------------------


def test_clients_are_copied_and_pickled_before_and_after_use_and_still_work() -> None:
    async def go() -> list[str]:
        async with Server() as server:
            client = HTTPClient(f"{server.url}/v1", KEY, headers={"X-A": "b"}, max_concurrent=3)
            copies = [copy.deepcopy(client), pickle.loads(pickle.dumps(client))]
            await client.complete(ask())
            copies += [copy.deepcopy(client), pickle.loads(pickle.dumps(client)), copy.copy(client)]
            for other in copies:
                await other.complete(ask())
            assert {seen.headers["Authorization"] for seen in server.seen} == {f"Bearer {KEY}"}
            return [(await other.complete(ask())).text for other in copies]

    assert run(go()) == ["4"] * 5


def test_one_client_serves_one_event_loop_after_another() -> None:
    client: list[HTTPClient] = []

    async def go(server_task: Any = None) -> str:
        async with Server() as server:
            if not client:
                client.append(HTTPClient(f"{server.url}/v1"))
            client[0].base_url = f"{server.url}/v1"
            client[0]._urls.clear()
            return str((await client[0].complete(ask())).text)

    assert [run(go()), run(go())] == ["4", "4"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base_url": "localhost:8000/v1"}, "base_url"),
        ({"base_url": "ftp://me:hunter22@x"}, "base_url"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"max_retries": -1}, "max_retries"),
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"prices": {"input": 1.0}}, "prices"),
    ],
)
def test_nonsense_is_refused_at_construction(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        HTTPClient(**options)
    assert "hunter22" not in str(caught.value)


def test_the_key_in_the_environment_goes_to_the_default_endpoint_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n")
    assert HTTPClient().api_key == KEY
    assert HTTPClient("http://localhost:8000/v1").api_key is None


def test_a_refusal_is_told_in_the_servers_own_words_before_any_address() -> None:
    body = b'{"error": {"message": "You exceeded your quota.", "type": "x", "code": "insufficient_quota"}}'
    outcome, _, _ = run(complete((400, body), max_retries=0))
    assert str(outcome).startswith("400 Bad Request: You exceeded your quota. (insufficient_quota) (POST http://")
    assert "{" not in str(outcome)


def test_a_refusal_for_want_of_a_key_says_that_none_was_sent() -> None:
    def refused(api_key: str | None, headers: dict[str, str] | None = None) -> str:
        with FakeServer("4", api_key="sk-right") as server, pytest.raises(errors.RequestRefusedError) as raised:
            run(HTTPClient(server.url, api_key, headers=headers).complete(ask()))
        return str(raised.value)

    assert "no key was sent" in refused(None)
    assert "no key was sent" not in refused("sk-wrong")
    assert "no key was sent" not in refused(None, {"api-key": "sk-wrong"})
