"""Rollouts sampled ahead: taken as they finish, never too old, none twice, and none lost."""

from __future__ import annotations

import asyncio
import json
import random
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import verifiers as vf
from tests.trainers import making
from verifiers.trainers.pipeline import Pipeline
from verifiers.trainers.row_stream import RowStream
from verifiers.trainers.staleness import versions_of
from verifiers.trainers.watch.report import _rows_per_process


class Finishing(Future[tuple[int, int]]):
    """A part that finishes when it is waited for, or at random before."""


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 4),
    ahead=st.integers(1, 3),
    slack=st.integers(0, 3),
    batches=st.integers(1, 12),
    seed=st.integers(0, 1 << 16),
)
def test_no_part_is_taken_too_late_whatever_finishes_when_and_each_is_taken_once(size, ahead, slack, batches, seed):
    draw = random.Random(seed)
    under_way: list[Future[tuple[int, int]]] = []
    now = 0

    def begin(number: int) -> Future[tuple[int, int]]:
        future: Future[tuple[int, int]] = Future()
        future.born = (number, now)  # type: ignore[attr-defined]
        under_way.append(future)
        return future

    def finish_some(at_least: int) -> None:
        for future in draw.sample(under_way, min(len(under_way), max(at_least, draw.randint(0, len(under_way))))):
            under_way.remove(future)
            future.set_result(future.born)  # type: ignore[attr-defined]

    pipeline: Pipeline[tuple[int, int]] = Pipeline(begin, size=size, ahead=ahead, max_delay=ahead + slack)
    choose = pipeline._choose

    def choosing(batch: int) -> Any:
        while (chosen := choose(batch)) is None:
            assert under_way, "it waits for something that nobody will finish"
            finish_some(1)
        return chosen

    pipeline._choose = choosing  # type: ignore[method-assign]
    taken: list[int] = []
    for now in range(batches):
        parts = pipeline.take(now, batches)
        assert len(parts) == size
        assert all(now - born <= ahead + slack for _, born in parts)
        taken += [number for number, _ in parts]
        finish_some(0)
    assert sorted(taken) == list(range(size * batches))  # each once, and none is left over at the end


def test_a_part_that_fails_is_heard_of_at_once():
    futures: list[Future[int]] = []

    def begin(_: int) -> Future[int]:
        futures.append(Future())
        futures[-1].set_exception(ValueError("the environment is broken")) if len(futures) == 3 else None
        return futures[-1]

    with pytest.raises(ValueError, match="the environment is broken"):
        Pipeline(begin, size=2, ahead=1, max_delay=1).take(0, 4)


def test_rows_that_were_learned_from_out_of_order_are_not_taken_again():
    rows = [str(i) for i in range(10)]
    first = RowStream(rows, seed=1)
    places = [first.take_one()[0] for _ in range(6)]
    assert first.note_learned([places[0], places[3]]) == 1
    again = RowStream(rows, seed=1)
    again.resume(first.first_unlearned, first.learned(first.first_unlearned))
    assert [again.take_one()[0] for _ in range(5)] == [1, 2, 4, 5, 6]


def test_rows_of_several_processes_are_told_apart_when_they_go_on():
    rows, streams = [str(i) for i in range(10)], []
    for index in range(2):
        stream = RowStream(rows, seed=1, shard=(index, 2))
        taken = [stream.take_one()[0] for _ in range(4)]
        stream.note_learned([taken[0], taken[1 + index]])  # the first has two without a gap, the second one
        streams.append(stream)
    cursor = min(stream.first_unlearned for stream in streams)
    learned = [place for stream in streams for place in stream.learned(cursor)]
    for index, wanted in enumerate(([2, 3, 4], [1, 3, 4])):
        again = RowStream(rows, seed=1, shard=(index, 2))
        again.resume(cursor, learned)
        assert [again.take_one()[0] for _ in range(3)] == wanted


