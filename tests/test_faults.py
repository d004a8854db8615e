"""One bad row ends neither the run nor the process, and bends no other row: whatever its functions do."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import verifiers as vf

BAD = 3
N = 8


class OwnOutcome(BaseException):
    """As ``pytest.fail()`` raises it."""


def _exit() -> None:
    sys.exit(3)


def _raise(error: type[BaseException]) -> Callable[[], None]:
    def function() -> None:
        raise error("on purpose")

    return function


ESCAPES: dict[str, Callable[[], None]] = {
    "pytest.fail": lambda: pytest.fail("on purpose"),
    "sys.exit": _exit,
    "GeneratorExit": _raise(GeneratorExit),
    "CancelledError": _raise(asyncio.CancelledError),
    "KeyboardInterrupt": _raise(KeyboardInterrupt),
    "BaseException": _raise(OwnOutcome),
}


def rows(n: int = N) -> list[dict[str, Any]]:
    return [{"question": f"question {i}", "answer": str(i)} for i in range(n)]


def evaluate(env: vf.Environment, client: Any = None, **kwargs: Any) -> vf.Results:
    results: vf.Results = env.evaluate(client=client or vf.FakeClient("x"), model="m", use_tqdm=False, **kwargs)
    return results


def is_bad(state: Any) -> bool:
    return bool(state["example_id"] == BAD)


# --- what is no Exception -----------------------------------------------------------------------------------------


class Turns(vf.MultiTurnEnv):
    """Two turns; one of its hooks goes wrong in one row."""

    def __init__(self, place: str, wrong: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(dataset=rows(), rubric=vf.Rubric([lambda completion: 1.0]), max_turns=2, **kwargs)
        self.place, self.wrong = place, wrong

    def go_wrong(self, place: str, state: Any) -> None:
        if place == self.place and is_bad(state):
            self.wrong()

    def setup_state(self, state: Any) -> Any:
        self.go_wrong("setup_state", state)
        return state

    def env_response(self, messages: Any, state: Any) -> Any:
        self.go_wrong("env_response", state)
        return "go on"

    @vf.stop
    async def enough(self, state: Any) -> bool:
        self.go_wrong("async stop", state)
        return False

    @vf.stop
    def really_enough(self, state: Any) -> bool:
        self.go_wrong("stop", state)
        return False

    @vf.cleanup
    def put_away(self, state: Any) -> None:
        self.go_wrong("cleanup", state)

    @vf.cleanup
    async def put_away_too(self, state: Any) -> None:
        self.go_wrong("async cleanup", state)


class OwnRollout(vf.SingleTurnEnv):
    wrong: Callable[[], None]

    def rollout(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if is_bad(args[0]):
            self.wrong()
        return super().rollout(*args, **kwargs)


class OwnCompletion(vf.MultiTurnEnv):
    wrong: Callable[[], None]

    async def is_completed(self, state: Any) -> bool:  # type: ignore[override]
        if is_bad(state):
            self.wrong()
        return bool(state["trajectory"])

    def env_response(self, messages: Any, state: Any) -> Any:
        return "go on"


class OwnScoring(vf.SingleTurnEnv):
    wrong: Callable[[], None]

    def score_rollout(self, state: Any) -> Any:  # type: ignore[override]
        if is_bad(state):
            self.wrong()
        return 1.0


def one_row_goes_wrong(place: str, wrong: Callable[[], None]) -> tuple[vf.Environment, Any]:
    """An environment, and the client to play it with."""

    def reward(completion: Any, state: Any) -> float:
        if is_bad(state):
            wrong()
        return 1.0

    async def awaited(completion: Any, state: Any) -> float:
        await asyncio.sleep(0.001)
        return reward(completion, state)

    def grouped(completions: Any, states: Any) -> list[float]:
        return [reward(None, state) for state in states]

    class Odd:
        def __float__(self) -> float:
            wrong()
            return 0.0

    def odd(completion: Any, state: Any) -> Any:
        return Odd() if is_bad(state) else 1.0

    rewards: dict[str, Any] = {
        "reward": reward,
        "async reward": awaited,
        "group reward": grouped,
        "a reward's value": odd,
    }
    if place in rewards:
        return vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric([rewards[place]])), None
    one = vf.Rubric([lambda completion: 1.0])
    if place == "rollout":
        return OwnRollout(dataset=rows(), rubric=one, wrong=wrong), None
    if place == "is_completed":
        return OwnCompletion(dataset=rows(), rubric=one, wrong=wrong), None
    if place == "score_rollout":
        return OwnScoring(dataset=rows(), wrong=wrong), None
    if place in ("client", "judge"):

        class Client:
            async def complete(self, request: Any) -> vf.Completion:
                if f"question {BAD}" in str(request.prompt):
                    wrong()
                return vf.Completion(message={"role": "assistant", "content": "<score>1</score>"})

        if place == "client":
            return vf.SingleTurnEnv(dataset=rows(), rubric=one), Client()
        judge = vf.JudgeRubric(
            judge_client=Client(), judge_model="j", template="{question} {completion} <score>[0-1]</score>"
        )
        return vf.SingleTurnEnv(dataset=rows(), rubric=judge), None
    return Turns(place, wrong), None


PLACES = ["reward", "async reward", "group reward", "a reward's value", "setup_state", "env_response", "is_completed"]
PLACES += ["stop", "async stop", "cleanup", "async cleanup", "rollout", "score_rollout", "client", "judge"]


@pytest.mark.parametrize("what", ESCAPES)
@pytest.mark.parametrize("place", PLACES)
def test_whatever_is_raised_wherever_it_is_raised_fails_its_own_row(place: str, what: str, tmp_path: Path) -> None:
    env, client = one_row_goes_wrong(place, ESCAPES[what])
    results = evaluate(env, client, results_path=tmp_path / "run", rollouts_per_example=2, max_concurrent=4)
    assert {state["example_id"] for state in results.failed} == {BAD}
    assert results["rewards"] == [1.0] * (2 * (N - 1))
    for state in results.failed:
        assert state["reward"] is None
    record = next(
        record
        for record in map(json.loads, (tmp_path / "run/results.jsonl").read_bytes().splitlines())
        if record["error"]
    )
    shown = record["error"]["traceback"]
    assert "on purpose" in shown or "exit(3)" in shown or what in shown
    assert record["error"]["cause"]


@vf.cpu_bound
def in_a_process(completion: Any, answer: str, info: dict[str, str]) -> float:
    if answer == str(BAD):
        if info["what"] == "sys.exit":
            sys.exit(3)
        raise {"GeneratorExit": GeneratorExit, "KeyboardInterrupt": KeyboardInterrupt}[info["what"]]
    return 1.0


@pytest.mark.parametrize("what", ["sys.exit", "GeneratorExit", "KeyboardInterrupt"])
def test_what_a_worker_process_raises_fails_its_own_row_too(what: str) -> None:
    dataset = [{**row, "info": {"what": what}} for row in rows()]
    results = evaluate(vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric([in_a_process])))
    assert [state["example_id"] for state in results.failed] == [BAD]
    assert what.removeprefix("sys.") in results.errors()[0]["traceback"].replace("SystemExit", "exit")


@pytest.mark.parametrize("what", ["pytest.fail", "GeneratorExit", "KeyboardInterrupt", "BaseException"])
def test_a_tool_that_raises_what_is_no_exception_fails_its_row_and_not_the_run(what: str) -> None:
    def tool(number: int) -> int:
        """Look a number up."""
        if number == BAD:
            ESCAPES[what]()
        return number

    def reply(messages: Any) -> Any:
        if messages[-1]["role"] == "tool":
            return "done"
        number = messages[-1]["content"].split()[-1]
        function = {"name": "tool", "arguments": json.dumps({"number": int(number)})}
        return {"content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}

    env = vf.ToolEnv(dataset=rows(), tools=[tool], rubric=vf.Rubric([lambda completion: 1.0]))
    results = evaluate(env, vf.FakeClient(reply))
    assert [state["example_id"] for state in results.failed] == [BAD]
    assert results["rewards"] == [1.0] * (N - 1)


@pytest.mark.parametrize("what", ESCAPES)
@pytest.mark.parametrize("how", ["gather", "task group", "task"])
def test_what_a_task_of_a_rewards_own_raises_fails_the_row_and_does_not_end_the_loop(how: str, what: str) -> None:
    async def part() -> float:
        await asyncio.sleep(0.001)
        ESCAPES[what]()
        return 1.0

    async def reward(completion: Any, state: Any) -> float:
        if is_bad(state):
            if how == "gather":
                await asyncio.gather(part(), part())
            elif how == "task":
                await asyncio.create_task(part())
            else:
                async with asyncio.TaskGroup() as group:
                    group.create_task(part())
        return 1.0

    env = vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric([reward]))
    if how == "task group" and what == "CancelledError":
        return  # a task that cancels itself is none that failed: the group goes on without it

    async def main() -> vf.Results:
        return await env.evaluate(client=vf.FakeClient("x"), model="m", use_tqdm=False)

    for results in (evaluate(env), asyncio.run(main())):
        assert [state["example_id"] for state in results.failed] == [BAD]
        assert results["rewards"] == [1.0] * (N - 1)


def test_task_groups_of_other_frameworks_work_inside_a_reward() -> None:
    import anyio

    async def reward(completion: Any) -> float:
        done: list[float] = []

        async def part(seconds: float) -> None:
            await anyio.sleep(seconds)
            done.append(seconds)

        with anyio.move_on_after(0.2):
            async with anyio.create_task_group() as group:
                group.start_soon(part, 0.001)
                group.start_soon(part, 60.0)
        return float(len(done))

    assert evaluate(vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric([reward])))["rewards"] == [1.0] * N


def test_a_row_that_cannot_even_be_made_fails_alone() -> None:
    class Rows(list):  # type: ignore[type-arg]
        def __getitem__(self, i: Any) -> Any:
            if i == BAD:
                pytest.fail("on purpose")
            return super().__getitem__(i)

    env = vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric([lambda completion: 1.0]))
    assert env.dataset is not None
    env.dataset._given = Rows(env.dataset._given)
    assert len(evaluate(env).scored) >= N - 1


def test_a_real_cancellation_still_cancels() -> None:
    async def main() -> None:
        env = vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric([lambda completion: 1.0]))
        run = asyncio.create_task(
            env.evaluate_async(client=vf.FakeClient("x", latency_s=60), model="m", use_tqdm=False)
        )  # type: ignore[arg-type]
        await asyncio.sleep(0.2)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(run, 20)

    asyncio.run(main())


def test_an_error_that_cannot_even_be_shown_is_an_error_like_any_other() -> None:
    class ShyError(Exception):
        def __str__(self) -> str:
            raise SystemExit

    def reward(completion: Any, state: Any) -> float:
        if is_bad(state):
            raise ShyError
        return 1.0

    results = evaluate(vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric([reward])))
    assert [state["example_id"] for state in results.failed] == [BAD]
    assert "ShyError" in str(results.failed[0]["error"])


# --- what never returns, and what is slow -------------------------------------------------------------------------


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """Whoever waits for it waits until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def wait_where(place: str, never: threading.Event) -> vf.Environment:
    def reward(completion: Any, state: Any) -> float:
        if is_bad(state):
            never.wait()
        return 1.0

    async def awaited(completion: Any, state: Any) -> float:
        if is_bad(state):
            await asyncio.sleep(3600)
        return 1.0

    if place in ("reward", "async reward"):
        return vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric([reward if place == "reward" else awaited]))
    return Turns(place, never.wait)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["reward", "async reward", "setup_state", "env_response", "stop", "cleanup"])
