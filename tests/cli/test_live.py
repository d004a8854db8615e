"""The line one watches: its interval is that of the report, and it costs next to nothing."""

from __future__ import annotations

import random

import pytest

from verifiers import stats
from verifiers.cli.live import Watched, WatchedLines, make_watched
from verifiers.types import State, Usage


def ended(
    example: int, reward: float | None = None, error: Exception | None = None, cost: float | None = None
) -> State:
    usage = Usage(prompt_tokens=5, completion_tokens=10, cost_usd=cost)
    return State({"input": {"example_id": example}, "reward": reward, "error": error, "usage": usage})


def test_the_interval_is_clustered_by_example():
    draw = random.Random(3)
    rewards = [(i % 50, draw.random() + (i % 50) / 50) for i in range(400)]
    watched = Watched(at_once=8)
    watched.start(400, 0)
    for example, reward in rewards:
        watched.update(ended(example, reward))
    exact = stats.mean_interval([reward for _, reward in rewards], [example for example, _ in rewards])
    assert watched.reach == pytest.approx((exact.high - exact.low) / 2, rel=0.05)


def test_the_line_tells_what_is_done_failed_and_running_and_at_what_cost():
    watched = Watched(at_once=2)
    watched.start(6, 0)
    watched.update(ended(0, 1.0, cost=0.01))
    watched.update(ended(1, error=RuntimeError()))
    watched.update(ended(2, 0.0, cost=0.02))
    line = watched.line()
    assert line.startswith("3/6 · 1 failed · 2 running · reward 0.500 ± ")
    assert "tokens/s" in line
    assert "$0.0300" in line
    watched.began -= 30
    assert watched.line().endswith("0:30 left")


def test_one_example_has_no_interval_and_a_resumed_run_counts_from_where_it_was():
    watched = Watched(at_once=4)
    watched.start(10, 7)
    watched.update(ended(0, 1.0))
    assert watched.line().startswith("8/10 · 0 failed · 2 running · reward 1.000 · ")
    watched.began -= 10
    assert watched.line().endswith("0:20 left")


def test_lines_are_printed_where_no_one_watches(capsys):
    watched = make_watched(4)
    assert isinstance(watched, WatchedLines)
    watched.start(2, 0)
    watched.next_at = 0.0
    watched.update(ended(0, 1.0))
    watched.update(ended(0, 1.0))
    watched.stop()
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("1/2 · 0 failed · 1 running · reward 1.000")
    assert last.startswith("2/2 · 0 failed · reward 1.000")
