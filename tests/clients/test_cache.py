"""The response cache: what it keeps, what it must not merge, and what happens when many use it."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from verifiers import errors
from verifiers.clients import CachedClient, Completion, FakeClient, FakeServer, HTTPClient, Request
from verifiers.types import Usage

GREEDY = Request(model="m", prompt=[{"role": "user", "content": "2+2?"}], sampling={"temperature": 0})
SAMPLED = replace(GREEDY, sampling={"temperature": 0.7})


def ask(client: Any, request: Request = GREEDY) -> Completion:
    return asyncio.run(client.complete(request))


def ask_at_once(client: Any, *requests: Request) -> list[Any]:
    async def main() -> list[Any]:
        return await asyncio.gather(*map(client.complete, requests), return_exceptions=True)

    return asyncio.run(main())


def test_the_same_question_is_asked_once_even_by_the_next_run(tmp_path: Path) -> None:
    live = FakeClient("4", tokens=True)
    first = CachedClient(live, tmp_path / "runs" / "cache.db")
    completion = ask(first)
    assert ask(first) == completion
    assert (first.hits, first.misses) == (1, 1)
    first.close()
    assert ask(CachedClient(live, tmp_path / "runs" / "cache.db")) == completion
    assert len(live.requests) == 1


@pytest.mark.parametrize(
    "other",
    [
        replace(GREEDY, model="n"),
        replace(GREEDY, prompt=[{"role": "user", "content": "3+3?"}]),
        replace(GREEDY, tools=[{"type": "function"}]),
        replace(GREEDY, sampling={"temperature": 0, "max_tokens": 5}),
        replace(GREEDY, prompt="2+2?", message_type="completion"),
    ],
)
def test_any_difference_makes_another_question(tmp_path: Path, other: Request) -> None:
    client = CachedClient(FakeClient(["a", "b"]), tmp_path / "cache.db")
    assert [ask(client).text, ask(client, other).text, ask(client).text] == ["a", "b", "a"]


def test_the_order_of_fields_none_and_the_kind_of_zero_make_none(tmp_path: Path) -> None:
    client = CachedClient(FakeClient(["a", "b"]), tmp_path / "cache.db")
    ask(client, replace(GREEDY, sampling={"temperature": 0, "top_p": 1}))
    same = replace(GREEDY, prompt=[{"content": "2+2?", "role": "user"}], timeout_s=5)
    assert ask(client, replace(same, sampling={"top_p": 1.0, "temperature": 0.0, "stop": None})).text == "a"


def test_samples_are_not_cached_unless_asked_for_and_it_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = CachedClient(FakeClient(["a", "b", "c"]), tmp_path / "cache.db")
    with caplog.at_level(logging.WARNING):
        assert [ask(client, SAMPLED).text, ask(client, replace(SAMPLED, sampling={})).text] == ["a", "b"]
    assert caplog.text.count("are only cached with") == 1
    seeded = replace(SAMPLED, sampling={"temperature": 0.7, "seed": 1})
    assert [ask(client, seeded).text for _ in range(2)] == ["c", "c"]


def test_repeats_of_one_example_stay_different_samples_and_the_next_run_gets_the_same_ones(tmp_path: Path) -> None:
    live = FakeClient(["a", "b", "c", "d"])
    first = ask_at_once(CachedClient(live, tmp_path / "cache.db", sampled=True), *[SAMPLED] * 3)
    second = ask_at_once(CachedClient(live, tmp_path / "cache.db", sampled=True), *[SAMPLED] * 4)
    assert sorted(c.text for c in first) == ["a", "b", "c"]
    assert [c.text for c in second] == [*(c.text for c in first), "d"]


def test_identical_requests_at_the_same_time_make_one_call(tmp_path: Path) -> None:
    live = FakeClient("4", latency_s=0.02)
    client = CachedClient(live, tmp_path / "cache.db")
    assert [c.text for c in ask_at_once(client, *[GREEDY] * 50)] == ["4"] * 50
    assert len(live.requests) == 1
    assert (client.hits, client.misses) == (49, 1)


def test_errors_reach_everyone_who_waits_and_are_not_cached(tmp_path: Path) -> None:
    live = FakeClient([errors.ServerError("oh"), "4"], latency_s=0.01)
    client = CachedClient(live, tmp_path / "cache.db")
    assert [type(e) for e in ask_at_once(client, GREEDY, GREEDY)] == [errors.ServerError] * 2
    assert ask(client).text == "4"


def test_when_the_one_who_asks_gives_up_another_asks(tmp_path: Path) -> None:
    live = FakeClient("4", latency_s=0.05)
    client = CachedClient(live, tmp_path / "cache.db")

    async def main() -> str:
        first = asyncio.create_task(client.complete(GREEDY))
        second = asyncio.create_task(client.complete(GREEDY))
        await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return (await second).text

    assert asyncio.run(main()) == "4"
    assert len(live.requests) == 2


def test_cancelling_one_who_waits_does_not_disturb_the_one_who_asks(tmp_path: Path) -> None:
    client = CachedClient(FakeClient("4", latency_s=0.05), tmp_path / "cache.db")

    async def main() -> str:
        first = asyncio.create_task(client.complete(GREEDY))
        second = asyncio.create_task(client.complete(GREEDY))
        await asyncio.sleep(0.01)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        return (await first).text

    assert asyncio.run(main()) == "4"


def test_who_waits_has_a_deadline_of_its_own(tmp_path: Path) -> None:
    client = CachedClient(FakeClient("4", latency_s=0.2), tmp_path / "cache.db")
    patient, hasty = ask_at_once(client, GREEDY, replace(GREEDY, timeout_s=0.02))
    assert patient.text == "4"
    assert isinstance(hasty, errors.DeadlineError)


def test_a_hit_costs_nothing(tmp_path: Path) -> None:
    usage = Usage(prompt_tokens=3, completion_tokens=1, cost_usd=0.5)
    live = FakeClient(Completion(message={"role": "assistant", "content": "4"}, usage=usage))
    client = CachedClient(live, tmp_path / "cache.db")
    assert ask(client).usage == usage
    assert ask(client).usage == replace(usage, cost_usd=0.0)


def test_namespaces_keep_models_of_the_same_name_apart(tmp_path: Path) -> None:
    live = FakeClient(["a", "b"])
    first = CachedClient(live, tmp_path / "cache.db", namespace="step 100")
    second = CachedClient(live, tmp_path / "cache.db", namespace="step 200")
    assert [ask(first).text, ask(second).text, ask(first).text] == ["a", "b", "a"]


def test_models_of_one_name_on_different_servers_are_asked_apart_unless_a_namespace_joins_them(tmp_path: Path) -> None:
    with FakeServer("a") as one, FakeServer("b") as other:
        urls = [f"{server.url}?api_key=secret-key" for server in (one, other)]
        apart = [CachedClient(HTTPClient(url), tmp_path / "cache.db") for url in (*urls, *urls)]
        assert [ask(client).text for client in apart] == ["a", "b", "a", "b"]
        joined = [CachedClient(HTTPClient(url), tmp_path / "cache.db", namespace="judge") for url in urls]
        assert [ask(client).text for client in joined] == ["a", "a"]
        assert [len(server.requests) for server in (one, other)] == [2, 1]
    for client in (*apart, *joined):
        client.close()
    assert b"secret-key" not in (tmp_path / "cache.db").read_bytes()


def test_a_server_is_the_same_however_its_address_ends_and_a_client_without_one_finds_its_entries_again(
    tmp_path: Path,
) -> None:
    class Addressed:
        def __init__(self, address: Any) -> None:
            self.base_url = address

        async def complete(self, request: Request) -> Completion:
            return await FakeClient(next(replies)).complete(request)

    replies = iter("abcd")
    for addresses in (["http://here/v1", "http://here/v1/"], [object(), object()]):
        clients = [CachedClient(Addressed(one), tmp_path / "cache.db") for one in addresses]
        first, second = (ask(client).text for client in clients)
        assert first == second
        for client in clients:
            client.close()


@pytest.mark.parametrize("damage", [b"not json", b"[]", b'{"message": 1}', b"\xff"])
def test_a_damaged_entry_is_asked_for_again(tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    client = CachedClient(FakeClient(["a", "b"]), tmp_path / "cache.db")
    ask(client)
    with sqlite3.connect(tmp_path / "cache.db") as connection:
        connection.execute("UPDATE completions SET completion = ?", (damage,))
    connection.close()
    with caplog.at_level(logging.WARNING):
        assert [ask(client).text for _ in range(2)] == ["b", "b"]
    assert "cannot be read" in caplog.text


def test_a_file_that_is_no_cache_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("dear diary, " * 100)
    with pytest.raises(ValueError, match=r"notes\.txt cannot be used as a cache"):
        CachedClient(FakeClient("4"), tmp_path / "notes.txt")
    with pytest.raises(ValueError, match="cannot be used as a cache"):
        CachedClient(FakeClient("4"), tmp_path)


WORKER = """
import asyncio, sys
from verifiers.clients import CachedClient, FakeClient, Request

