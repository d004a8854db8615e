"""An endpoint that misbehaves: every rollout finishes or is reported failed with its cause, and the run ends."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.clients.fake_server import KINDS
from verifiers.clients.retries import Backoff

QUICK = Backoff(first_s=0.01, longest_s=0.05)
N = 300


def client_of(server: vf.FakeServer | str, **options: Any) -> vf.HTTPClient:
    """A client that waits milliseconds where it would wait seconds."""
    client = vf.HTTPClient(server if isinstance(server, str) else server.url, **options)
    client.backoff = QUICK
    return client


def make_env(n: int = N) -> vf.SingleTurnEnv:
    """The right answer to question i is i, so that a reply given to the wrong rollout shows."""
    rows = [{"question": f"question {i}", "answer": str(i)} for i in range(n)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[is_right]))


def is_right(completion: Any, answer: str) -> bool:
    return bool(completion[-1]["content"] == answer)


def echo(messages: Any) -> str:
    return str(messages[-1]["content"].split()[-1])


def evaluate(env: vf.Environment, client: Any, **kwargs: Any) -> vf.Results:
    results: vf.Results = env.evaluate(client=client, model="m", use_tqdm=False, **kwargs)
    return results


def kinds_of(results: vf.Results) -> set[str]:
    return {type(state["error"]).__name__ for state in results.failed}


def check_order(results: vf.Results, n: int = N) -> None:
    assert [state["example_id"] for state in results.rollouts] == list(range(n))
    assert len(results.scored) + len(results.failed) == n


@pytest.mark.parametrize("concurrency", [64, 256])
@pytest.mark.parametrize("seed", range(3))
def test_with_retries_enough_every_rollout_finishes(seed: int, concurrency: int, tmp_path: Path) -> None:
    with vf.FakeServer(echo, chaos=vf.Chaos(rate=0.3, slow_s=0.05), seed=seed) as server:
        results = evaluate(
            make_env(),
            client_of(server, max_retries=20),
            max_concurrent=concurrency,
            results_path=tmp_path / "run",
        )
        assert set(server.fault_kinds) == set(KINDS)
        assert server.faults > 0.2 * N
    check_order(results)
    assert results.rewards == [1.0] * N
    assert len((tmp_path / "run/results.jsonl").read_bytes().splitlines()) == N


@pytest.mark.parametrize("seed", range(3))
def test_without_retries_each_failed_rollout_says_why(seed: int, tmp_path: Path) -> None:
    with vf.FakeServer(echo, chaos=vf.Chaos(rate=0.3, slow_s=0.05), seed=seed) as server:
        results = evaluate(
            make_env(), client_of(server, max_retries=0), max_concurrent=128, results_path=tmp_path / "run"
        )
        harmful = server.faults - server.fault_kinds["slow"]
    check_order(results)
    assert len(results.failed) == harmful > 0
    assert results.rewards == [1.0] * (N - harmful)
    assert kinds_of(results) == {
        "BadReplyError",
        "ConnectionFailedError",
        "EmptyModelResponseError",
        "RateLimitError",
        "ServerError",
    }
    for state in results.failed:
        assert state["reward"] is None
        assert state["error"].blame == "infrastructure"
        assert str(state["error"])
    for line in (tmp_path / "run/results.jsonl").read_bytes().splitlines():
        record = json.loads(line)
        assert (record["error"] is None) == (record["reward"] is not None)
        assert record["error"] is None or record["error"]["message"].endswith(("chat/completions)", "models)"))


def test_what_failed_in_the_chaos_is_all_that_a_resume_asks_for(tmp_path: Path) -> None:
    with vf.FakeServer(echo, chaos=vf.Chaos(rate=0.5, slow_s=0.02)) as server:
        first = evaluate(make_env(), client_of(server, max_retries=0), results_path=tmp_path / "run")
    assert 0 < len(first.failed) < N
    with vf.FakeServer(echo) as calm:
        second = evaluate(make_env(), client_of(calm), results_path=tmp_path / "run", resume=True)
        assert len(calm.requests) == len(first.failed)
    assert second.rewards == [1.0] * N
    check_order(second)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"slow"}))
def test_an_endpoint_that_always_fails_gives_failures_and_never_a_zero(kind: str) -> None:
    n = 3 if kind == "rate_limit" else 100  # who is told to slow down waits longer and longer between two requests
    began = time.monotonic()
    with vf.FakeServer(echo, chaos=vf.Chaos(rate=1.0, kinds=(kind,), retry_after_s=0.001)) as server:
        results = evaluate(make_env(n), client_of(server, max_retries=2), max_concurrent=64)
        assert len(server.requests) == 3 * n
    assert time.monotonic() - began < 60
    check_order(results, n)
    assert len(results.failed) == n
    assert results.rewards == []
    assert results.mean_reward is None
    assert all(state["reward"] is None for state in results.rollouts)
    assert all("after 3 attempts" in str(state["error"]) for state in results.failed)
    assert f"{n} failed" in str(results)


def test_all_other_faults_at_once_and_always_end_by_themselves() -> None:
    kinds = tuple(kind for kind in KINDS if kind != "rate_limit")
    with vf.FakeServer(echo, chaos=vf.Chaos(rate=1.0, kinds=kinds, slow_s=0.05)) as server:
        results = evaluate(make_env(100), client_of(server, max_retries=1), max_concurrent=64)
    check_order(results, 100)
    slow_ones = len(results.scored)  # slow bytes are late, not lost
    assert 0 < slow_ones < 100
    assert results.rewards == [1.0] * slow_ones


def test_a_server_that_dies_in_the_middle_fails_the_rest_and_a_resume_finishes(tmp_path: Path) -> None:
    server = vf.FakeServer(echo, latency_s=0.02)
    server.start()

    def die() -> None:
        while len(server.requests) < N // 3:
            time.sleep(0.005)
        server.stop()

    death = threading.Thread(target=die)
    death.start()
    began = time.monotonic()
    try:
        client = client_of(server, max_retries=2)
        results = evaluate(make_env(), client, max_concurrent=16, results_path=tmp_path / "run")
    finally:
        death.join()
    assert time.monotonic() - began < 30
    check_order(results)
    assert 0 < len(results.scored) < N
    assert kinds_of(results) <= {"ConnectionFailedError"}
    with vf.FakeServer(echo) as calm:
        again = evaluate(make_env(), client_of(calm), results_path=tmp_path / "run", resume=True)
        assert len(calm.requests) == len(results.failed)
    assert again.rewards == [1.0] * N


def test_a_server_that_never_answers_meets_the_deadline() -> None:
    began = time.monotonic()
    with vf.FakeServer(echo, latency_s=3600) as server:
        results = evaluate(make_env(50), client_of(server, timeout_s=0.3), max_concurrent=64)
    assert time.monotonic() - began < 15
    check_order(results, 50)
    assert kinds_of(results) == {"DeadlineError"}
    assert "no complete reply within 0.3 s" in str(results.failed[0]["error"])


def test_some_replies_that_never_come_cost_only_their_own_rollouts() -> None:
    async def sometimes(messages: Any) -> str:
        if int(echo(messages)) % 10 == 3:
            await asyncio.sleep(3600)
        return echo(messages)

    with vf.FakeServer(sometimes) as server:
        results = evaluate(make_env(100), client_of(server, timeout_s=4.0, max_retries=0), max_concurrent=32)
    assert [state["example_id"] for state in results.failed] == list(range(3, 100, 10))
    assert results.rewards == [1.0] * 90


def test_results_come_in_the_order_of_the_rows_whatever_the_order_of_replies() -> None:
    async def shuffled(messages: Any) -> str:

        await asyncio.sleep((int(echo(messages)) * 7919 % 100) / 1000)
        return echo(messages)

    results = evaluate(make_env(), vf.FakeClient(shuffled), max_concurrent=N, rollouts_per_example=2)
    assert [state["example_id"] for state in results.rollouts] == [i for i in range(N) for _ in range(2)]
    assert [state["completion"][0]["content"] for state in results.rollouts] == results["answers"]