@pytest.mark.parametrize("warm", [False, True], ids=["at first", "after quick calls"])
def test_a_call_that_never_returns_fails_its_own_row_at_the_limit(
    place: str, warm: bool, never: threading.Event
) -> None:
    env = wait_where(place, never)
    if warm:  # by now everything of it has proved to be quick
        env.generate(inputs=rows(BAD), client=vf.FakeClient("x"), model="m", use_tqdm=False, max_concurrent=1)
    began = time.monotonic()
    results = evaluate(env, reward_timeout_s=1.0, hook_timeout_s=1.0)
    assert time.monotonic() - began < 20
    assert [state["example_id"] for state in results.failed] == [BAD]
    assert "did not return within 1 s" in str(results.failed[0]["error"])
    assert results["rewards"] == [1.0] * (N - 1)


def test_other_rows_are_done_long_before_the_one_that_hangs(never: threading.Event) -> None:
    done: list[float] = []
    hung = threading.Event()

    def reward(completion: Any, state: Any) -> float:
        if is_bad(state):
            hung.set()
            never.wait()
        if hung.is_set():
            done.append(time.monotonic())
        return 1.0

    began = time.monotonic()
    results = evaluate(
        vf.SingleTurnEnv(dataset=rows(200), rubric=vf.Rubric([reward])), max_concurrent=2, reward_timeout_s=5.0
    )
    assert len(results.failed) == 1
    assert len(done) > 150
    assert max(done) - began < 4.5


