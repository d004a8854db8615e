"""A damaged run directory is shown as far as it can be read, with a notice that says what is wrong."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.viewer.index import RolloutIndex
from verifiers.viewer.records import shorten


def test_lines_that_are_no_records_are_left_out_and_named(ask, make_run, make_record):
    run = make_run(make_record(0))
    with open(run.results_path, "ab") as file:
        file.write(b"\x00\x00\x00\x00\n" + b"[1, 2]\n" + b'{"reward": 1}\n' + b"\n")
        file.write(json.dumps(make_record(1)).encode() + b"\n")
    about = ask.run(run)
    assert about["rollouts"] == 2
    [notice] = about["notices"]
    assert notice.startswith("3 damaged line(s) of results.jsonl cannot be read and are left out: line 2 (")
    assert [row["example_id"] for row in ask.run(run, "/rollouts")["rows"]] == [0, 1]


def test_bytes_that_are_no_text_cost_a_character_and_not_the_rollout(ask, make_run, make_record):
    run = make_run()
    line = json.dumps(make_record(0, answer="MARK")).encode().replace(b"MARK", b"a\xff\xfeb")
    run.results_path.write_bytes(line + b"\n")
    assert ask.run(run, "/rollouts/0")["rollout"]["answer"] == "a��b"


def test_broken_metadata_is_a_notice_and_the_folder_tells_the_rest(ask, make_run, make_record):
    run = make_run(make_record())
    run.metadata_path.write_text('{"env_id": "su')
    [card] = ask("runs")["runs"]
    assert (card["env_id"], card["model"]) == ("sums", "org--model")
    assert "metadata.json is damaged" in card["problem"]
    assert "metadata.json is damaged" in ask.run(run)["notices"][0]
    assert ask.run(run, "/rollouts")["total"] == 1


def test_a_run_without_metadata_or_without_results_is_shown_too(ask, make_run, make_record):
    without_metadata, without_results = make_run(make_record()), make_run(make_record())
    without_metadata.metadata_path.unlink()
    without_results.results_path.unlink()
    assert "metadata.json is missing" in ask.run(without_metadata)["notices"][0]
    assert "results.jsonl is missing" in ask.run(without_results)["notices"][0]
    assert ask.run(without_results, "/figures")["histogram"] == []
    assert ask.run(without_results, "/rollouts")["rows"] == []
    assert len(ask("runs")["runs"]) == 2


def test_metadata_of_the_wrong_kind_is_no_crash(ask, make_run, make_record):
    run = make_run(make_record())
    for text in ("[]", "null", '{"env_id": 7, "model": null, "avg_reward": "high", "num_rollouts": []}'):
        run.metadata_path.write_text(text)
        assert ask("runs")["runs"][0]["rollouts"] == 1 or text.startswith("{")
        assert ask.run(run)["rollouts"] == 1


def test_columns_of_the_wrong_kind_are_shown_as_what_they_are(ask, make_run):
    run = make_run()
    odd = {
        "example_id": "x",
        "rollout": "first",
        "reward": "high",
        "error": "it broke",
        "metrics": [1],
        "task": {"a": 1},
        "prompt": {"not": "messages"},
        "completion": [None, 3, {"content": [{"text": 5}]}],
        "usage": {"completion_tokens": "many"},
        "total_ms": [],
        "trajectory": [None, {"tokens": {"completion_ids": ["a", 1], "completion_logprobs": [None, "b"]}}],
        "is_truncated": "no",
        "step": "two",
    }
    huge = {"example_id": "y", "reward": 10**400, "metrics": {"m": 1e999}}
    run.results_path.write_text("".join(json.dumps(item) + "\n" for item in (odd, huge)).replace("Infinity", "1e999"))
    assert ask.run(run)["rollouts"] >= 1
    rollout = ask.run(run, "/rollouts/0")["rollout"]
    assert (rollout["status"], rollout["reward"], rollout["error"]) == ("failed", None, "it broke")
    assert [turn["ids"] for turn in rollout["turns"]] == [[], [1]]
    assert ask.run(run, "/rollouts")["rows"][0]["example_id"] == "x"
    ask.run(run, "/figures")


def test_a_whole_number_beyond_all_floats_leaves_the_page_of_its_rollout(ask, make_run, make_record):
    turn = {"reward": 10**400, "tokens": {"completion_ids": [1], "completion_logprobs": [-(10**400)]}}
    run = make_run(make_record(0, scoring_ms=10**400, generation_ms=5, trajectory=[turn]))
    rollout = ask.run(run, "/rollouts/0")["rollout"]
    assert (rollout["scoring_ms"], rollout["generation_ms"]) == (None, 5)
    assert [(turn["reward"], turn["logprobs"]) for turn in rollout["turns"]] == [(None, [None])]


def test_a_file_with_a_new_metric_in_every_line_does_not_fill_the_memory(ask, make_run, make_record):
    run = make_run(*(make_record(i, metrics={f"m{i}": 1.0}) for i in range(100)))
    about = ask.run(run)
    assert len(about["metric_names"]) == 64
    assert "there are more than 64 metrics" in about["notices"][0]


def test_what_no_page_can_hold_is_cut_and_says_so():
    deep: object = "bottom"
    for _ in range(60):
        deep = [deep]
    assert "nested too deep" in json.dumps(shorten(deep))
    assert shorten("x" * 300_000).endswith("… (100,000 more characters)")
    assert shorten(list(range(6000)))[-1] == "… (1,000 more)"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
COLUMNS = (
    "rollout",
    "reward",
    "error",
    "task",
    "stop_condition",
    "is_truncated",
    "metrics",
    "usage",
    "total_ms",
    "step",
)


@pytest.mark.timeout(600)  # many examples, each a file: minutes beside other programs
@given(lines=st.lists(st.fixed_dictionaries(dict.fromkeys(COLUMNS, JSON)), max_size=5), tail=st.binary(max_size=30))
def test_any_line_is_read_or_counted_as_damaged(lines, tail, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "results.jsonl"
    text = b"".join(json.dumps({"example_id": i, **line}).encode() + b"\n" for i, line in enumerate(lines))
    path.write_bytes(text + tail)
    index = RolloutIndex(path)
    assert index.refresh()
    assert len(index) + index.damaged >= len(lines)
    for column in (
        index.rewards,
        index.statuses,
        index.tasks,
        index.tokens,
        index.steps,
        *map(index.metric, index.metrics),
    ):
        assert len(column) == len(index)
    assert not any(math.isinf(reward) for reward in index.rewards)
    index.records(range(len(index)))


def test_a_number_beyond_all_scores_in_one_line_leaves_the_figures_of_the_others(ask, make_run, make_record):
    lines = [make_record(0, metrics={"exact": 1e308}), make_record(1, metrics={"exact": 0.5})]
    run = make_run(*lines)
    (exact,) = [one for one in ask.run(run, "/figures")["figures"] if one["name"] == "exact"]
    assert exact["mean"] == 0.5
