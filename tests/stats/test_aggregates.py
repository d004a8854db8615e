"""Aggregate metrics: right, honest about how sure they are, and never a reason to lose a run."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import verifiers as vf
from verifiers import stats
from verifiers.stats.aggregates import BY_NAME

LABELS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["a", "b", "c", None])), min_size=1, max_size=40)


@given(LABELS)
def test_the_figures_of_labels_are_those_of_the_textbook(pairs):
    truth, predicted = [one for one, _ in pairs], [other for _, other in pairs]
    recalls = [stats.recall(truth, predicted, label) for label in dict.fromkeys(truth)]
    assert stats.balanced_accuracy(truth, predicted) == pytest.approx(sum(recalls) / len(recalls))
    assert stats.accuracy(truth, predicted) == pytest.approx(sum(a == b for a, b in pairs) / len(pairs))
    for label in dict.fromkeys(truth):
        p, r = stats.precision(truth, predicted, label), stats.recall(truth, predicted, label)
        expected = 0.0 if not p or not r else 2 * p * r / (p + r)
        assert stats.f1(truth, predicted, label) == pytest.approx(expected)


def rows(n: int, seed: int, right: float = 0.7, rollouts: int = 2) -> list[dict]:
    draw = random.Random(seed)
    made = []
    for example in range(n):
        answer = draw.choice(["yes", "no"])
        skill = min(max(draw.gauss(right, 0.2), 0), 1)
        for _ in range(rollouts):
            parsed = answer if draw.random() < skill else draw.choice(["yes", "no", None])
            made.append({"example_id": example, "answer": answer, "parsed": parsed})
    return made


def test_the_interval_holds_about_as_often_as_it_says_where_rollouts_of_an_example_are_alike():
    truth = stats.aggregate(rows(4000, 99), BY_NAME["balanced_accuracy"], resamples=2).value
    held = 0
    for seed in range(60):
        found = stats.aggregate(rows(60, seed), BY_NAME["balanced_accuracy"], resamples=200)
        held += found.low <= truth <= found.high
    assert held >= 50  # of 60; 57 are expected


def test_a_difference_of_the_same_run_is_0_and_of_a_better_one_above_it():
    a, b = rows(80, 1, right=0.3), rows(80, 1, right=0.95)
    same = stats.aggregate_difference(a, a, BY_NAME["macro_f1"])
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    better = stats.aggregate_difference(a, b, BY_NAME["macro_f1"])
    assert better.low > 0
    assert better.examples == 80


def test_a_function_that_raises_or_has_no_figure_says_so():
    def broken(rows):
        raise ZeroDivisionError("no rows of this kind")

    assert stats.aggregate(rows(5, 0), broken).error == "ZeroDivisionError: no rows of this kind"
    assert str(stats.aggregate(rows(5, 0), lambda rows: None)) == "none"
    assert stats.aggregate(rows(1, 0), BY_NAME["accuracy"]).low is None


QUESTIONS = [{"question": f"{i}?", "answer": "yes" if i % 4 else "no"} for i in range(24)]


def env_of(aggregates) -> vf.Environment:
    def right(completion, answer):
        return completion[-1]["content"] == answer

    return vf.SingleTurnEnv(dataset=QUESTIONS, rubric=vf.Rubric([right]), aggregates=aggregates)


def share_of_no(rows):
    return sum(row["parsed"] == "no" for row in rows) / len(rows)


def test_a_run_has_the_figures_of_its_environment_in_results_report_and_metadata(tmp_path: Path):
    env = env_of({"balanced": "balanced_accuracy", "f1_no": vf.stats.f1_of("no"), "share_of_no": share_of_no})
    results = env.evaluate(client=vf.FakeClient("yes"), model="m", results_path=tmp_path / "run", use_tqdm=False)
    assert results.mean_reward == pytest.approx(0.75)
    assert results.aggregates["balanced"].value == 0.5
    assert results.aggregates["f1_no"].value == 0.0
    assert results.aggregates["share_of_no"].value == 0.0
    assert "balanced     0.500  [0.500, 0.500]" in str(results)
    saved = json.loads((tmp_path / "run" / "metadata.json").read_text())["aggregates"]
    assert saved["balanced"]["value"] == 0.5
    assert results.aggregate("accuracy").value == pytest.approx(0.75)


def test_an_aggregate_that_is_not_known_is_an_error_when_the_environment_is_made():
    with pytest.raises(ValueError, match="there is no aggregate 'f2'"):
        env_of(["f2"])


def test_a_figure_that_cannot_be_had_costs_no_run(tmp_path: Path):
    env = env_of([lambda rows: 1 / 0])
    results = env.evaluate(client=vf.FakeClient("yes"), model="m", results_path=tmp_path / "run", use_tqdm=False)
    assert len(results) == 24
    assert "failed: ZeroDivisionError" in str(results)


class LastWord(vf.Parser):
    def parse_answer(self, completion):
        return completion[-1]["content"].split()[-1]


def rows_of_texts(*answers: str) -> list[dict]:
    return [{"question": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]


def always(completion) -> float:
    return 1.0


def test_a_group_has_the_figures_of_its_members_read_by_their_own_parsers():
    about = {"rubric": vf.Rubric([always]), "aggregates": ["accuracy"]}
    words = vf.SingleTurnEnv(dataset=rows_of_texts("no", "yes", "no"), parser=LastWord(), **about)
    plain = vf.SingleTurnEnv(dataset=rows_of_texts("it is no", "no"), **about)
    inner = vf.EnvGroup([words], ["words"])
    group = vf.EnvGroup([inner, plain], ["inner", "plain"], aggregates=["accuracy"])
    results = group.evaluate(vf.FakeClient("it is no"), "fake", use_tqdm=False)
    found = {name: one.value for name, one in results.aggregates.items()}
    assert found == {"accuracy": 3 / 5, "inner/words/accuracy": pytest.approx(2 / 3), "plain/accuracy": 1 / 2}


def test_a_function_that_exits_or_has_a_figure_of_300_digits_costs_neither_the_run_nor_the_report(tmp_path: Path):
    def leaves(rows):
        raise SystemExit(3)

    def long_winded(rows):
        raise RuntimeError("x" * 5000)

    figures = {"leaves": leaves, "long_winded": long_winded, "huge": lambda rows: -1e300}
    env = vf.SingleTurnEnv(dataset=rows_of_texts("no", "yes"), rubric=vf.Rubric([always]), aggregates=figures)
    results = env.evaluate(vf.FakeClient("no"), "fake", results_path=tmp_path / "run", use_tqdm=False)
    assert results.aggregates["leaves"].error == "EscapedError: it called exit(3)"
    assert str(results.aggregates["huge"]) == "-1e+300  [-1e+300, -1e+300]"
    assert max(map(len, str(results).splitlines())) < 300
    assert results.aggregate(leaves).error is not None
    assert json.loads((tmp_path / "run" / "metadata.json").read_text())["aggregates"]["huge"]["value"] == -1e300
