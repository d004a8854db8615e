"""What one watches while a run goes on: a bar, lines, or nothing."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.clients.activity import Activity
from verifiers.progress import Bar, Lines, Tally, make_progress


def state(reward: float | None = None, error: Any = None, tokens: int = 0) -> vf.State:
    usage = vf.Usage(completion_tokens=tokens) if tokens else None
    return vf.State(reward=reward, error=error, usage=usage)


def test_a_tally_leaves_failures_out_of_the_mean_and_counts_them() -> None:
    tally = Tally()
    tally.start(total=5, done=1)
    for one in (state(1.0, tokens=10), state(0.0), state(error=vf.ServerError("x"))):
        tally.update(one)
    assert re.fullmatch(r"4/5 rollouts, 1 failed, reward 0\.500, [\d,]+ tokens/s", tally.line())


def test_a_tally_of_nothing_has_no_mean() -> None:
    tally = Tally()
    tally.start(3, 0)
    assert tally.line() == "0/3 rollouts, reward –"


def test_lines_come_now_and_then_and_at_the_end() -> None:
    stream = io.StringIO()
    lines = Lines(stream, every_s=1000.0)
    lines.start(3, 0)
    for _ in range(3):
        lines.update(state(1.0))
    assert stream.getvalue() == ""
    lines.stop()
    assert stream.getvalue() == "3/3 rollouts, reward 1.000\n"
    often = io.StringIO()
    chatty = Lines(often, every_s=0.0)
    chatty.start(2, 0)
    chatty.update(state(1.0))
    chatty.update(state(1.0))
    assert often.getvalue().count("\n") == 2


def test_a_bar_draws_on_stderr_and_ends(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    bar = Bar()
    bar.start(2, 0)
    bar.update(state(1.0))
    bar.note("a [bold] note")
    bar.update(state(0.0))
    bar.stop()
    out, err = capsys.readouterr()
    assert out == ""
    assert "2/2 rollouts" in err
    assert "note" in err


def test_a_bar_counts_tokens_while_no_rollout_ends_and_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    bar = Bar()
    bar.activity = Activity(under_way={lambda: 5000})
    bar.start(200, 0)
    bar.began -= 10
    bar.bar.refresh()
    bar.stop()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "0/200 rollouts, reward –, " in shown
    assert "tokens/s" in shown
    assert max(map(len, re.split(r"[\r\n]", shown))) <= 80


def test_silence_lines_or_a_bar_by_request_and_by_where_stderr_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(make_progress(False)) is Tally
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert type(make_progress(True)) is Lines
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert type(make_progress(True)) is Bar
    own = Tally()
    assert make_progress(own) is own


def test_a_run_is_silent_on_request_and_says_one_line_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    env = vf.SingleTurnEnv(dataset=[{"question": "x"}])
    env.evaluate(client=vf.FakeClient("4"), model="m", use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    env.evaluate(client=vf.FakeClient("4"), model="m")
    out, err = capsys.readouterr()
    assert out == ""
    assert "1/1 rollouts" in err


def test_a_progress_of_ones_own_is_told_of_every_rollout() -> None:
    env = vf.SingleTurnEnv(dataset=[{"question": str(i)} for i in range(5)])
    mine = Tally()
    env.evaluate(client=vf.FakeClient("4"), model="m", progress=mine)
    assert (mine.total, mine.done) == (5, 5)


def test_a_resumed_run_shows_the_mean_of_all_its_rollouts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def moody(state: vf.State) -> float:
        if state["example_id"] == 3 and is_down:
            raise ConnectionError("the judge is down")
        return float(state["example_id"] != 3)

    is_down = True
    env = vf.SingleTurnEnv(dataset=[{"question": f"q{i}"} for i in range(5)], rubric=vf.Rubric([moody]))
    env.evaluate(client=vf.FakeClient("x"), model="m", results_path=tmp_path / "run")
    is_down = False
    env.evaluate(client=vf.FakeClient("x"), model="m", results_path=tmp_path / "run", resume=True)
    first, second = capsys.readouterr().err.splitlines()
    assert "5/5 rollouts, 1 failed, reward 1.000" in first
    assert "5/5 rollouts, reward 0.800" in second
