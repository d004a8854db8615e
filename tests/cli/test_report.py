"""The report: the right figures, in whatever shape the rewards come, and nothing that was not measured."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.cli.report import conversation, histogram, report, summary
from verifiers.cli.tables import fitted
from verifiers.results import Results


def results_of(rewards: list[float], **columns) -> Results:
    n = len(rewards)
    return Results(
        prompt=["q"] * n, completion=["a"] * n, example_id=[i // 2 for i in range(n)], reward=rewards, **columns
    )


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_a_histogram_has_every_reward_once(values):
    bins = histogram(values)
    assert sum(count for _, count in bins) == len(values)
    assert len(bins) <= 10


def test_pass_at_k_is_of_the_reward_where_it_is_right_or_wrong():
    shown = summary(results_of([1, 0, 1, 1], metrics={"other": [1, 0, 0, 0]}))["pass_at_k"]
    assert list(shown) == ["reward"]
    assert [shown["reward"][k]["mean"] for k in "12"] == [0.75, 1.0]


def test_pass_at_k_is_of_each_right_or_wrong_metric_where_the_reward_is_not():
    metrics = {"right": [1, 0, 1, 1], "style": [0.5, 0.2, 0.1, 0.1], "num_turns": [1, 1, 1, 1]}
    assert list(summary(results_of([1.1, 0, 1, 1], metrics=metrics))["pass_at_k"]) == ["right"]


def test_pass_at_k_tells_how_many_examples_had_enough_rollouts_and_pass_hat_k_stands_beside_it():
    results = Results(
        prompt=["q"] * 7, completion=["a"] * 7, example_id=[0, 0, 0, 1, 1, 1, 2], reward=[1, 1, 0, 1, 1, 1, 0]
    )
    shown = "\n".join(report(results))
    assert "pass@3  1.000" in shown
    assert "of 2 of 3 examples, 1 left out with fewer than 3 scored rollouts" in shown
    assert "pass^3  0.500" in shown
    figures = summary(results)
    assert figures["pass_hat_k"]["reward"]["2"]["mean"] == pytest.approx((1 / 3 + 1) / 2)
    assert (figures["pass_at_k"]["reward"]["3"]["examples"], figures["pass_at_k"]["reward"]["3"]["left_out"]) == (2, 1)


def test_one_rollout_an_example_has_no_pass_at_k_and_no_results_are_a_report_too():
    assert summary(Results(prompt=["q"], completion=["a"], example_id=[0], reward=[1.0]))["pass_at_k"] == {}
    assert "0 rollouts of 0 examples" in "\n".join(report(Results([])))


def test_the_worst_examples_are_named():
    assert "worst: example 1 0.000, example 2 0.500, example 0 1.000" in report(results_of([1, 1, 0, 0, 1, 0]))


def test_the_report_of_a_tool_environment_fits_one_screen_and_folds_counts_that_are_0():
    n = 20
    metrics = {f"{kind}_faults": [0.0] * n for kind in "abcdefghij"}
    metrics |= {"num_turns": [2.0] * n, "right": [float(i % 2) for i in range(n)]}
    results = Results(
        prompt=["q"] * n,
        completion=["\n".join("abcdefghijklmnopqrstuvwxyz")] * n,
        example_id=[i // 2 for i in range(n)],
        reward=[float(i % 2) for i in range(n)],
        metrics=metrics,
    )
    shown = report(results, height=24)
    assert len(shown) <= 24 - 3
    assert "always 0: a_faults, b_faults and 8 other counts" in shown
    assert "num_turns  2.000" in shown  # a count, and no share of anything: it has no interval
    assert any(line.startswith("right      0.500  [") for line in shown)


def test_pass_at_k_is_shown_for_a_reward_that_is_0_or_1_and_for_no_other():
    metrics = {"right": [1, 0, 1, 1]}
    assert any(line.startswith("pass@2") for line in report(results_of([1, 0, 1, 1], metrics=metrics)))
    assert not any("pass@" in line for line in report(results_of([1.1, 0, 1.1, 1.1], metrics=metrics)))


def test_many_rewards_are_a_row_of_blocks():
    (line,) = [line for line in report(results_of([i / 40 for i in range(40)])) if line.startswith("rewards: ")]
    assert line == "rewards: 0.000 ██████████ 0.975"


def test_one_rollout_shows_its_tool_calls_and_what_came_of_them():
    call = {"id": "1", "type": "function", "function": {"name": "light", "arguments": '{"on": true}'}}
    completion = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "it is on", "tool_call_id": "1"},
        {"role": "assistant", "content": "Done."},
    ]
    assert conversation(completion) == ["  assistant: → light(on=True)", "  tool: it is on", "  assistant: Done."]


def test_a_rollout_without_a_reward_is_no_zero():
    shown = "\n".join(report(results_of([None, None])))
    assert "reward –" in shown
    assert "rewards:" not in shown


def test_in_a_terminal_long_lines_are_broken_between_words_and_elsewhere_they_are_left_alone(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "40")
    line = "  assistant: " + "word " * 12
    shown = fitted([line, "short"], stream=Terminal())
    assert all(len(part) <= 40 for part in shown)
    assert shown[1].startswith("    word")
    assert shown[-1] == "short"
    assert fitted([line], stream=io.StringIO()) == [line]
    path = "outputs/evals/" + "letter-by-letter" * 3 + "--smollm2/1a2b3c4d"
    assert fitted([f"saved in {path}"], stream=Terminal()) == ["saved in", f"  {path}"], "it can be copied"
