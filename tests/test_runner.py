"""Rows × repeats: concurrency, order, failures that stay alone, interruption, and a loop that never stalls."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import signal
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers import runner
from verifiers.progress import Tally
from verifiers.runner import Job, Limits, Run, RunInterruptedError, interruptible


def rows(n: int) -> list[dict[str, Any]]:
    return [{"question": str(i), "answer": str(i)} for i in range(n)]


def exact(completion: Any, answer: str) -> bool:
    return bool(completion[-1]["content"] == answer)


def echo(messages: Any) -> str:
    return str(messages[-1]["content"])


def evaluate(env: vf.Environment, client: Any = None, **kwargs: Any) -> Any:
    return env.evaluate(client=client or vf.FakeClient(echo), model="m", **{"use_tqdm": False, **kwargs})


# --- order and concurrency ----------------------------------------------------------------------------------------


def test_results_come_in_the_order_of_the_rows_whatever_finishes_first() -> None:
    draw = random.Random(0)

    async def reply(messages: Any) -> str:
        await asyncio.sleep(draw.random() / 50)
        return echo(messages)

    results = evaluate(vf.SingleTurnEnv(dataset=rows(50)), vf.FakeClient(reply), rollouts_per_example=3)
    assert results["example_id"] == [i for i in range(50) for _ in range(3)]
    assert [c[0]["content"] for c in results["completions"]] == [str(i) for i in range(50) for _ in range(3)]


class Gauge:
    """How many are inside at once, at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def __call__(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)
        self.now -= 1


@pytest.mark.parametrize(
    ("limits", "generating", "scoring"),
    [
        ({"max_concurrent": 3}, 3, 3),
        ({"max_concurrent_generation": 4}, 4, 40),
        ({"max_concurrent_scoring": 2}, 40, 2),
        ({"max_concurrent_generation": 5, "max_concurrent_scoring": 2}, 5, 2),
        ({}, 40, 40),
    ],
)
def test_limits_hold_for_generation_and_scoring_each(limits: dict[str, int], generating: int, scoring: int) -> None:
    generation, scores = Gauge(), Gauge()

    async def reply(messages: Any) -> str:
        await generation()
        return "x"

    async def reward(completion: Any) -> float:
        await scores()
        return 1.0

    env = vf.SingleTurnEnv(dataset=rows(40), rubric=vf.Rubric([reward]))
    assert len(evaluate(env, vf.FakeClient(reply), **limits)) == 40
    assert generation.most <= generating
    assert scores.most <= scoring
    assert generation.most >= min(generating, 5)


@pytest.mark.parametrize("name", ["max_concurrent", "generation", "scoring"])
@pytest.mark.parametrize("value", [0, -2, 1.5, "many"])
def test_a_limit_that_makes_no_sense_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: value})


def test_thousands_of_rollouts_wait_at_once_while_the_loop_keeps_turning() -> None:
    longest = 0.0

    async def main() -> None:
        nonlocal longest
        env = vf.SingleTurnEnv(dataset=rows(3000))
        run = asyncio.create_task(evaluate(env, vf.FakeClient("x", latency_s=0.5)))
        last = time.process_time()  # not the clock on the wall: other programs may be running
        while not run.done():
            await asyncio.sleep(0.005)
            longest, last = max(longest, time.process_time() - last), time.process_time()
        assert len(run.result()) == 3000

    asyncio.run(main())
    assert longest < 1.0


def test_blocking_rewards_do_not_hold_up_the_loop() -> None:
    ticks = 0

    async def main() -> None:
        nonlocal ticks
        env = vf.SingleTurnEnv(dataset=rows(30), rubric=vf.Rubric([lambda completion: time.sleep(0.2) or 1.0]))
        run = asyncio.create_task(evaluate(env))
        while not run.done():
            await asyncio.sleep(0.005)
            ticks += 1
        assert run.result()["rewards"] == [1.0] * 30

    began = time.perf_counter()
    asyncio.run(main())
    assert ticks >= 10  # a reward on the loop would leave room for a handful
    assert time.perf_counter() - began < 4  # one after the other: 6 s


def test_a_reward_that_turns_slow_holds_up_neither_the_loop_nor_the_other_rewards() -> None:
    calls = itertools.count()
    where: set[bool] = set()

    def turns_slow(completion: Any) -> float:
        where.add(threading.current_thread() is threading.main_thread())
        if next(calls) > 20:
            time.sleep(0.3)
        return 1.0

    env = vf.SingleTurnEnv(dataset=rows(60), rubric=vf.Rubric([turns_slow]))
    began = time.perf_counter()
    assert evaluate(env, max_concurrent=20)["rewards"] == [1.0] * 60
    assert time.perf_counter() - began < 8  # one after the other: 12 s
    assert where == {False}