def test_limits_are_settings_of_the_environment_too(never: threading.Event) -> None:
    env = vf.SingleTurnEnv(
        dataset=rows(),
        rubric=vf.Rubric([lambda completion, state: never.wait() if is_bad(state) else 1.0]),
        reward_timeout_s=0.5,
    )
    assert "within 0.5 s" in str(evaluate(env).failed[0]["error"])
    group = env.run_group([rows()[BAD] | {"example_id": BAD}], client=vf.FakeClient("x"), model="m")
    assert "within 0.5 s" in str(group.failed[0]["error"])


def test_each_environment_of_a_group_has_its_own_limits_unless_the_run_says_otherwise(never: threading.Event) -> None:
    def sticks(completion: Any) -> float:
        never.wait()
        return 1.0

    parts = [
        vf.SingleTurnEnv(dataset=rows(1), rubric=vf.Rubric([sticks]), reward_timeout_s=seconds)
        for seconds in (0.3, 0.6)
    ]
    group = vf.EnvGroup(parts, env_names=["a", "b"])
    said = [str(state["error"]) for state in evaluate(group).failed]
    assert ["within 0.3 s" in said[0], "within 0.6 s" in said[1]] == [True, True]
    assert all("within 0.2 s" in str(state["error"]) for state in evaluate(group, reward_timeout_s=0.2).failed)


