"""What one sees of a training: a panel in a terminal, lines elsewhere, nothing on request; never a control sequence."""

from __future__ import annotations

import io
import os
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.trainers.watch.display import TrainingDisplay
from verifiers.trainers.watch.wording import bin_means, clean, sparkline


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def figures(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": step / 10,
        "loss": 0.01,
        "reward": step / 100,
        "reward_low": step / 100 - 0.05,
        "reward_high": step / 100 + 0.05,
        "kl": 0.002,
        "entropy": 1.25,
        "completion_tokens": 85.2,
        "completion_tokens_max": 128,
        "truncated": 0.05,
        "zero_variance": 0.25,
        "failed": 0,
        "tokens_per_s": 5321.0,
        "generation_s": 1.2,
        "scoring_s": 0.1,
        "training_s": 0.4,
        "step_s": 1.7,
        **more,
    }


def seen(stream: io.StringIO) -> str:
    """What a terminal would show, without the codes that place and colour it."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def test_a_pipe_gets_a_line_every_so_many_steps_and_the_last() -> None:
    stream = io.StringIO()
    display = TrainingDisplay(logging_steps=10, stream=stream)
    display.start(25, "sums · tiny")
    for step in range(1, 26):
        display.update(figures(step))
    display.eval({"reward": 0.5, "low": 0.45, "high": 0.55, "n": 200, "failed": 3})
    display.notice("every reply is cut off")
    display.stop()
    first, ten, _, last, evaluated, noticed = stream.getvalue().splitlines()
    assert first == "sums · tiny: 25 steps"
    assert ten.startswith(
        "step 10/25  reward 0.100 ± 0.050  loss 0.0100  kl 0.0020  entropy 1.25  length 85  cut off 5%  "
        "groups without variance 25%  5,321 tokens/s  1.70 s"
    )
    assert last.startswith("step 25/25")
    assert evaluated == "evaluation after step 25: reward 0.500 ± 0.050 of 200 rollouts, 3 failed"
    assert noticed == "! step 25: every reply is cut off"


def test_figures_that_are_missing_or_no_numbers_are_left_out() -> None:
    stream = io.StringIO()
    display = TrainingDisplay(stream=stream)
    display.start(2, "warm-up")
    display.update({"step": 1, "loss": 2.5, "reward": None, "kl": float("nan"), "entropy": "high", "failed": 0})
    display.eval({})
    assert stream.getvalue().splitlines()[1:] == ["step 1/2  loss 2.5000", "evaluation after step 1: no reward"]


def test_a_terminal_gets_a_panel_with_curves_and_where_the_time_goes() -> None:
    stream = Terminal()
    display = TrainingDisplay(stream=stream)
    display.start(100, "sums · tiny")
    for step in range(1, 41):
        display.update(figures(step))
    display.eval({"reward": 0.5, "low": 0.45, "high": 0.55, "n": 200})
    display.notice("the reward falls")
    display.stop()
    display.stop()
    text = seen(stream)
    for part in (
        "sums · tiny",
        "step 40/100",
        "epoch 4.00",
        "left",
        "0.400 ± 0.050",
        "▁▁▁▁▂▂▂▂▃▃▃▃▄▄▄▄▅▅▅▅▆▆▆▆▇▇▇▇████",
        "85, longest 128",
        "5,321, 1.70 s a step",
        "cut off 5%",
        "groups without variance 25%",
        "generation 71%",
        "scoring 6%",
        "training 24%",
        "evaluation after step 40: reward 0.500 ± 0.050 of 200 rollouts",
        "! step 40: the reward falls",
    ):
        assert part in text, part


def test_silence_on_request() -> None:
    stream = Terminal()
    display = TrainingDisplay(show=False, stream=stream)
    display.start(2, "sums")
    display.update(figures(1))
    display.eval({"reward": 0.5})
    display.notice("hm")
    display.stop()
    assert stream.getvalue() == ""


def test_a_resumed_training_goes_on_with_its_curve() -> None:
    display = TrainingDisplay(stream=io.StringIO())
    display.start(10, "sums")
    display.recall([figures(1), figures(2)])
    display.update(figures(3))
    name, value, history = display._curves()[0]
    assert (name, value, history) == ("reward", "0.030 ± 0.050", [0.01, 0.02, 0.03])


def test_escape_sequences_in_titles_and_notices_do_nothing() -> None:
    evil = "a\x1b[2Jb\x1b]0;owned\x07c\x1bPq\x1b\\d\x9b31me\x1b(Bf\r\ng[bold]h"
    for stream in (io.StringIO(), Terminal()):
        display = TrainingDisplay(stream=stream)
        display.start(1, evil)
        display.notice(evil)
        display.stop()
        raw = stream.getvalue()
        assert "\x1b[2J" not in raw
        assert "\x1b]" not in raw
        assert "\x9b" not in raw
        assert "abcd\\x9b31mef g[bold]h" in seen(stream)  # markup is text, too


@given(st.text())
def test_cleaned_text_is_one_line_without_a_control_character(text: str) -> None:
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", clean(text).replace("\t", ""))


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(1, 50))
def test_a_sparkline_fits_and_spans_lowest_to_highest(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    means = bin_means(values, width)
    if means and max(means) - min(means) > 1e-3:
        assert line[means.index(max(means))] == "█"
        assert line[means.index(min(means))] == "▁"


@pytest.mark.parametrize("total", [0, 5], ids=["unknown", "fewer than made"])
def test_a_total_that_does_not_fit_breaks_nothing(total: int) -> None:
    stream = Terminal()
    display = TrainingDisplay(stream=stream)
    display.start(total, "sums")
    display.update(figures(9))
    display.stop()
    assert f"step 9/{total}" in seen(stream)


def test_until_the_first_step_ends_the_panel_names_its_phase():
    screen = Terminal()
    display = TrainingDisplay(stream=screen)
    display.start(3, "sums")
    display.enter("sampling and scoring 8 rollouts")
    assert "preparing the sampler, then sampling and scoring 8 rollouts" in display.phase_text()
    tally = display.counted()
    tally.start(8, 0)
    tally.done = 3
    assert "sampling and scoring 8 rollouts: 3 of 8 done, 0 tokens" in display.phase_text()
    display.enter("learning from 8 rollouts")
    assert display.phase_text().startswith("learning from 8 rollouts, 0:0")
    display.stop()
    assert "learning from 8 rollouts" in screen.getvalue()


def test_where_no_one_watches_the_first_phases_are_lines_and_later_ones_are_not():
    out = io.StringIO()
    display = TrainingDisplay(stream=out)
    display.start(3, "sums")
    display.enter("sampling and scoring 8 rollouts")
    display.update(figures(1))
    display.enter("learning from 8 rollouts")
    assert "sampling and scoring 8 rollouts" in out.getvalue()
    assert "learning" not in out.getvalue()


def test_the_panel_leaves_room_for_what_a_terminal_writes_at_ctrl_c(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    screen = Terminal()
    display = TrainingDisplay(stream=screen)
    display.start(3, "sums")
    display.counted().note("stopping")
    display.stop()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert max(len(line) for line in plain.splitlines()) <= 76
    assert "stopping" in plain


def test_the_panel_is_as_wide_as_the_window_is_now(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    window = {"columns": 80}
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((window["columns"], 30)))
    screen = Terminal()
    display = TrainingDisplay(stream=screen)
    display.start(3, "sums")
    for columns in (80, 40, 120):
        window["columns"] = columns
        screen.seek(0)
        screen.truncate()
        display.eval({"reward": 0.5, "low": 0.45, "high": 0.55, "n": 200})
        assert max(len(line) for line in seen(screen).splitlines()) == columns - 5
    display.stop()


def test_in_a_narrow_window_a_curve_still_ends_with_the_last_step(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    screen = Terminal()
    display = TrainingDisplay(stream=screen)
    display.start(100, "sums")
    for step in range(1, 41):
        display.update(figures(step))
    display.stop()
    (reward,) = (line for line in seen(screen).splitlines()[-25:] if "reward" in line)
    assert "█ │" in reward
    assert "▁" in reward