def test_a_reward_with_an_alarm_of_its_own_works() -> None:
    def with_alarm(completion: Any, answer: str) -> float:
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        return 1.0

    results = evaluate(vf.SingleTurnEnv(dataset=rows(10), rubric=vf.Rubric([with_alarm])))
    assert (results.causes, results["rewards"]) == ({}, [1.0] * 10)


# --- failures stay alone ------------------------------------------------------------------------------------------


def test_one_poison_row_never_ends_the_run() -> None:
    dataset = rows(6)
    dataset[2]["info"] = "this is no JSON"
    results = evaluate(vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric([exact])))
    assert results["example_id"] == [0, 1, 3, 4, 5]
    (failed,) = results.failed
    assert failed["example_id"] == 2
    assert "row 2" in str(failed["error"])
    assert results.mean_reward == 1.0


def test_a_row_that_cannot_be_formatted_fails_alone_under_its_own_id() -> None:
    from datasets import Dataset

    dataset = Dataset.from_list([{"question": q, "example_id": i} for i, q in ((7, "a"), (8, None), (9, "c"))])
    env = vf.SingleTurnEnv(dataset=dataset)
    shuffled = env.get_dataset(seed=3)
    results = env.generate(inputs=shuffled, client=vf.FakeClient("x"), model="m", use_tqdm=False)
    assert sorted(s["example_id"] for s in results.rollouts) == [7, 8, 9]
    assert [s["example_id"] for s in results.failed] == [8]
    assert "'question'" in str(results.failed[0]["error"])


@pytest.mark.parametrize("kind", ["exit", "cancel", "raise", "nan", "text", "none"])
def test_a_reward_that_goes_wrong_fails_its_own_rollouts_and_is_no_zero(kind: str) -> None:
    async def reward(completion: Any, answer: str) -> Any:
        if answer != "1":
            return 1.0
        if kind == "exit":
            raise SystemExit(1)
        if kind == "cancel":
            raise asyncio.CancelledError
        if kind == "raise":
            raise LookupError("judge is down")
        return {"nan": float("nan"), "text": "good", "none": None}[kind]

    results = evaluate(vf.SingleTurnEnv(dataset=rows(3), rubric=vf.Rubric([reward])), rollouts_per_example=2)
    assert results["rewards"] == [1.0] * 4
    assert [s["example_id"] for s in results.failed] == [1, 1]
    assert all(isinstance(s["error"], vf.GraderError) for s in results.failed)
    assert all(s["reward"] is None and s["advantage"] is None for s in results.failed)
    assert "reward 'reward'" in str(results.failed[0]["error"])


# --- groups -------------------------------------------------------------------------------------------------------


def test_group_rewards_see_the_whole_group_and_leave_failed_members_out() -> None:
    seen: list[int] = []
    turns = Counter[str]()

    def reply(messages: Any) -> str:
        asked = echo(messages)
        turns[asked] += 1
        if asked == "1" and turns[asked] == 2:
            raise vf.ServerError("down")
        return asked * turns[asked]

    def longest(completions: Any) -> list[float]:
        seen.append(len(completions))
        sizes = [len(c[-1]["content"]) for c in completions]
        return [float(size == max(sizes)) for size in sizes]

    env = vf.SingleTurnEnv(dataset=rows(3), rubric=vf.Rubric([longest]))
    results = evaluate(env, vf.FakeClient(reply), rollouts_per_example=3)
    assert sorted(seen) == [2, 3, 3]
    assert len(results.failed) == 1
    assert sum(results["rewards"]) == 3.0
    for example in range(3):
        group = [s for s in results.scored if s["example_id"] == example]
        assert sum(s["advantage"] for s in group) == pytest.approx(0.0)
    assert results.failed[0]["advantage"] is None


def test_a_group_reward_sees_rollouts_in_the_order_of_their_repeats_whichever_finishes_first() -> None:
    waits = iter([0.06, 0.03, 0.0])

    async def reply(messages: Any) -> str:
        wait = next(waits)
        await asyncio.sleep(wait)
        return str(wait)

    def first(completions: Any) -> list[float]:
        return [1.0, *[0.0] * (len(completions) - 1)]

    results = evaluate(
        vf.SingleTurnEnv(dataset=rows(1), rubric=vf.Rubric([first])), vf.FakeClient(reply), rollouts_per_example=3
    )
    assert [completion[-1]["content"] for completion in results["completion"]] == ["0.06", "0.03", "0.0"]
    assert results["rewards"] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("returned", [[1.0], 1.0])
