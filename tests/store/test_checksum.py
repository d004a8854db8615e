"""Bits that flip on disk: a line that is not as it was written is skipped, told, and its rollout is run again."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import verifiers as vf
from verifiers.store import RunDir, encode, read_records, to_hf_dataset
from verifiers.store.checksum import FIELD, is_intact, is_sealed, seal

Make = Callable[..., dict[str, Any]]


def flipped(text: bytes, at: int, bit: int = 0) -> bytes:
    return text[:at] + bytes([text[at] ^ (1 << bit)]) + text[at + 1 :]


def test_every_single_flipped_bit_of_a_line_is_noticed(make_record: Make) -> None:
    line = seal(encode(make_record(1, usage={"prompt_tokens": 3, "completion_tokens": 5, "cost_usd": None})))
    assert is_intact(line)
    assert is_sealed(line)
    missed = [(at, bit) for at in range(len(line) - 1) for bit in range(8) if is_intact(flipped(line, at, bit))]
    assert missed == []


@given(st.dictionaries(st.text(), st.none() | st.integers() | st.floats() | st.text(), min_size=1))
def test_any_record_is_one_plain_object_with_its_checksum_last(record: dict[str, Any]) -> None:
    line = seal(encode(record))
    assert is_intact(line)
    assert line.endswith(b"}\n")
    assert list(json.loads(line))[-1] == FIELD


@pytest.mark.parametrize("line", [b"{}\n", b"\n", b"", b'{"a":1}\n', b"[" * 100, b'{"text":"line_crc32"}\n'])
def test_what_has_no_checksum_is_not_called_damaged_for_that(line: bytes) -> None:
    assert is_intact(line)


def test_a_damaged_line_is_skipped_and_told_by_every_reader(
    run: RunDir, make_record: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with run.appender() as out:
        for number in range(3):
            out.append(make_record(number))
    lines = run.results_path.read_bytes().splitlines(keepends=True)
    at = lines[1].index(b'"4"') + 1  # the answer: still valid JSON, and another answer
    run.results_path.write_bytes(lines[0] + flipped(lines[1], at) + lines[2])
    with caplog.at_level(logging.WARNING):
        assert [record["example_id"] for record in run.records()] == [0, 2]
        assert [record["example_id"] for record in run.records(["example_id"])] == [0, 2]
        assert set(run.load_index()) == {(0, 0), (2, 0)}
    assert caplog.text.count("1 damaged line(s)") == 3
    assert (len(run.rows()), run.rows().damaged) == (2, 1)


def test_the_checksum_is_no_column_of_a_record_or_an_export(run: RunDir, make_record: Make) -> None:
    with run.appender() as out:
        out.append(make_record(1))
    assert FIELD.encode() in run.results_path.read_bytes()
    assert list(read_records(run.path)) == [make_record(1)] == [run.rows()[0]]
    assert FIELD not in to_hf_dataset(run.path).column_names


# --- whole runs -------------------------------------------------------------------------------------------------------


def evaluate(path: Path, says: str, **options: Any) -> vf.Results:
    rows = [{"question": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(6)]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([lambda completion: 1.0]))
    return env.evaluate(client=vf.FakeClient(says), model="m", results_path=path, use_tqdm=False, **options)


@pytest.mark.parametrize(
    "where", [b'"prompt_tokens"', b'"reward"', b"1.0", b'"first"', FIELD.encode()], ids=lambda where: where.decode()
)
def test_a_flipped_bit_costs_one_rollout_which_is_run_again_on_resume(
    where: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run"
    evaluate(path, "first")
    lines = (path / "results.jsonl").read_bytes().splitlines(keepends=True)
    lines[3] = flipped(lines[3], lines[3].index(where) + 2)
    broken = json.loads(lines[3])["example_id"]
    (path / "results.jsonl").write_bytes(b"".join(lines))
    with caplog.at_level(logging.WARNING):
        results = evaluate(path, "again", resume=True)
    assert "1 damaged line(s) were moved to damaged.txt; their rollouts will be rerun" in caplog.text
    said = {state["example_id"]: state["completion"][0]["content"] for state in results.rollouts}
    assert said == {i: "again" if i == broken else "first" for i in range(6)}
    assert (path / "damaged.txt").read_bytes() == lines[3]
    assert len({record["example_id"] for record in read_records(path)}) == 6


def test_lines_of_an_older_run_have_no_checksum_and_are_resumed_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "run"
    evaluate(path, "first")
    records = list(read_records(path))
    (path / "results.jsonl").write_bytes(b"".join(map(encode, records[:4])))
    results = evaluate(path, "again", resume=True)
    kept = {record["example_id"] for record in records[:4]}
    replies = {state["example_id"]: state["completion"][0]["content"] for state in results.rollouts}
    assert replies == {i: "first" if i in kept else "again" for i in range(6)}
    assert [is_sealed(line) for line in (path / "results.jsonl").read_bytes().splitlines()] == [False] * 4 + [True] * 2


def test_a_flipped_bit_in_a_key_of_an_older_line_does_not_break_resume(tmp_path: Path) -> None:
    path = tmp_path / "run"
    evaluate(path, "first")
    lines = [encode(record) for record in read_records(path)]
    lines[2] = lines[2].replace(b'"prompt_tokens"', b'"prompt_tokenr"')
    lines[3] = lines[3].replace(b'"reward":1.0', b'"reward":"1"')
    (path / "results.jsonl").write_bytes(b"".join(lines))
    results = evaluate(path, "again", resume=True)
    assert results["reward"] == [1.0] * 6
    assert results.usage.completion_tokens > 0