@pytest.mark.parametrize("name", ["reward_timeout_s", "hook_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_a_limit_that_makes_no_sense_is_refused_at_once(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        vf.SingleTurnEnv(dataset=rows(), **{name: value})
    with pytest.raises(ValueError, match=name):
        evaluate(vf.SingleTurnEnv(dataset=rows()), **{name: value})


def test_a_batch_with_a_row_that_never_returns_is_scored_but_for_that_row(never: threading.Event) -> None:
    def reward(completion: Any, answer: str) -> float:
        if answer == str(BAD):
            never.wait()
        return 1.0

    rubric = vf.Rubric([reward])
    from verifiers.calls import time_limits

    with time_limits(reward_s=0.3):
        scores = rubric.score_rollouts_sync(["?"] * N, ["x"] * N, [str(i) for i in range(N)])
    assert scores["reward"] == [None if i == BAD else 1.0 for i in range(N)]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_slow_function_does_not_make_other_rows_late(kind: str) -> None:
    """Even an async one, which holds the loop itself: what lay there meanwhile was not late."""

    def slow(completion: Any, state: Any) -> float:
        if is_bad(state):
            time.sleep(2.0)
        return 1.0

    async def slow_on_the_loop(completion: Any, state: Any) -> float:
        return slow(completion, state)

    async def reply(messages: Any) -> str:
        await asyncio.sleep(0.4)
        return "x"

    with vf.FakeServer(reply) as server:
        env = vf.SingleTurnEnv(dataset=rows(60), rubric=vf.Rubric([slow if kind == "sync" else slow_on_the_loop]))
        client = vf.HTTPClient(server.url, timeout_s=1.0, max_retries=0)
        results = evaluate(env, client, max_concurrent=8)
    assert results.causes == {}
    assert results["rewards"] == [1.0] * 60


# --- what cannot be averaged --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1e101, -1e101, 1e308, 1e16, math.inf, math.nan, 10**400, "1.0", b"1", "yes", None])
def test_a_reward_that_cannot_be_averaged_fails_its_row_and_the_report_is_there(value: Any, tmp_path: Path) -> None:
    def reward(completion: Any, state: Any) -> Any:
        return value if is_bad(state) else 1.0

    env = vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric([reward]))
    results = evaluate(env, results_path=tmp_path / "run")
    assert [state["example_id"] for state in results.failed] == [BAD]
    assert results.failed[0]["error"].blame == "grader"
    assert results.mean_reward == 1.0
    assert "1 failed" in str(results)
    assert evaluate(env, results_path=tmp_path / "run", resume=True).mean_reward == 1.0


def test_a_sum_of_weighted_rewards_that_cannot_be_averaged_fails_its_row() -> None:
    def large(completion: Any, state: Any) -> float:
        return 1e90 if is_bad(state) else 0.0

    results = evaluate(vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric([large], weights=[1e90])))
    assert [state["example_id"] for state in results.failed] == [BAD]
    assert "add up to" in str(results.failed[0]["error"])
    for weight in (math.nan, math.inf):
        with pytest.raises(ValueError, match="weight"):
            vf.Rubric([large], weights=[weight])
    scores = vf.Rubric([lambda completion: 1e16]).score_rollouts_sync(["?"], ["x"], [""])
    assert scores["reward"] == [None]


