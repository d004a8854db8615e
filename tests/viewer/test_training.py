"""metrics.jsonl → curves, evaluations and notices, also while it is written and where it is torn."""

from __future__ import annotations

import json

from tests.viewer import making
from verifiers.viewer.library import run_id_of
from verifiers.viewer.training import MAX_POINTS, MetricsLog


def write(path, *lines, end="\n"):
    with open(path, "a", encoding="utf-8") as file:
        file.write("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + end)


def read(path):
    log = MetricsLog(path)
    log.refresh()
    return log.page()


def test_a_training_has_curves_evaluations_notices_and_samples_by_step(ask, root):
    path = making.train(root, steps=40)
    run = f"runs/{run_id_of(path)}"
    page = ask(f"{run}/training")
    assert page["last_step"] == 40
    assert len(page["series"]["reward"]) == len(page["series"]["reward_low"]) == len(page["steps"]) == 40
    assert {"kl", "entropy", "clip_fraction", "zero_variance", "tokens_per_s", "metrics.correct"} <= page[
        "series"
    ].keys()
    assert [item["step"] for item in page["evaluations"]] == [20, 40]
    assert page["notices"][0]["step"] == 34
    assert len(page["ratio_histogram"]["counts"]) == 12
    about = ask(run)
    assert (about["kind"], about["has_advantages"]) == ("training", True)
    assert about["steps"][0] == [5, 16]
    rows = ask(f"{run}/rollouts", step=10)["rows"]
    assert {row["step"] for row in rows} == {10}
    [card] = ask("runs")["runs"]
    assert (card["step"], card["kind"], len(card["rewards"])) == (40, "training", 40)


def test_the_list_shows_the_whole_curve_of_a_long_training(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, *({"step": step, "reward": float(step)} for step in range(600)))
    log = MetricsLog(path)
    log.refresh()
    outline = log.outline("reward", 60)
    assert (len(outline), outline[0], outline[-1]) == (60, 4.5, 594.5)
    assert log.outline("nothing", 60) == []


def test_keys_may_be_missing_null_or_unknown(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(
        path, {"step": 1, "kl": None, "loss": 1}, {"step": 2, "kl": 0.5, "new": 3, "words": "x"}, {"step": 3, "loss": 2}
    )
    page = read(path)
    assert page["series"] == {"loss": [1, None, 2], "kl": [None, 0.5, None], "new": [None, 3, None]}


def test_a_torn_last_line_waits_until_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1, "loss": 1})
    log = MetricsLog(path)
    write(path, '{"step": 2, "lo', end="")
    log.refresh()
    assert (log.page()["steps"], log.damaged) == ([1], 0)
    write(path, 'ss": 5}')
    log.refresh()
    assert log.page()["series"]["loss"] == [1, 5]


def test_damaged_lines_are_counted_and_the_rest_is_shown(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1, "loss": 1}, "not json", "[1]", '{"loss": 2}', {"step": 2, "loss": 3})
    page = read(path)
    assert (page["series"]["loss"], page["damaged"]) == ([1, 3], 3)


def test_a_training_that_was_resumed_goes_on_from_the_later_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, *({"step": step, "loss": 1} for step in range(1, 6)), {"step": 4, "eval": {"reward": 0.1}})
    write(path, *({"step": step, "loss": 2} for step in range(3, 5)), {"step": 4, "eval": {"reward": 0.2}})
    page = read(path)
    assert page["series"]["loss"] == [1, 1, 2, 2]
    assert [item["reward"] for item in page["evaluations"]] == [0.2]


def test_a_long_training_is_thinned_to_what_a_chart_can_show(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, *({"step": step, "loss": step} for step in range(1, 5001)))
    page = read(path)
    assert len(page["steps"]) == len(page["series"]["loss"]) == MAX_POINTS
    assert (page["last_step"], page["steps"][-1]) == (5000, 5000)
    assert sum(page["series"]["loss"]) / MAX_POINTS - 2500.5 < 1


def test_a_histogram_that_is_none_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1, "ratio_histogram": {"edges": [1], "counts": [1, 2]}}, {"step": 2, "ratio_histogram": 3})
    assert read(path)["ratio_histogram"] is None
