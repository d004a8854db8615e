"""The endpoint registry: both kinds of file, keys by name, prices, and replicas that share the work."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from verifiers import errors
from verifiers.clients import (
    AnthropicClient,
    Chaos,
    FakeClient,
    FakeServer,
    HTTPClient,
    ReplicaClient,
    Request,
    ResponsesClient,
    load_endpoints,
    resolve_endpoint,
)

REQUEST = Request(model="m", prompt=[{"role": "user", "content": "2+2?"}])

TOML = """
[[endpoint]]
endpoint_id = "mini"
model = "gpt-mini"
url = "https://api.example.com/v1"
key = "EXAMPLE_KEY"
prices = { prompt = 0.25, completion = 2.0 }
headers = { X-Title = "mine" }

[[endpoint]]
endpoint_id = "claude"
model = "claude-x"
url = "https://api.anthropic.com"
key = "ANTHROPIC_KEY"
type = "anthropic"

[[endpoint]]
endpoint_id = "local"
model = "qwen"
url = "http://localhost:8000/v1"
key = "EMPTY"

[[endpoint]]
endpoint_id = "local"
model = "Qwen/Qwen"
url = "http://localhost:8001/v1"
key = "EMPTY"
"""

CLASSIC = '''
"""Our endpoints."""
import os
from typing import Any

BASE = "https://api.example.com"
LOCAL: dict[str, Any] = {"url": os.getenv("LOCAL_URL", "http://localhost:8000/v1"), "key": "EMPTY"}

ENDPOINTS = {
    "mini": {"model": "gpt-mini", "url": f"{BASE}/v1", "key": "EXAMPLE_KEY"},
    "local": {"model": "qwen", **LOCAL},
}
ENDPOINTS["other"] = {"model": "gpt-other", "url": BASE + "/v2", "key": os.environ.get("WHICH") or "EXAMPLE_KEY"}
ENDPOINTS.update({"last": ENDPOINTS["mini"]})

if __name__ == "__main__":
    print(ENDPOINTS)
'''


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_a_toml_registry_reads_as_the_classic_table_with_what_it_adds(tmp_path: Path) -> None:
    endpoints = load_endpoints(write(tmp_path / "endpoints.toml", TOML))
    assert endpoints["mini"] == {
        "model": "gpt-mini",
        "url": "https://api.example.com/v1",
        "key": "EXAMPLE_KEY",
        "prices": {"prompt": 0.25, "completion": 2.0},
        "headers": {"X-Title": "mine"},
    }
    assert endpoints["claude"]["type"] == "anthropic"  # type: ignore[typeddict-item]
    assert [replica["model"] for replica in endpoints["local"]["replicas"]] == ["qwen", "Qwen/Qwen"]  # type: ignore[typeddict-item]
    assert endpoints["local"]["model"] == "qwen"


def test_a_classic_registry_is_read_without_being_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_URL", "http://localhost:9000/v1")
    endpoints = load_endpoints(str(write(tmp_path / "endpoints.py", CLASSIC)))
    mini = {"model": "gpt-mini", "url": "https://api.example.com/v1", "key": "EXAMPLE_KEY"}
    assert endpoints == {
        "mini": mini,
        "local": {"model": "qwen", "url": "http://localhost:9000/v1", "key": "EMPTY"},
        "other": {"model": "gpt-other", "url": "https://api.example.com/v2", "key": "EXAMPLE_KEY"},
        "last": mini,
    }
    assert load_endpoints(tmp_path / "endpoints.py", execute=True) == endpoints


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.system('touch ran')\nENDPOINTS = {}",
        "ENDPOINTS = {open('ran', 'w'): 1}",
        "ENDPOINTS = (lambda: {})()",
        "ENDPOINTS = {n: {} for n in 'ab'}",
        "ENDPOINTS = __import__('os').environ",
        "from elsewhere import ENDPOINTS as found\nENDPOINTS = found",
        "while True: pass",
    ],
)
def test_a_registry_that_is_a_program_is_refused_with_its_line(
    tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"endpoints\.py:\d is not a plain table .* execute=True"):
        load_endpoints(write(tmp_path / "endpoints.py", code))
    assert not (tmp_path / "ran").exists()


def test_a_program_runs_when_that_is_asked_for(tmp_path: Path) -> None:
    code = "ENDPOINTS = {n: {'model': n, 'url': 'http://localhost/v1', 'key': 'K'} for n in 'ab'}"
    assert list(load_endpoints(write(tmp_path / "endpoints.py", code), execute=True)) == ["a", "b"]


def entry(**fields: str) -> str:
    table = {"endpoint_id": '"x"', "model": '"m"', "url": '"https://a.example/v1"', "key": '"K"', **fields}
    return "[[endpoint]]\n" + "\n".join(f"{name} = {value}" for name, value in table.items() if value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("endpoints.toml", "[[endpoint", r"endpoints\.toml is not TOML"),
        ("endpoints.toml", "[endpoints]\na = 1", r"unknown \['endpoints'\]; a registry only has \[\[endpoint\]\]"),
        ("endpoints.toml", entry(endpoint_id=""), r"number 1 has no endpoint_id"),
        ("endpoints.toml", entry(model=""), r"'x' has no model"),
        ("endpoints.toml", entry(modle='"m"'), r"'x' has unknown \['modle'\]; it can have model, url"),
        ("endpoints.toml", entry(type='"grpc"'), r"type must be .* not 'grpc'"),
        ("endpoints.toml", entry(url='"a.example"'), r"url must begin with http"),
        ("endpoints.toml", entry(url="3"), r"url must be a text"),
        ("endpoints.toml", entry(prices="{ input = 1 }"), r"unknown prices \['input'\]"),
        ("endpoints.py", "ENDPOINTS = [", r"endpoints\.py:1 is not Python"),
        ("endpoints.py", "X = 1", r"has no table ENDPOINTS"),
        ("endpoints.py", "ENDPOINTS = {'x': 'm'}", r"'x' must be a table"),
    ],
)
def test_a_bad_registry_names_the_file_and_the_entry(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_endpoints(write(tmp_path / name, text))


@pytest.mark.parametrize("key", ["sk-proj-abc123", "AbCdEf0123456789AbCdEf"])
def test_a_key_in_place_of_a_variables_name_is_refused_and_not_repeated(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="must be the name of an environment variable") as caught:
        load_endpoints(write(tmp_path / "endpoints.toml", entry(key=f'"{key}"')))
    assert key not in str(caught.value)


def test_a_folder_means_the_registry_in_it_and_a_missing_one_means_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert load_endpoints(tmp_path) == {}
        assert load_endpoints(str(tmp_path / "none.py")) == {}
    assert "no endpoint registry" in caplog.text
    write(tmp_path / "endpoints.py", CLASSIC)
    assert "other" in load_endpoints(tmp_path)
    write(tmp_path / "endpoints.toml", TOML)
    assert "claude" in load_endpoints(tmp_path)


def test_a_name_resolves_to_a_client_with_its_key_prices_and_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "configs" / "endpoints.toml", TOML)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EXAMPLE_KEY", "k1")
    monkeypatch.setenv("ANTHROPIC_KEY", "k2")
    client, model = resolve_endpoint("mini")
    assert isinstance(client, HTTPClient)
    assert (model, client.base_url, client.api_key) == ("gpt-mini", "https://api.example.com/v1", "k1")
    assert client.prices == {"prompt": 0.25, "completion": 2.0}
    assert client.headers == {"X-Title": "mine"}
    client, model = resolve_endpoint("claude", load_endpoints())
    assert isinstance(client, AnthropicClient)
    assert (model, client.api_key) == ("claude-x", "k2")
    client, _ = resolve_endpoint("x", {"x": {"model": "m", "url": "http://localhost/v1", "type": "responses"}})
    assert isinstance(client, ResponsesClient)


def test_a_missing_key_is_named_when_it_is_used_and_local_servers_need_none(tmp_path: Path) -> None:
    path = write(tmp_path / "endpoints.toml", TOML)
    with pytest.raises(ValueError, match="'mini' needs the environment variable EXAMPLE_KEY, which is not set"):
        resolve_endpoint("mini", path)
    client, _ = resolve_endpoint("x", {"x": {"model": "m", "url": "http://10.1.2.3/v1", "key": "token-abc123"}})
    assert client.api_key is None  # type: ignore[attr-defined]


def test_a_name_that_is_not_in_the_registry_is_a_model_of_the_default_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:1/v1")
    client, model = resolve_endpoint("some/model")
    assert (client.base_url, model) == ("http://localhost:1/v1", "some/model")  # type: ignore[attr-defined]


def test_prices_reach_the_usage_of_a_completion() -> None:
    with FakeServer("4") as server:
        prices = {"prompt": 1.0, "completion": 1_000_000.0}
        client, model = resolve_endpoint("x", {"x": {"model": "m", "url": server.url, "prices": prices}})
        usage = asyncio.run(client.complete(Request(model=model, prompt=REQUEST.prompt))).usage
    assert usage is not None
    assert usage.cost_usd == pytest.approx(usage.completion_tokens + usage.prompt_tokens / 1e6)


def ask_all(client: Any, number: int) -> list[Any]:
    async def main() -> list[Any]:
        return await asyncio.gather(*(client.complete(REQUEST) for _ in range(number)), return_exceptions=True)

    return asyncio.run(main())


def test_replicas_share_the_work_by_load() -> None:
    quick, slow = FakeClient("quick", latency_s=0.001), FakeClient("slow", latency_s=0.05)
    client = ReplicaClient([quick, slow])

    async def main() -> None:
        slots = asyncio.Semaphore(4)

        async def one() -> None:
            async with slots:
                await client.complete(REQUEST)

        await asyncio.gather(*(one() for _ in range(100)))

    asyncio.run(main())
    assert len(quick.requests) + len(slow.requests) == 100
    assert len(quick.requests) > 3 * len(slow.requests) > 0
    even = [FakeClient("a", latency_s=0.001) for _ in range(4)]
    ask_all(ReplicaClient(even), 100)
    assert [len(replica.requests) for replica in even] == [25] * 4


@pytest.mark.parametrize(
    "error", [errors.ConnectionFailedError("x"), errors.ServerError("x"), errors.RateLimitError("x")]
)
def test_a_replica_that_is_down_is_left_for_the_next_and_passed_over_for_a_while(error: errors.Error) -> None:
    down, up = FakeClient(error), FakeClient("4")
    client = ReplicaClient([down, up])
    assert [ask_all(client, 1)[0].text for _ in range(10)] == ["4"] * 10
    assert len(down.requests) == 1


def test_a_refusal_or_an_overlong_prompt_is_not_taken_elsewhere() -> None:
    for error in (errors.RequestRefusedError("x"), errors.OverlongPromptError("x"), errors.DeadlineError("x")):
        second = FakeClient("4")
        assert ask_all(ReplicaClient([FakeClient(error), second]), 1) == [error]
        assert not second.requests


def test_when_every_replica_is_down_the_last_error_says_why() -> None:
    clients = [FakeClient(errors.ServerError("a")), FakeClient(errors.ServerError("b"))]
    (raised,) = ask_all(ReplicaClient(clients), 1)
    assert isinstance(raised, errors.ServerError)


def test_the_deadline_covers_all_replicas_together() -> None:
    slow = [FakeClient([errors.ServerError("x")], latency_s=0.1) for _ in range(9)]
    client = ReplicaClient(slow)
    began = time.monotonic()
    with pytest.raises(errors.DeadlineError):
        asyncio.run(client.complete(Request(model="m", prompt=REQUEST.prompt, timeout_s=0.25)))
    assert time.monotonic() - began < 0.6


def test_replicas_of_a_registry_use_the_name_each_knows_the_model_by() -> None:
    with FakeServer("4") as first, FakeServer("4", chaos=Chaos(rate=0.3, slow_s=0.01)) as second:
        entries = [{"model": "qwen", "url": first.url}, {"model": "Qwen/Qwen", "url": second.url}]
        client, model = resolve_endpoint("local", {"local": {**entries[0], "replicas": entries}})
        assert model == "qwen"
        assert [completion.text for completion in ask_all(client, 40)] == ["4"] * 40
        assert {request.body["model"] for request in first.requests} == {"qwen"}
        assert {request.body["model"] for request in second.requests} == {"Qwen/Qwen"}
        assert client.base_url == f"{first.url},{second.url}"  # type: ignore[attr-defined]


def test_replicas_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ReplicaClient([])
    with pytest.raises(ValueError, match="1 replicas but 2 models"):
        ReplicaClient([FakeClient("4")], models=["a", "b"])