def test_the_largest_rewards_that_are_let_through_are_computed_with() -> None:
    env = vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric([lambda state: 1e15 if is_bad(state) else -1e15]))
    results = evaluate(env, rollouts_per_example=2)
    assert not results.failed
    assert results.interval().low is not None
    assert all(np.isfinite(np.float32(state["advantage"]) ** 2) for state in results.rollouts)


def test_numbers_of_other_libraries_are_rewards() -> None:
    values: list[Any] = [np.float32(0.5), np.float64(0.5), np.int64(1), np.bool_(True), True, 1]
    env = vf.SingleTurnEnv(dataset=rows(len(values)), rubric=vf.Rubric([lambda state: values[state["example_id"]]]))
    assert evaluate(env)["rewards"] == [0.5, 0.5, 1.0, 1.0, 1.0, 1.0]


def test_a_saved_run_with_such_a_row_still_opens_and_resuming_it_makes_the_row_again(tmp_path: Path) -> None:
    """Earlier versions wrote them, and then the report was lost on every resume."""
    env = vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric([lambda completion: 1.0]))
    evaluate(env, results_path=tmp_path / "run")
    file = tmp_path / "run/results.jsonl"
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    lines[2]["reward"], lines[4]["reward"], lines[5]["metrics"] = 1e101, "1.0", {"odd": 1e300}
    for line in lines:
        line.pop("line_crc32", None)  # nor did they write checksums
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    client = vf.FakeClient("x")
    results = evaluate(env, client, results_path=tmp_path / "run", resume=True)
    assert len(client.requests) == 2
    assert results["rewards"] == [1.0] * N
    assert "0 failed" in str(results)