def test_a_run_that_goes_on_in_order_still_takes_no_row_twice():
    rows = RowStream([str(i) for i in range(10)], seed=1)
    rows.resume(1, [4])  # sampled ahead until now, and one after the other from here on
    rows.take(2)
    assert rows.note_learned(range(rows.first_unlearned, rows.cursor)) == 3
    assert rows.learned(3) == [4]
    rows.take(2)
    assert rows.note_learned(range(rows.first_unlearned, rows.cursor)) == 6
    assert rows.learned(6) == []


@pytest.mark.parametrize("now", [1, 2, 3, 4])
def test_another_number_of_processes_takes_the_rows_that_are_left_and_each_once(now):
    rows = [str(i) for i in range(12)]
    so_far = _rows_per_process({"cursor": 3, "processes": 2, "learned": [8]}, now)
    streams = [RowStream(rows, seed=1, shard=(index, now)) for index in range(now)]
    taken = set()
    for stream in streams:
        stream.resume(so_far["cursor"], so_far["learned"])
        while stream.cursor * now < len(rows):
            taken.add(stream.take_one()[0] * now + stream._index)
    assert {place for place in taken if place < len(rows)} == {6, 7, 9, 10, 11}


# --- a training -----------------------------------------------------------------------------------------------------


class Slow(vf.MultiTurnEnv):
    """A tool between two turns, most of the time quick."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        await asyncio.sleep(0.15 if state["example_id"] % 5 == 0 else 0.0)
        return [{"role": "user", "content": "again"}]


def slow_env(n: int = 24) -> Any:
    rows = [{"question": f"say {i}", "answer": str(i)} for i in range(n)]
    return Slow(dataset=rows, rubric=vf.Rubric([making.share_of_e]), max_turns=2)


def learned_examples(made: Any) -> list[list[int]]:
    """Which examples each step learns from, in the order of the rollouts."""
    seen: list[list[int]] = []
    step = made.train_step

    def noting(batch: Any) -> Any:
        seen.append([state["example_id"] for state in batch.states])
        return step(batch)

    made.train_step = noting
    return seen


@pytest.mark.parametrize("late", [2, 4])
def test_staleness_never_exceeds_its_bound_and_is_shown_with_the_clip_fraction(tmp_path, late):
    made = making.trainer(tmp_path, env=slow_env(), num_batches_ahead=2, max_staleness=late, max_steps=8, batch_size=8)
    seen = learned_examples(made)
    report = made.train()
    assert max(line["staleness_max"] for line in report.steps) <= late
    assert max(line["staleness_max"] for line in report.steps) >= 1  # it was ahead
    assert any(line["across_updates"] > 0 for line in report.steps)  # turns before and after an update
    assert all(0 <= line["clip_fraction"] <= 1 for line in report.steps)
    assert any(line.get("ratio_max", 1.0) > 1.01 for line in report.steps[1:])  # the ratio corrects what is stale
    assert all(len(one) == 8 for one in seen)
    groups = [one[i] for one in seen for i in range(0, 8, 4)]
    assert len(groups) == 16 == len(set(groups))  # of 24 rows none was learned from twice
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["staleness_max"] for line in written if "loss" in line] == [s["staleness_max"] for s in report.steps]


def test_each_token_of_a_rollout_says_which_update_it_is_from(tmp_path):
    made = making.trainer(tmp_path, env=slow_env(), num_batches_ahead=1, max_steps=4, batch_size=8)
    states: list[Any] = []
    step = made.train_step

    def noting(batch: Any) -> Any:
        states.extend((made.step, state) for state in batch.states)
        return step(batch)

    made.train_step = noting
    made.train()
    for at, state in states:
        spans = versions_of(state)
        sampled = sum(len(turn["tokens"]["completion_ids"]) for turn in state["trajectory"])
        assert sum(n for n, _ in spans) == sampled
        versions = [version for _, version in spans]
        assert versions == sorted(versions)
        assert at - 1 <= versions[0] <= versions[-1] <= at


def test_a_slow_group_does_not_hold_up_the_others_while_it_may_still_be_late(tmp_path):
    """The first row takes as long as the whole rest: it is learned from in the last batch it may be in."""

    class OneIsStuck(vf.SingleTurnEnv):
        async def setup_state(self, state: Any, **_: Any) -> Any:
            if state["example_id"] == stuck:
                while made.step < 3:
                    await asyncio.sleep(0.01)
            return state

    rows = [{"question": f"say {i}", "answer": str(i)} for i in range(24)]
    env = OneIsStuck(dataset=rows, rubric=vf.Rubric([making.share_of_e]))
    made = making.trainer(tmp_path, env=env, num_batches_ahead=1, max_staleness=4, max_steps=6, batch_size=8)
    stuck = RowStream(made.rows.all, seed=made.config.seed).take_one()[1]["example_id"]
    seen = learned_examples(made)
    made.train()
    (at,) = [i for i, one in enumerate(seen) if stuck in one]
    assert 3 <= at <= 4


def test_without_batches_ahead_every_step_is_on_policy(tmp_path):
    """Rollouts one after the other are on policy, and no staleness is among the figures."""
    report = making.trainer(tmp_path, max_steps=3).train()
    assert all("staleness" not in line for line in report.steps)
    assert [round(line["ratio_mean"], 4) for line in report.steps] == [1.0, 1.0, 1.0]


def test_flat_groups_are_replaced_while_others_go_on(tmp_path):
    def half_flat(completion: Any, answer: str) -> float:
        return 0.0 if int(answer) % 2 else making.share_of_e(completion)

    env = making.environment(32, rubric=vf.Rubric([half_flat]))
    settings: dict[str, Any] = {"num_batches_ahead": 1, "dynamic_sampling": True, "max_steps": 3, "batch_size": 8}
    made = making.trainer(tmp_path, env=env, max_resamples=8, **settings)
    report = made.train()
    assert all(line["zero_variance"] < 1 for line in report.steps)
    assert sum(line["sampled"] for line in report.steps) > sum(line["samples"] for line in report.steps)
    assert made.cursor > 6  # the rows of replaced groups count as taken


def test_a_trainer_that_makes_batches_in_a_way_of_its_own_makes_them_whole_and_in_order(tmp_path):
    asked: list[int] = []

    class Own(vf.GRPOTrainer):
        def get_batch(self, epoch: int | None = None, step: int | None = None) -> Any:
            asked.append(int(step or 0))
            return super().get_batch(epoch, step)

    report = making.trainer(tmp_path, Own, num_batches_ahead=1, max_steps=3).train()
    assert asked == [0, 1, 2]
    assert len(report.steps) == 3


def test_a_run_that_was_stopped_goes_on_with_the_rows_it_has_not_learned_from(tmp_path):
    ahead: dict[str, Any] = {"num_batches_ahead": 2, "max_staleness": 4, "batch_size": 8, "save_steps": 1}
    first = making.trainer(tmp_path, env=slow_env(40), max_steps=4, **ahead)
    before = learned_examples(first)
    first.train()
    second = making.trainer(tmp_path, env=slow_env(40), max_steps=9, **ahead)
    after = learned_examples(second)
    second.train(resume=True)
    groups = [one[i] for one in [*before, *after] for i in range(0, 8, 4)]
    assert len(groups) == 18 == len(set(groups))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_staleness": 2}, "set num_batches_ahead"),
        ({"max_staleness": 1, "num_batches_ahead": 2}, "set at least 2, or sample fewer batches ahead"),
        ({"max_staleness": 2, "num_batches_ahead": 1, "steps_per_generation": 2}, "set at least 3"),
        ({"max_staleness": -1, "num_batches_ahead": 1}, "0 or more"),
    ],
)
def test_a_bound_that_cannot_be_kept_is_refused_before_anything_is_loaded(tmp_path, given, said):
    with pytest.raises(ValueError, match=said):
        making.config(tmp_path, **given).check()