async def main():
    client = CachedClient(FakeClient(lambda messages: "re: " + messages[0]["content"]), sys.argv[1])
    for n in range(100):
        request = Request(model="m", prompt=[{"role": "user", "content": str(n)}], sampling={"temperature": 0})
        assert (await client.complete(request)).text == f"re: {n}"
    print(client.hits + client.misses)

asyncio.run(main())
"""


def test_several_processes_share_one_file(tmp_path: Path, repo: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(tmp_path / "cache.db")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    workers = [
        subprocess.Popen(command, cwd=repo, env={**os.environ, "PYTHONPATH": str(repo)}, **pipes) for _ in range(4)
    ]
    for worker in workers:
        said, complaints = worker.communicate(timeout=60)
        assert (said.strip(), complaints) == ("100", "")
    reader = CachedClient(FakeClient(errors.ServerError("nothing is left to ask")), tmp_path / "cache.db")
    for n in range(100):
        assert ask(reader, replace(GREEDY, prompt=[{"role": "user", "content": str(n)}])).text == f"re: {n}"


def test_a_locked_file_costs_the_entry_and_not_the_reply(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verifiers.clients.cache.BUSY_S", 0.01)
    client = CachedClient(FakeClient("4"), tmp_path / "cache.db")
    holder = sqlite3.connect(tmp_path / "cache.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with caplog.at_level(logging.WARNING):
        assert ask(client).text == "4"
    assert "locked" in caplog.text
    holder.close()
