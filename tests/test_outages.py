"""Endpoints that damage replies, never end them, refuse all of them, or know neither key nor model; and time limits."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.clients import SDKClient
from verifiers.clients.access import CANARIES, HANDFUL, Access
from verifiers.clients.fake_server import DAMAGE
from verifiers.clients.limits import Limit
from verifiers.clients.retries import Backoff, status_failure
from verifiers.errors import AccessRefusedError, EndpointDownError, RunDeadlineError

QUICK = Backoff(first_s=0.01, longest_s=0.05)
CLIENTS = [vf.HTTPClient, vf.AnthropicClient, vf.ResponsesClient]


def client_of(server: vf.FakeServer | str, kind: Any = vf.HTTPClient, **options: Any) -> Any:
    client = kind(server if isinstance(server, str) else server.url, "sk-test", **options)
    client.backoff = QUICK
    return client


def is_right(completion: Any, answer: str) -> bool:
    return bool(completion[-1]["content"] == answer)


def make_env(n: int, **options: Any) -> vf.SingleTurnEnv:
    rows = [{"question": f"question {i}", "answer": str(i)} for i in range(n)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[is_right]), **options)


def echo(messages: Any) -> str:
    return str(messages[-1]["content"].split()[-1])


def evaluate(env: vf.Environment, client: Any, **kwargs: Any) -> vf.Results:
    results: vf.Results = env.evaluate(client=client, model="m", use_tqdm=False, **kwargs)
    return results


def kinds_of(results: vf.Results) -> set[str]:
    return {type(state["error"]).__name__ for state in results.failed}


# --- damaged replies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CLIENTS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("fault", DAMAGE)
def test_a_damaged_reply_is_asked_for_again_and_never_scored(fault: str, kind: Any) -> None:
    with vf.FakeServer(echo, chaos=vf.Chaos(rate=0.3, kinds=(fault,))) as server:
        results = evaluate(make_env(100), client_of(server, kind, max_retries=20))
        assert server.faults > 15
    assert results.rewards == [1.0] * 100


@pytest.mark.parametrize("kind", CLIENTS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("fault", DAMAGE)
def test_a_reply_that_stays_damaged_is_a_failure_and_no_zero(fault: str, kind: Any) -> None:
    with vf.FakeServer(echo, chaos=vf.Chaos(rate=1.0, kinds=(fault,))) as server:
        results = evaluate(make_env(5), client_of(server, kind, max_retries=2))
        assert len(server.requests) == 15
    assert kinds_of(results) == {"BadReplyError"}
    assert results.mean_reward is None


def test_a_third_of_all_faults_and_damages_bends_no_mean() -> None:
    kinds = ("server_error", "reset", "broken_json", "empty", *DAMAGE)
    with vf.FakeServer(echo, chaos=vf.Chaos(rate=0.3, kinds=kinds)) as server:
        results = evaluate(make_env(400), client_of(server, max_retries=1), max_concurrent=64)
    assert 0 < len(results.failed) < 100
    assert set(results.rewards) == {1.0}


def test_plain_completions_are_not_scored_when_damaged_either() -> None:
    with vf.FakeServer("4", chaos=vf.Chaos(rate=1.0, kinds=("null_content",))) as server:
        request = vf.Request(model="m", prompt="2+2=", message_type="completion")
        with pytest.raises(vf.BadReplyError, match="no content, although its usage counts"):
            asyncio.run(client_of(server, max_retries=1).complete(request))


# --- replies without an end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CLIENTS, ids=lambda kind: kind.__name__)
def test_a_reply_without_an_end_is_read_up_to_the_bound_and_no_further(kind: Any) -> None:
    with vf.FakeServer(echo, chaos=vf.Chaos(rate=1.0, kinds=("endless",))) as server:
        began = time.monotonic()
        results = evaluate(make_env(3), client_of(server, kind, max_reply_bytes=1 << 20))
        assert time.monotonic() - began < 20
        assert len(server.requests) == 6  # what was too long once mostly is so again: one second chance, no third
    assert kinds_of(results) == {"BadReplyError"}
    assert "longer than max_reply_bytes=1,048,576" in str(results.failed[0]["error"])


def test_a_reply_that_announces_more_than_the_bound_is_not_read_at_all() -> None:
    with vf.FakeServer("x" * 5000) as server:
        with pytest.raises(vf.BadReplyError, match="longer than max_reply_bytes=4,000"):
            asyncio.run(client_of(server, max_reply_bytes=4000).complete(ask()))
        assert asyncio.run(client_of(server, max_reply_bytes=8000).complete(ask())).text == "x" * 5000


def ask(question: str = "2+2?") -> vf.Request:
    return vf.Request(model="m", prompt=[{"role": "user", "content": question}])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
def test_an_endless_reply_takes_no_memory_beyond_the_bound() -> None:
    def resident_mib() -> float:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    with vf.FakeServer(echo, chaos=vf.Chaos(rate=1.0, kinds=("endless",))) as server:
        client = client_of(server, max_reply_bytes=4 << 20, max_retries=0)
        evaluate(make_env(2), client)
        before = resident_mib()
        evaluate(make_env(30), client, max_concurrent=2)
        assert resident_mib() - before < 40


@pytest.mark.parametrize("settings", [{"max_reply_bytes": 0}, {"down_after_s": 0}, {"down_after_s": -1}])
def test_bounds_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        vf.HTTPClient("http://localhost/v1", **settings)


def test_the_registry_knows_the_bounds_of_an_endpoint(tmp_path: Path) -> None:
    entry = '[[endpoint]]\nendpoint_id = "e"\nmodel = "m"\nurl = "http://localhost:1/v1"\n'
    (tmp_path / "endpoints.toml").write_text(entry + "down_after_s = 30\nmax_reply_bytes = 1000\n")
    from verifiers.clients import resolve_endpoint

    client, _ = resolve_endpoint("e", vf.load_endpoints(tmp_path))
    assert (client.down_after_s, client.max_reply_bytes) == (30, 1000)  # type: ignore[attr-defined]
    (tmp_path / "endpoints.toml").write_text(entry + 'down_after_s = "soon"\n')
    with pytest.raises(ValueError, match="numbers above 0"):
        vf.load_endpoints(tmp_path)


# --- an endpoint that is down -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["rate_limit", "server_error", "reset"])
def test_an_endpoint_that_refuses_everything_is_declared_down_once_for_all_rows(fault: str, tmp_path: Path) -> None:
    chaos = vf.Chaos(rate=1.0, kinds=(fault,), retry_after_s=0.05)
    began = time.monotonic()
    with vf.FakeServer(echo, chaos=chaos) as server:
        client = client_of(server, max_retries=100_000, down_after_s=1.0)
        results = evaluate(make_env(500), client, max_concurrent=64, results_path=tmp_path / "run")
    assert time.monotonic() - began < 30
    assert len(results.failed) == 500
    assert kinds_of(results) == {"EndpointDownError"}
    assert len(results.causes) == 1
    assert "has refused everything for 1 s and counts as down" in next(iter(results.causes))
    assert str(results).count("counts as down") == 2  # the one cause, and why the run ended
    assert results.metadata["ended_early"] in str(results)
    with vf.FakeServer(echo) as calm:
        again = evaluate(make_env(500), client_of(calm), results_path=tmp_path / "run", resume=True)
    assert again.rewards == [1.0] * 500


def test_a_port_where_nobody_listens_is_down_for_all_rows() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    results = evaluate(make_env(300), client_of(url, max_retries=100_000, down_after_s=0.5), max_concurrent=16)
    assert kinds_of(results) == {"EndpointDownError"}


def test_what_was_done_before_an_endpoint_went_down_is_kept(tmp_path: Path) -> None:
    asked = itertools.count()

    def until(messages: Any) -> str:
        if next(asked) >= 40:
            raise vf.ServerError("overloaded")
        return echo(messages)

    with vf.FakeServer(until) as server:
        client = client_of(server, max_retries=100_000, down_after_s=0.5)
        results = evaluate(make_env(200), client, max_concurrent=8, results_path=tmp_path / "run")
    assert results.rewards == [1.0] * 40
    assert len(results.failed) == 160
    with vf.FakeServer(echo) as calm:
        assert (
            evaluate(make_env(200), client_of(calm), results_path=tmp_path / "run", resume=True).rewards == [1.0] * 200
        )
        assert len(calm.requests) == 160


def test_an_endpoint_that_answers_now_and_then_is_not_down() -> None:
    with vf.FakeServer(echo, chaos=vf.Chaos(rate=0.8, kinds=("server_error",))) as server:
        results = evaluate(make_env(60), client_of(server, max_retries=1000, down_after_s=1.5), max_concurrent=8)
    assert results.rewards == [1.0] * 60


def test_whoever_asks_later_finds_out_anew() -> None:
    is_up = False

    def reply(messages: Any) -> str:
        if not is_up:
            raise vf.ServerError("no")
        return "4"

    async def main() -> str:
        nonlocal is_up
        client = client_of(server, max_retries=1000, down_after_s=0.3)
        with pytest.raises(EndpointDownError):
            await client.complete(ask())
        is_up = True
        with pytest.raises(EndpointDownError):  # only just found out
            await client.complete(ask())
        pool_limit = next(iter(_limits()))
        pool_limit._down = (0.0, "long ago")
        return str((await client.complete(ask())).text)

    def _limits() -> list[Limit]:
        from verifiers.clients.remote import _pools

        return [limit for pool, _ in _pools._held.values() for limit in pool._limits.values()]

    with vf.FakeServer(reply) as server:
        assert asyncio.run(main()) == "4"


def test_a_judge_that_is_down_ends_the_run_too(tmp_path: Path) -> None:
    with vf.FakeServer(echo, chaos=vf.Chaos(rate=1.0, kinds=("server_error",))) as server:
        judge_client = client_of(server, max_retries=100_000, down_after_s=0.5)
        judge = vf.JudgeRubric(judge_client=judge_client, judge_model="j", template="{completion} <score>[0-1]</score>")
        rows = [{"question": f"question {i}", "answer": str(i)} for i in range(2000)]
        client = vf.FakeClient("x")
        results = evaluate(vf.SingleTurnEnv(dataset=rows, rubric=judge), client, max_concurrent=8)
        assert len(client.requests) < 100
    assert len(results.failed) == 2000
    assert "counts as down" in results.metadata["ended_early"]


# --- a wrong key, an unknown model --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CLIENTS, ids=lambda kind: kind.__name__)
def test_a_wrong_key_ends_the_run_after_a_handful_of_requests(kind: Any, tmp_path: Path) -> None:
    arrived: list[str] = []

    class Counting(vf.FakeServer):
        def _refuse_key(self, http: Any) -> Any:
            arrived.append(http.path)
            return super()._refuse_key(http)

    with Counting(echo, api_key="sk-right") as server:
        results = evaluate(make_env(1000), client_of(server, kind), results_path=tmp_path / "run")
        assert len(arrived) < 100  # five, where the machine is not so busy that a refusal takes a quarter of a second
        assert len(results.failed) == 1000
        assert "401" in results.metadata["ended_early"]
        assert "sk-test" not in results.metadata["ended_early"]
        client = kind(server.url, "sk-right")
        assert evaluate(make_env(1000), client, results_path=tmp_path / "run", resume=True).rewards == [1.0] * 1000


def unknown_model(request: vf.Request) -> str:
    raise vf.RequestRefusedError("The model `m` does not exist")


def test_an_unknown_model_ends_the_run_after_a_handful_of_requests() -> None:
    with vf.FakeServer(unknown_model) as server:
        results = evaluate(make_env(1000), client_of(server))
        assert len(server.requests) < 100
    assert kinds_of(results) <= {"AccessRefusedError", "RequestRefusedError"}
    assert "does not exist" in results.metadata["ended_early"]


def test_an_sdk_object_with_a_wrong_key_ends_the_run_after_a_handful_of_requests() -> None:
    class AuthenticationError(Exception):
        status_code = 401

    class Completions:
        calls = 0

        async def create(self, **kwargs: Any) -> Any:
            Completions.calls += 1
            await asyncio.sleep(0.01)
            raise AuthenticationError("Incorrect API key provided")

    class Chat:
        completions = Completions()

    class Theirs:
        chat = Chat()

    results = evaluate(make_env(1000), SDKClient(Theirs()))
    assert Completions.calls < 100
    assert len(results.failed) == 1000
    assert "Incorrect API key" in results.metadata["ended_early"]


def test_one_prompt_that_is_refused_does_not_end_the_run() -> None:
    def some(messages: Any) -> str:
        if int(echo(messages)) % 2:
            raise vf.RequestRefusedError("this prompt is not allowed")
        return echo(messages)

    with vf.FakeServer(some) as server:
        results = evaluate(make_env(60), client_of(server))
    assert len(results.failed) == 30
    assert "ended_early" not in results.metadata


@pytest.mark.parametrize(
    ("status", "body", "is_access"),
    [
        (401, "", True),
        (402, "", True),
        (403, "forbidden", True),
        (403, "your input was flagged by moderation", False),
        (404, "no such model", True),
        (400, "model_not_found", True),
        (400, "gpt-9 is not a valid model ID", True),
        (400, "temperature must be below 2", False),
        (429, "insufficient_quota", True),
        (429, "slow down", False),
        (500, "", False),
    ],
)
def test_which_refusals_are_of_the_key_or_the_model(status: int, body: str, is_access: bool) -> None:
    assert status_failure(status, {}, body).is_access is is_access


def test_thousands_wait_for_the_first_few_and_go_as_soon_as_one_is_answered() -> None:
    async def main() -> None:
        access = Access()
        entered = 0

        async def enter() -> None:
            nonlocal entered
            await access.enter()
            entered += 1

        tasks = [asyncio.create_task(enter()) for _ in range(1000)]
        await asyncio.sleep(0.01)
        assert entered == CANARIES
        access.open()
        await asyncio.gather(*tasks)
        assert entered == 1000

    asyncio.run(main())


def test_an_endpoint_that_takes_its_time_holds_nobody_up_for_more_than_a_second() -> None:
    async def main() -> float:
        access = Access()
        began = time.monotonic()
        await asyncio.gather(*(access.enter() for _ in range(100)))
        return time.monotonic() - began

    assert 0.5 < asyncio.run(main()) < 5


def test_a_cancelled_one_of_the_first_few_leaves_its_place_to_another() -> None:
    async def main() -> None:
        access = Access()
        await asyncio.gather(*(access.enter() for _ in range(CANARIES)))
        waiting = [asyncio.create_task(access.enter()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        access.left()
        await asyncio.wait_for(waiting[1], 0.5)
        assert not waiting[2].done()
        waiting[2].cancel()

    asyncio.run(main())


def test_a_refusal_after_good_answers_ends_the_run_only_when_nothing_else_comes() -> None:
    async def main() -> None:
        access = Access()
        access.open()
        for _ in range(HANDFUL - 1):
            assert not access.refuse("no")
        access.open()
        for _ in range(HANDFUL - 1):
            assert not access.refuse("no")
        assert access.refuse("no")
        with pytest.raises(AccessRefusedError, match="consecutive refusals"):
            await access.enter()

    asyncio.run(main())


# --- the run's own deadline ---------------------------------------------------------------------------------------


def test_a_run_that_is_out_of_time_keeps_what_is_done_and_fails_the_rest(tmp_path: Path) -> None:
    async def half(messages: Any) -> str:
        if int(echo(messages)) % 2:
            await asyncio.sleep(3600)
        return echo(messages)

    began = time.monotonic()
    results = evaluate(make_env(40), vf.FakeClient(half), deadline_s=1.0, results_path=tmp_path / "run")
    assert time.monotonic() - began < 15
    assert results.rewards == [1.0] * 20
    assert {type(state["error"]) for state in results.failed} == {RunDeadlineError}
    assert "deadline of 1 s" in results.metadata["ended_early"]
    again = evaluate(make_env(40), vf.FakeClient(echo), results_path=tmp_path / "run", resume=True)
    assert again.rewards == [1.0] * 40


def test_429_for_ever_gives_a_result_when_the_time_is_over() -> None:
    with vf.FakeServer(echo, chaos=vf.Chaos(rate=1.0, kinds=("rate_limit",), retry_after_s=30)) as server:
        results = evaluate(make_env(20), client_of(server, max_retries=1000), deadline_s=1.0)
    assert len(results.failed) == 20


def test_rollouts_of_groups_that_are_not_complete_are_not_lost_when_time_is_over(tmp_path: Path) -> None:
    asked = itertools.count()

    async def three_of_four(messages: Any) -> str:
        if next(asked) % 4 == 3:
            await asyncio.sleep(3600)
        return echo(messages)

    def together(completions: Any) -> list[float]:
        return [float(len(completions)) for _ in completions]

    rows = [{"question": f"question {i}", "answer": str(i)} for i in range(3)]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([together]))
    options: dict[str, Any] = {"rollouts_per_example": 4, "results_path": tmp_path / "run"}
    results = evaluate(env, vf.FakeClient(three_of_four), deadline_s=1.0, **options)
    assert len(results.failed) == 3
    client = vf.FakeClient(echo)
    again = evaluate(env, client, resume=True, **options)
    assert len(client.requests) == 3
    assert again.rewards == [4.0] * 12


def test_a_clean_up_that_never_returns_does_not_keep_a_run_from_ending_on_time() -> None:
    never = threading.Event()

    class Sticky(vf.SingleTurnEnv):
        @vf.cleanup
        async def put_away(self, state: Any) -> None:
            await asyncio.sleep(3600)

    began = time.monotonic()
    env = Sticky(dataset=[{"question": "?"}])
    results = evaluate(env, vf.FakeClient("x", latency_s=60), deadline_s=0.3)
    assert time.monotonic() - began < 25
    assert len(results.failed) == 1
    never.set()


@pytest.mark.parametrize("value", [0, -3])
def test_a_deadline_that_makes_no_sense_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="deadline_s"):
        evaluate(make_env(1), vf.FakeClient("x"), deadline_s=value)


def test_the_saved_metadata_says_why_a_run_ended_early(tmp_path: Path) -> None:
    evaluate(make_env(2), vf.FakeClient("x", latency_s=60), deadline_s=0.2, results_path=tmp_path / "run")
    assert "deadline" in json.loads((tmp_path / "run/metadata.json").read_bytes())["ended_early"]


def test_a_run_that_was_resumed_to_its_end_did_not_end_early(tmp_path: Path) -> None:
    evaluate(make_env(2), vf.FakeClient("x", latency_s=60), deadline_s=0.2, results_path=tmp_path / "run")
    evaluate(make_env(2), vf.FakeClient("x"), results_path=tmp_path / "run", resume=True)
    metadata = json.loads((tmp_path / "run/metadata.json").read_bytes())
    assert (metadata["finished"], metadata["ended_early"]) == (True, None)