def test_a_group_reward_that_goes_wrong_fails_its_group_only(returned: Any) -> None:
    def compare(completions: Any, answers: Any) -> Any:
        return returned if answers[0] == "0" else [1.0] * len(completions)

    env = vf.SingleTurnEnv(dataset=rows(2), rubric=vf.Rubric([compare]))
    results = evaluate(env, rollouts_per_example=2)
    assert [s["example_id"] for s in results.failed] == [0, 0]
    assert results["rewards"] == [1.0, 1.0]


def test_a_turn_has_the_whole_reward_of_its_rollout_with_that_of_the_group(tmp_path: Path) -> None:
    def alone(completion: Any) -> float:
        return 1.0

    def together(completions: Any) -> list[float]:
        return [10.0 * len(completions)] * len(completions)

    env = vf.SingleTurnEnv(dataset=[{"question": "?"}], rubric=vf.Rubric([alone, together]))
    settings = {"model": "m", "use_tqdm": False, "state_columns": ["trajectory"], "results_path": tmp_path / "run"}
    client = vf.FakeClient(["x", RuntimeError("down"), "x"])
    first = env.evaluate(client=client, rollouts_per_example=2, max_concurrent=1, **settings)
    assert [step["reward"] for state in first.scored for step in state["trajectory"]] == [11.0]
    second = env.evaluate(client=client, rollouts_per_example=2, resume=True, **settings)
    assert second.rewards == [21.0] * 2
    assert [step["reward"] for state in second.scored for step in state["trajectory"]] == [21.0] * 2


def test_a_group_whose_members_all_failed_is_not_scored() -> None:
    def never(completions: Any) -> list[float]:
        raise AssertionError("nothing to score")

    env = vf.SingleTurnEnv(dataset=rows(2), rubric=vf.Rubric([never]))
    results = evaluate(env, vf.FakeClient(vf.ServerError("down")), rollouts_per_example=2)
    assert [type(s["error"]) for s in results.failed] == [vf.ServerError] * 4


# --- one pass, by hand --------------------------------------------------------------------------------------------


def jobs(n: int) -> list[Job]:
    return [Job(i, {"example_id": i, "prompt": "x"}, 0) for i in range(n)]


async def make_state(job: Job) -> vf.State:
    await asyncio.sleep(0)
    return vf.State(input=dict(job.row), trajectory=[])


def test_a_store_that_cannot_be_written_ends_the_run_at_once() -> None:
    made = 0

    async def generate(job: Job) -> vf.State:
        nonlocal made
        made += 1
        return await make_state(job)

    def sink(job: Job, state: vf.State) -> None:
        raise OSError("no space left on device")

    run = Run(jobs(1000), generate=generate, sink=sink, limits=Limits(max_concurrent=10))
    with pytest.raises(OSError, match="no space"):
        asyncio.run(run.finish())
    assert made < 50


def test_every_rollout_reaches_the_sink_and_the_progress_once() -> None:
    saved: list[int] = []
    progress = Tally()
    run = Run(jobs(30), generate=make_state, sink=lambda job, _: saved.append(job.position), progress=progress)
    done = asyncio.run(run.finish())
    assert sorted(saved) == [job.position for job, _ in done] == list(range(30))
    assert progress.done == 30


def test_nothing_to_do_is_done_at_once() -> None:
    assert asyncio.run(Run([], generate=make_state).finish()) == []


# --- interruption -------------------------------------------------------------------------------------------------


def interrupt_after(seconds: float, times: int = 1) -> None:
    def send() -> None:
        for _ in range(times):
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()


def test_ctrl_c_finishes_what_is_under_way_and_says_what_there_is() -> None:
    env = vf.SingleTurnEnv(dataset=rows(200), rubric=vf.Rubric([exact]))
    interrupt_after(0.2)
    with pytest.raises(RunInterruptedError, match=r"stopped after \d+ of 200") as caught:
        evaluate(env, vf.FakeClient(echo, latency_s=0.1), max_concurrent=10)
    results = caught.value.results
    assert 10 <= len(results.rollouts) < 200
    assert results.failed == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_twice_stops_at_once_and_cleans_up() -> None:
    cleaned: list[int] = []

    class Env(vf.SingleTurnEnv):
        @vf.cleanup
        async def note(self, state: vf.State) -> None:
            cleaned.append(state["example_id"])

    interrupt_after(0.2, times=2)
    began = time.perf_counter()
    with pytest.raises(RunInterruptedError):
        evaluate(Env(dataset=rows(8)), vf.FakeClient("x", latency_s=60))
    assert time.perf_counter() - began < 10
    assert sorted(cleaned) == list(range(8))


