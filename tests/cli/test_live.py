"""The line one watches: its interval is that of the report, and it costs next to nothing."""

from __future__ import annotations

import io
import random
import re

import pytest

import verifiers as vf
from verifiers import stats
from verifiers.cli.live import Watched, WatchedLines, bar_width, make_watched
from verifiers.clients.activity import Activity
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


def test_a_mean_of_examples_that_are_all_alike_has_no_interval_of_width_zero():
    watched = Watched(at_once=2)
    watched.start(6, 0)
    for example in range(3):
        watched.update(ended(example, 0.1))
    assert watched.reach is None
    assert "±" not in watched.line()


def test_the_line_tells_what_is_done_failed_and_running_and_at_what_cost():
    watched = Watched(at_once=2)
    watched.start(6, 0)
    watched.update(ended(0, 1.0, cost=0.01))
    watched.update(ended(1, error=RuntimeError(), cost=0.03))
    watched.update(ended(2, 0.0, cost=0.02))
    line = watched.line()
    assert line.startswith("3/6 · 1 failed · reward 0.500 ± ")
    assert "30 tokens" in line
    assert "2 running" in line
    assert "$0.0600" in line
    watched.began -= 30
    assert watched.line().endswith("0:30 left")


def test_one_example_has_no_interval_and_a_resumed_run_counts_from_where_it_was():
    watched = Watched(at_once=4)
    watched.start(10, 7)
    watched.update(ended(0, 1.0))
    assert watched.line().startswith("8/10 · reward 1.000 · ")
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
    assert first.startswith("1/2 · reward 1.000")
    assert last.startswith("2/2 · reward 1.000")


def busy(at_once: int = 8) -> Watched:
    watched = Watched(at_once)
    watched.activity = Activity(replies=30, tokens=12_345, retries=13, refusals=4)
    watched.start(120, 0)
    for example in range(26):
        watched.update(ended(example, float(example % 2), cost=0.001))
    watched.began -= 30
    return watched


def test_at_80_columns_the_line_keeps_what_matters_and_the_bar_stays_in_sight():
    room = 80 - bar_width(80) - 2
    line = busy().line(room)
    assert len(line) <= room
    assert line.startswith("26/120 · 13 retried, 4 refused · reward 0.500 ± ")
    assert line.endswith("12.3k tokens")
    assert all(part in busy().line() for part in ("$0.0260", "8 running", " left", "/s"))


def test_a_narrow_terminal_has_the_counts_and_the_reward_at_least():
    assert busy().line(30).startswith("26/120 · reward 0.500 ± ")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_is_drawn_in_80_columns_and_counts_replies_before_a_rollout_ends(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    bar = make_watched(4)
    bar.activity = Activity()
    bar.start(10, 0)
    bar.activity.tokens = 777
    bar.bar.refresh()
    bar.stop()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "━" in plain
    assert "777 tokens" in plain
    assert max(map(len, re.split(r"[\r\n]", plain))) <= 80


def test_the_last_line_of_an_interrupted_run_says_of_nothing_that_it_is_still_running(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("COLUMNS", "120")
    bar = make_watched(4)
    bar.start(10, 0)
    bar.began -= 30
    bar.update(ended(0, 1.0))
    bar.bar.refresh()
    bar.stop()
    last = screen.getvalue().splitlines()[-1]
    assert "1/10" in last
    assert "in 0:30" in last
    assert "running" not in last
    assert "left" not in last


def test_the_run_tells_the_bar_of_replies_retries_and_refusals_as_they_come():
    seen = []

    class Watching(Watched):
        def update(self, state):
            super().update(state)
            seen.append((self.activity.tokens, self.activity.retries))

    with vf.FakeServer("It is 4.", chaos=vf.Chaos(rate=0.3)) as server:
        env = vf.SingleTurnEnv(dataset=[{"question": f"{i}?", "answer": "4"} for i in range(30)])
        client = vf.HTTPClient(server.url)
        results = env.evaluate(client=client, model="m", use_tqdm=Watching(4), max_concurrent=4)
        assert server.faults
    assert not results.failed
    assert seen[-1][0] == results.usage.completion_tokens
    assert seen[-1][1] > 0