# --- what endpoints said, word for word ---------------------------------------------------------------------------


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
def test_raw_replies_are_dropped_once_their_row_is_on_disk(tmp_path: Path) -> None:
    """Thirty replies of 4 MB, of which the text is a few bytes: memory stays where it was."""

    class Wordy:
        async def complete(self, request: Any) -> vf.Completion:
            message = {"role": "assistant", "content": "x"}
            return vf.Completion(message=message, raw={"choices": [{"message": message}], "junk": "j" * (4 << 20)})

    env = vf.SingleTurnEnv(dataset=rows(30), rubric=vf.Rubric([lambda completion: 1.0]))
    evaluate(env, Wordy(), num_examples=2, max_concurrent=1)
    before = resident_mib()
    results = evaluate(env, Wordy(), results_path=tmp_path / "run", max_concurrent=2)
    assert resident_mib() - before < 60
    for state in results.rollouts:
        (response,) = state["responses"]
        assert response is dict.get(state["trajectory"][0], "response")
        assert response.raw is None
        assert response.choices[0].message.content == "x"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory from /proc")
def test_texts_of_megabytes_are_dropped_too_and_read_from_disk_when_asked_for(tmp_path: Path) -> None:
    class Long:
        async def complete(self, request: Any) -> vf.Completion:
            number = request.prompt[-1]["content"].split()[-1]
            return vf.Completion(message={"role": "assistant", "content": number * (4 << 20)})

    env = vf.SingleTurnEnv(dataset=rows(10) * 3, rubric=vf.Rubric([lambda completion: float(len(completion))]))
    evaluate(env, Long(), num_examples=2, max_concurrent=1)
    before = resident_mib()
    results = evaluate(env, Long(), results_path=tmp_path / "run", max_concurrent=2)
    assert resident_mib() - before < 60
    assert results["rewards"] == [1.0] * 30
    for i in (0, 7, 29):
        state = results.rollouts[i]
        whole = str(i % 10) * (4 << 20)
        assert state["completion"][0]["content"] == whole
        assert state.get("completion") == dict(state)["completion"] == {**state}["completion"]
        assert dict(state.items())["completion"] == vf.State(state)["completion"] == state.copy()["completion"]
        kept = state["trajectory"][0]["completion"][0]["content"]
        assert kept.startswith(whole[:200] + "… (4,194,304 characters; all of them are in ")
    file = tmp_path / "run/results.jsonl"
    file.write_bytes(b"\n".join(reversed(file.read_bytes().splitlines())) + b"\n")  # lines may move
    assert results.rollouts[7]["completion"][0]["content"] == "7" * (4 << 20)


def test_an_unsaved_run_keeps_what_endpoints_said() -> None:
    with vf.FakeServer("x") as server:
        results = evaluate(vf.SingleTurnEnv(dataset=rows(2)), vf.HTTPClient(server.url))
    assert results.rollouts[0]["responses"][0].raw["choices"]


@pytest.mark.parametrize("place", ["async reward", "async hook", "for the main thread only"])
@pytest.mark.parametrize("how", ["waits for a lock", "sleeps", "computes"])
def test_a_function_that_holds_the_loop_for_ever_fails_its_own_row_all_the_same(
    place: str, how: str, never: threading.Event
) -> None:
    """Only a signal gets through to it, and does, as long as it comes back to Python at all."""

    def hold() -> None:
        while not never.is_set():
            if how == "waits for a lock":
                never.wait()
            elif how == "sleeps":
                time.sleep(3600)

    async def reward(completion: Any, state: Any) -> float:
        await asyncio.sleep(0)
        if is_bad(state):
            hold()
        return 1.0

    def with_an_alarm(completion: Any, state: Any) -> float:
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        try:
            return 1.0 if not is_bad(state) else hold() or 0.0
        finally:
            signal.signal(signal.SIGALRM, before)

    if place == "async hook":
        env: vf.Environment = Turns("async stop", hold)
    else:
        env = vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric([reward if place == "async reward" else with_an_alarm]))
    began = time.monotonic()
    results = evaluate(env, vf.FakeClient("x", latency_s=0.1), reward_timeout_s=1.0, hook_timeout_s=1.0)
    assert time.monotonic() - began < 20
    assert [state["example_id"] for state in results.failed] == [BAD]
    assert "blocked the event loop" in str(results.failed[0]["error"])
    assert results["rewards"] == [1.0] * (N - 1)
