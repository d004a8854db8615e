"""What the viewer answers about runs: lists, figures, tables, groups, comparisons; live, and without writing a byte."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from verifiers import stats
from verifiers.viewer.library import run_id_of


def test_runs_are_listed_newest_first_with_what_their_metadata_says(ask, make_run, make_record):
    old = make_run(make_record(reward=0.25), model="org/old", num_rollouts=1, num_failed=0, avg_reward=0.25)
    new = make_run(make_record(1, reward=0.5), model="org/new", num_rollouts=1, num_failed=0, avg_reward=0.5)
    for name in ("metadata.json", "results.jsonl"):
        os.utime(old.path / name, (1_600_000_000, 1_600_000_000))
    first, second = ask("runs")["runs"]
    assert (first["model"], first["reward"], first["is_finished"]) == ("org/new", 0.5, True)
    assert (second["id"], second["env_id"], second["kind"]) == (run_id_of(old.path), "sums", "evaluation")
    assert first["id"] == run_id_of(new.path)


def test_a_run_without_figures_of_its_own_is_counted(ask, make_run, make_record):
    make_run(make_record(0, reward=0.0), make_record(1), make_record(2, fails=True))
    [card] = ask("runs")["runs"]
    assert (card["rollouts"], card["failed"], card["reward"], card["is_finished"]) == (3, 1, 0.5, False)


def test_an_empty_folder_is_an_empty_list(ask):
    assert ask("runs")["runs"] == []


def test_the_figures_of_a_run_leave_failed_rollouts_out(ask, make_run, make_record):
    run = make_run(
        make_record(0, 0, reward=1.0),
        make_record(0, 1, reward=0.0, metrics={"exact": 0.0}),
        make_record(1, 0, fails=True, stop_condition="has_error"),
        make_record(1, 1, reward=1.0, is_truncated=True, usage={"prompt_tokens": 10, "completion_tokens": 7}),
    )
    about, figures = ask.run(run), ask.run(run, "/figures")
    assert (about["rollouts"], about["examples"], about["failed"], about["truncated"]) == (4, 2, 1, 1)
    assert about["causes"] == [["JudgeError: the judge is down", 1]]
    assert about["usage"] == {"prompt_tokens": 10, "completion_tokens": 7, "cost_usd": None}
    reward, exact = figures["figures"]
    assert (reward["name"], reward["n"], reward["mean"]) == ("reward", 3, 0.75)  # every example weighs the same
    assert figures["mean_with_failures"] == [0.5, 0.75]
    assert reward["low"] < reward["mean"] < reward["high"]
    assert (exact["name"], exact["n"]) == ("exact", 3)
    assert [(bar["low"], bar["count"]) for bar in figures["histogram"]] == [(0.0, 1), (1.0, 2)]
    assert [item["k"] for item in figures["pass_at_k"]] == [1, 2]


def test_the_table_pages_sorts_and_filters_on_the_server(ask, make_run, make_record):
    run = make_run(*(make_record(i, reward=i / 10, task=f"t{i % 2}") for i in range(10)), make_record(10, fails=True))
    page = ask.run(run, "/rollouts", start=8, n=2)
    assert (page["total"], [row["example_id"] for row in page["rows"]]) == (11, [8, 9])

    def examples(**query):
        return [row["example_id"] for row in ask.run(run, "/rollouts", **query)["rows"]]

    assert examples(sort="reward", desc=1, n=3) == [9, 8, 7]
    assert examples(sort="reward")[-1] == 10, "a rollout without a reward comes last, whichever way it is sorted"
    assert examples(sort="reward", desc=1)[-1] == 10
    assert examples(sort="number", desc=1, n=2) == [10, 9]
    assert examples(sort="metric:exact", n=1) == [0]
    assert examples(status="failed") == [10]
    assert examples(status="scored", task="t1", low=0.3, high=0.7) == [3, 5, 7]
    assert examples(cause="JudgeError: the judge is down") == [10]
    assert examples(task="no such task") == []


def test_examples_sort_as_numbers_then_words(ask, make_run, make_record):
    run = make_run(*(make_record(example) for example in ("b", 10, "a", 9)))
    rows = ask.run(run, "/rollouts", sort="example")["rows"]
    assert [row["example_id"] for row in rows] == [9, 10, "a", "b"]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("THE ANSWER", [0]),
        ('says "yes"', [0]),
        ("two\nlines", [0]),
        ("STRAẞE", [1]),
        ("été", [1]),
        ("completion", []),
        ("judge is down", [2]),
        ("0.375", [1]),
    ],
    ids=["case", "quotes", "newline", "folded", "accent", "a column's name", "error", "number"],
)
def test_search_looks_into_everything_that_was_said_and_not_into_the_names_of_columns(
    ask, make_run, make_record, query, found
):
    run = make_run(
        make_record(0, completion=[{"role": "assistant", "content": 'The answer\nsays "yes" in two\nlines'}]),
        make_record(1, completion="Straße, Été", reward=0.375),
        make_record(2, fails=True),
    )
    page = ask.run(run, "/rollouts", q=query)
    assert [row["example_id"] for row in page["rows"]] == found
    assert page["is_done"]


def test_text_that_another_writer_escaped_is_found_too(ask, make_run, make_record):
    run = make_run()
    run.results_path.write_text(json.dumps(make_record(3, answer="déjà vu")) + "\n", encoding="ascii")
    assert ask.run(run, "/rollouts", q="DÉJÀ")["total"] == 1


def test_one_rollout_comes_whole_with_its_neighbours_in_the_order_of_the_table(ask, make_run, make_record):
    run = make_run(
        make_record(0, reward=0.2, info={"level": 3}, generation_ms=12.5, board=[[1, 2]]),
        make_record(0, 1, reward=0.9),
        make_record(1, reward=0.5),
    )
    found = ask.run(run, "/rollouts/0", sort="reward")
    rollout = found["rollout"]
    assert (rollout["info"], rollout["generation_ms"], rollout["columns"]) == ({"level": 3}, 12.5, {"board": [[1, 2]]})
    assert found["around"] == {"previous": None, "next": 2, "place": 0, "total": 3}
    assert found["group"] == [0, 1]


def test_a_group_is_found_by_its_example_and_7_is_not_the_text_7(ask, make_run, make_record):
    run = make_run(make_record(7, 1), make_record("7"), make_record(7, 0))
    group = ask.run(run, "/group", example="7")
    assert [rollout["rollout"] for rollout in group["rollouts"]] == [0, 1]
    assert ask.run(run, "/group", example='"7"')["total"] == 1
    assert ask.run(run, "/group", example='"none"')["rollouts"] == []


def test_two_runs_are_aligned_by_example(ask, make_run, make_record):
    a = make_run(make_record(0, reward=0.0), make_record(1, reward=1.0), make_record(2), make_record("a only"))
    b = make_run(make_record(1, reward=0.5), make_record(0, reward=1.0), make_record(2), make_record(3, fails=True))
    path = f"compare/{run_id_of(a.path)}/{run_id_of(b.path)}"
    found = ask(path)
    assert found["counts"] == {
        "won": 1,
        "lost": 1,
        "tied": 1,
        "only in A": 1,
        "only in B": 0,
        "without a score": 1,
    }
    assert [(row["example_id"], row["difference"]) for row in found["rows"]][:3] == [(0, 1.0), (1, -0.5), (2, 0.0)]
    assert [row["example_id"] for row in ask(path, verdict="lost")["rows"]] == [1]
    pair = ask(f"{path}/example", example="1")
    assert (pair["a"][0]["reward"], pair["b"][0]["reward"]) == (1.0, 0.5)


def test_two_runs_get_the_verdict_that_the_command_line_gives(ask, make_run, make_record):
    a = make_run(*(make_record(i, reward=0.0, metrics={"exact": 0.0, "num_turns": 1.0}) for i in range(8)))
    b = make_run(*(make_record(i, reward=1.0, metrics={"exact": 1.0, "num_turns": 2.0}) for i in range(8)))
    found = ask(f"compare/{run_id_of(a.path)}/{run_id_of(b.path)}")
    told = stats.compare_metrics(
        *({name: dict.fromkeys(range(8), value) for name in ("reward", "exact")} for value in (0.0, 1.0))
    )["reward"]
    assert found["verdict"] == "B is better" == told.verdict_in_words.rstrip(":")
    assert found["refusal"] is None
    figures = {name: getattr(told, name) for name in ("low", "high", "p_value", "adjusted_p", "verdict", "level")}
    assert {name: found["figures"][name] for name in figures} == figures


def test_two_runs_over_different_questions_get_no_verdict(ask, make_run, make_record):
    a = make_run(*(make_record(i, reward=0.0, prompt=f"a{i}") for i in range(8)))
    b = make_run(*(make_record(i, reward=1.0, prompt=f"b{i}") for i in range(8)))
    found = ask(f"compare/{run_id_of(a.path)}/{run_id_of(b.path)}")
    assert (found["verdict"], found["figures"]["p_value"]) == ("No verdict", None)
    assert "8 of the examples with the same id ask something else" in found["refusal"]


# --- live -----------------------------------------------------------------------------------------------------------


def test_a_run_is_followed_while_it_is_written(ask, make_run, make_record):
    run = make_run(make_record(0))
    before = ask.run(run, "/stamp")
    with run.appender() as out:
        out.append(make_record(1))
        out.flush()
        assert ask.run(run, "/stamp")["stamp"] != before["stamp"]
        assert ask.run(run)["is_live"]
        assert ask.run(run, "/rollouts")["total"] == 2
        with open(run.results_path, "ab") as file:
            file.write(b'{"example_id": 2, "rollo')
        page = ask.run(run, "/rollouts")
        assert (page["total"], page["share_read"]) == (2, 1.0), "a line that is being written is no line yet"
        with open(run.results_path, "ab") as file:
            file.write(b'ut": 0, "reward": 0.5}\n')
        assert ask.run(run, "/rollouts")["total"] == 3
    run.update_metadata({"num_rollouts": 3})
    assert not ask.run(run, "/stamp")["is_live"]


def test_a_finished_run_that_is_resumed_is_live_again(ask, make_run, make_record):
    run = make_run(make_record(0), num_rollouts=1)
    os.utime(run.metadata_path, (1_600_000_000, 1_600_000_000))
    with run.appender() as out:
        out.append(make_record(1))
        assert ask.run(run)["is_live"]
    run.update_metadata({"num_rollouts": 2})
    assert not ask.run(run)["is_live"]


def test_a_results_file_that_is_replaced_is_read_anew(ask, make_run, make_record):
    run = make_run(make_record(0), make_record(1, fails=True), make_record(2))
    assert ask.run(run, "/rollouts")["total"] == 3
    run.compact()
    assert [row["example_id"] for row in ask.run(run, "/rollouts")["rows"]] == [0, 2]
    assert ask.run(run, "/rollouts", q="What is 2")["total"] == 1


def test_a_search_goes_on_into_what_was_appended(ask, make_run, make_record):
    run = make_run(make_record(0, answer="pear"))
    assert ask.run(run, "/rollouts", q="pear")["total"] == 1
    with run.appender() as out:
        out.append(make_record(1, answer="pear"))
    assert ask.run(run, "/rollouts", q="pear")["total"] == 2


def test_looking_changes_nothing_in_the_folder(ask, make_run, make_record, root):
    run = make_run(make_record(0), make_record(1))

    def everything() -> dict[Path, tuple[int, bytes]]:
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in root.rglob("*") if path.is_file()}

    before = everything()
    ask("runs")
    for path in ("", "/figures", "/rollouts", "/rollouts/1", "/stamp", "/training"):
        ask.run(run, path)
    assert everything() == before


# --- what cannot be answered ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/rollouts?sort=nonsense", 400, "sort='nonsense' must be one of number"),
        ("/rollouts?sort=metric:none", 400, "there is no metric 'none'"),
        ("/rollouts?start=-1", 400, "start='-1' is not a whole number"),
        ("/rollouts?low=abc", 400, "low='abc' is not a number"),
        ("/rollouts?status=odd", 400, "status='odd' must be one of scored, ok, failed, policy error"),
        ("/rollouts/99", 404, "this run has 1 rollouts, but no number 99"),
        ("/rollouts/x", 400, "'x' is not the number of a rollout"),
        ("/group?example=[1]", 400, "example= must be an example id as JSON"),
    ],
)
def test_nonsense_is_answered_in_one_sentence(ask, make_run, make_record, path, status, words):
    run = make_run(make_record())
    assert words in ask(f"runs/{run_id_of(run.path)}{path}", code=status)["problem"]


def test_a_run_that_was_deleted_is_not_there(ask):
    assert "there is no such run" in ask("runs/0123456789ab", code=404)["problem"]
