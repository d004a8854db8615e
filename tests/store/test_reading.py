"""Records come back whole or by column, in file order, sorted, and page by page while the run goes on."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verifiers.store import Rows, RunDir, read_records

Make = Callable[..., dict[str, Any]]


def fill(run: RunDir, records: list[dict[str, Any]]) -> None:
    with run.appender() as out:
        for record in records:
            out.append(record)


def test_records_come_in_the_order_in_which_they_finished(run: RunDir, make_record: Make) -> None:
    records = [make_record(3), make_record(1, 1), make_record(1, 0, fails=True)]
    fill(run, records)
    assert list(run.records()) == records
    assert list(read_records(run.path)) == records
    assert list(read_records(run.results_path)) == records


def test_only_the_columns_asked_for_are_read(run: RunDir, make_record: Make) -> None:
    fill(run, [make_record(1, **{"f-1": 0.5}), make_record(2)])
    assert list(run.records(["example_id", "f-1", "example_id"])) == [
        {"example_id": 1, "f-1": 0.5},
        {"example_id": 2, "f-1": None},
    ]


def test_reading_what_is_not_there_says_so_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither a run directory nor a results file"):
        read_records(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="neither a run directory nor a results file"):
        read_records(tmp_path)


def test_sorted_records_come_by_example_and_rollout_with_words_after_numbers(run: RunDir, make_record: Make) -> None:
    keys = [(example_id, rollout) for example_id in [0, 2, 10, "10", "a"] for rollout in range(2)]
    shuffled = random.Random(0).sample(keys, len(keys))
    fill(run, [make_record(example_id, rollout) for example_id, rollout in shuffled])
    assert [(record["example_id"], record["rollout"]) for record in run.sorted_records()] == keys


def test_pages_are_slices_of_the_run(run: RunDir, make_record: Make) -> None:
    records = [make_record(number, text="é" * number) for number in range(25)]
    fill(run, records)
    assert run.page(0, 10) == records[:10]
    assert run.page(20, 10) == records[20:]
    assert run.page(30, 10) == []
    assert run.rows()[-1] == records[-1]
    assert run.rows().page(1, 2, order=[5, 6, 7]) == [records[6], records[7]]
    with pytest.raises(IndexError):
        run.rows()[25]


def test_pages_see_what_is_appended_and_stand_a_rewritten_file(run: RunDir, make_record: Make) -> None:
    assert run.page(0, 10) == []
    fill(run, [make_record(0), make_record(1, fails=True)])
    assert [record["example_id"] for record in run.page(0, 10)] == [0, 1]
    assert list(run.rows().failed) == [0, 1]
    with open(run.results_path, "ab") as file:
        file.write(b'{"example_id": 2, "roll')
    assert len(run.rows()) == 2, "a line is there when it is whole"
    with open(run.results_path, "ab") as file:
        file.write(b'out": 0}\n')
    assert run.rows().keys == [(0, 0), (1, 0), (2, 0)]
    run.compact()
    assert run.rows().keys == [(0, 0), (2, 0)]
    run.results_path.unlink()
    assert len(run.rows()) == 0


def test_a_page_of_rows_taken_before_a_rewrite_still_reads_the_old_file(run: RunDir, make_record: Make) -> None:
    fill(run, [make_record(0, fails=True), make_record(1)])
    rows = Rows(run.path)
    run.compact()
    assert rows[1]["example_id"] == 1


def test_damaged_lines_are_not_rows(run: RunDir, make_record: Make) -> None:
    fill(run, [make_record(0), make_record(1)])
    text = run.results_path.read_bytes()
    run.results_path.write_bytes(text.replace(b"\n", b"\nnot json\n\n", 1))
    rows = run.rows()
    assert (len(rows), rows.damaged) == (2, 1)
    assert [record["example_id"] for record in rows.page(0, 9)] == [0, 1]
    assert len(list(run.records())) == 2


def test_a_row_that_only_a_whole_reading_finds_damaged_is_shown_as_such(run: RunDir) -> None:
    run.results_path.write_bytes(b'{"example_id": 1, "rollout": 0, "x": 1e999}\n')
    [record] = run.page(0, 10)
    assert (record["example_id"], record["reward"]) == (1, None)
    assert "out of range" in record["error"]["message"]


def test_files_of_0_1_x_are_read(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(b'{"example_id":0,"reward":1.0,"error":null}\n{"example_id":0,"reward":0.0,"error":"E()"}')
    assert [record["reward"] for record in read_records(tmp_path)] == [1.0, 0.0]
    assert Rows(path).keys == [(0, 0), (0, 1)]
    assert RunDir.open(tmp_path).load_index() == {(0, 0): "ok", (0, 1): "failed"}