def test_ctrl_c_reaches_every_run_of_a_loop_and_the_signal_is_given_back() -> None:
    told: list[str] = []

    async def run(name: str, seconds: float) -> None:
        with interruptible(lambda: told.append(name)):
            await asyncio.sleep(seconds)

    async def main() -> None:
        before = signal.getsignal(signal.SIGINT)
        first, second = asyncio.create_task(run("first", 0.3)), asyncio.create_task(run("second", 0.1))
        await asyncio.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)
        await second
        os.kill(os.getpid(), signal.SIGINT)
        await first
        assert signal.getsignal(signal.SIGINT) is before

    asyncio.run(main())
    assert told == ["first", "second", "first"]


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    outcome: list[Any] = []
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=lambda: outcome.append(evaluate(vf.SingleTurnEnv(dataset=rows(5)))))
    thread.start()
    thread.join()
    assert len(outcome[0]) == 5
    assert signal.getsignal(signal.SIGINT) is before


# --- what a run leaves behind -------------------------------------------------------------------------------------


def test_a_run_gives_the_garbage_collector_back() -> None:
    before, callbacks = gc.get_threshold(), list(gc.callbacks)
    env = vf.SingleTurnEnv(dataset=rows(20))
    threads = [threading.Thread(target=evaluate, args=(env,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    evaluate(env)
    assert gc.get_threshold() == before
    assert gc.callbacks == callbacks
    assert gc.get_freeze_count() == 0


def test_what_a_run_has_made_is_old_when_it_ends_so_that_no_young_collection_looks_at_it() -> None:
    results = evaluate(vf.SingleTurnEnv(dataset=rows(300), rubric=vf.Rubric([exact])))
    young = {id(one) for generation in (0, 1) for one in gc.get_objects(generation)}
    assert len(results.rollouts) == 300
    assert not any(id(state) in young for state in results.rollouts)


def test_what_was_there_before_a_run_is_not_scanned_while_it_lasts() -> None:
    frozen: list[int] = []

    def reward(completion: Any) -> float:
        frozen.append(gc.get_freeze_count())
        return 1.0

    before = len(gc.get_objects())
    evaluate(vf.SingleTurnEnv(dataset=rows(3), rubric=vf.Rubric([reward])))
    assert min(frozen) > before // 2
    assert gc.get_freeze_count() == 0


def test_garbage_that_outlives_a_run_is_collected_after_a_number_of_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Node:
        itself: Any = None

    def leave_garbage() -> weakref.ref[Node]:
        node = Node()
        node.itself = node
        return weakref.ref(node)

    env = vf.SingleTurnEnv(dataset=rows(5))
    monkeypatch.setattr(runner.long_lived, "rollouts", 0)
    left = leave_garbage()
    gc.freeze()
    gc.unfreeze()  # it is old now: only a collection over everything finds it
    evaluate(env)
    assert left() is not None
    monkeypatch.setattr(runner, "SWEPT_AFTER", 10)
    evaluate(env)
    evaluate(env)
    assert left() is None


def test_a_collector_that_was_switched_off_stays_so_during_a_run() -> None:
    thresholds: list[int] = []

    def reward(completion: Any) -> float:
        thresholds.append(gc.get_threshold()[0])
        return 1.0

    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        evaluate(vf.SingleTurnEnv(dataset=rows(3), rubric=vf.Rubric([reward])))
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
    assert thresholds == [0, 0, 0]


def test_those_who_wait_for_their_turn_when_a_run_breaks_off_have_not_begun() -> None:
    begun: list[str] = []

    async def reply(messages: Any) -> str:
        begun.append(messages[-1]["content"])
        await asyncio.sleep(60)
        return "x"

    async def main() -> None:
        run = asyncio.create_task(
            evaluate(vf.SingleTurnEnv(dataset=rows(30)), vf.FakeClient(reply), max_concurrent_generation=2)
        )
        while len(begun) < 2:
            await asyncio.sleep(0.001)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(main())
    gc.collect()  # a coroutine that was made and never awaited would say so here
    assert begun == ["0", "1"]


def test_a_run_leaves_no_tasks_behind() -> None:
    async def main() -> set[Any]:
        env = vf.SingleTurnEnv(dataset=rows(20), rubric=vf.Rubric([exact]))
        await evaluate(env)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(main()) == set()


def test_one_environment_serves_many_threads_at_once() -> None:
    env = vf.SingleTurnEnv(dataset=rows(30), rubric=vf.Rubric([exact]))
    means: list[float] = []
    threads = [threading.Thread(target=lambda: means.append(evaluate(env).mean_reward)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert means == [1.0] * 8
