"""Pictures of a training: a file that any browser shows, and dots in a terminal."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.trainers.watch.plot import MAX_POINTS, nice_ticks, plot_svg, plot_text

SVG = "{http://www.w3.org/2000/svg}"


def line(step: int, **more: Any) -> dict[str, Any]:
    reward = 0.1 + 0.8 * step / 100
    return {
        "step": step,
        "reward": reward,
        "reward_low": reward - 0.05,
        "reward_high": reward + 0.05,
        "kl": 0.001 * step,
        "entropy": 1.5 - step / 100,
        "completion_tokens": 80.0,
        "tokens_per_s": 5000.0 + step,
        "loss": 0.01,
        **more,
    }


def texts(svg: str) -> list[str]:
    return [found.text or "" for found in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_reward_with_band_and_evaluations_and_a_panel_for_each_other_figure() -> None:
    evals = [{"step": step, "eval": {"reward": 0.5, "low": 0.45, "high": 0.55}} for step in (0, 50, 100)]
    svg = plot_svg([line(step) for step in range(1, 101)], evals, "sums · tiny")
    page = ElementTree.fromstring(svg)
    assert len(page.findall(f"{SVG}path")) == 5
    assert len(page.findall(f"{SVG}polygon")) == 1
    assert len(page.findall(f"{SVG}circle")) == 3
    names = ["reward, with its interval, and evaluations (dots)", "KL to the reference", "entropy"]
    assert set(texts(svg)) >= {"sums · tiny", *names, "tokens of a completion", "tokens per second", "step 0", "100"}
    assert "loss" not in texts(svg)
    assert "prefers-color-scheme: dark" in svg
    assert svg == plot_svg([line(step) for step in range(1, 101)], evals, "sums · tiny")


def test_figures_that_are_missing_get_no_panel_and_holes_no_points() -> None:
    svg = plot_svg(
        [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 3, "loss": float("nan")}, {"loss": 1.0}]
    )
    page = ElementTree.fromstring(svg)
    assert len(page.findall(f"{SVG}path")) == 1
    assert "loss" in texts(svg)
    assert "training" in texts(svg)


def test_evaluations_alone_are_drawn_also_as_bare_figures() -> None:
    page = ElementTree.fromstring(plot_svg([], [{"step": 1, "reward": 0.5}, {"step": 2, "reward": None}]))
    assert len(page.findall(f"{SVG}circle")) == 1


def test_nothing_yet_is_said_so() -> None:
    assert "no step has been made yet" in texts(plot_svg([], [], "sums"))


def test_a_title_cannot_become_markup() -> None:
    svg = plot_svg([line(1)], [], '</text><script>alert("x")</script>\x1b[31m&')
    assert "<script" not in svg
    assert '</text><script>alert("x")</script>&' in texts(svg)


def test_a_long_training_is_a_small_file() -> None:
    svg = plot_svg([line(step) for step in range(1, 20_001)])
    (path, *_) = ElementTree.fromstring(svg).findall(f"{SVG}path")
    assert path.attrib["d"].count("L") == MAX_POINTS - 1
    assert len(svg) < 100_000


numbers = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), st.integers(-(10**6), 10**6))


@given(st.lists(st.fixed_dictionaries({"step": st.integers(0, 1000), "reward": numbers, "kl": numbers}), max_size=20))
def test_any_figures_make_a_well_formed_picture_within_its_frame(steps: list[dict[str, Any]]) -> None:
    svg = plot_svg(steps)
    page = ElementTree.fromstring(svg)
    width, height = map(float, page.attrib["viewBox"].split()[2:])
    for path in page.findall(f"{SVG}path"):
        places = [tuple(map(float, place)) for place in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path.attrib["d"])]
        assert places
        assert all(0 <= x <= width and 0 <= y <= height for x, y in places)


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_ticks_are_few_rise_and_span_the_range(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    ticks = nice_ticks(low, high)
    room = 1e-9 * max(abs(low), abs(high)) + 1e-100
    assert ticks[0] <= low + room
    assert ticks[-1] >= high - room
    assert 2 <= len(ticks) <= 7
    assert ticks == sorted(set(ticks))


def test_a_curve_in_the_terminal_rises_from_the_lower_left_to_the_upper_right() -> None:
    rows = plot_text([i / 40 for i in range(41)], width=40, height=8).splitlines()
    assert rows[0].startswith("1.00 ┤")
    assert rows[7].startswith("0.00 ┤")
    assert rows[-1].split() == ["step", "1", "41"]
    assert not rows[0].endswith("⠀")
    assert rows[7][6] != "⠀"
    assert all(len(row) <= 40 for row in rows)


@given(
    st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6), st.just(float("nan"))), max_size=300),
    st.integers(1, 120),
    st.integers(1, 30),
)
def test_any_values_fit_the_terminal(values: list[float | None], width: int, height: int) -> None:
    picture = plot_text(values, width, height)
    if all(value is None or value != value for value in values):
        assert picture == "(nothing to draw yet)"
        return
    rows = picture.splitlines()
    assert len(rows) == max(height, 2) + 2
    assert any(0x2800 < ord(mark) <= 0x28FF for mark in picture)
    if width >= 30:
        assert max(map(len, rows)) <= width


@pytest.mark.parametrize("values", [[1.0], [0.5, 0.5], [None, 0.5]], ids=repr)
def test_one_point_or_a_flat_line_is_drawn(values: list[float | None]) -> None:
    assert any(0x2800 < ord(mark) <= 0x28FF for mark in plot_text(values, 30, 5))
