"""A results file after a crash: torn tails, damaged lines, failed and repeated rollouts, and crashes while mending."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.store import RunDir, encode, read_records
from verifiers.store.checksum import FIELD, seal

Make = Callable[..., dict[str, Any]]


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def rollout(example_id: int, number: int = 0, *, fails: bool = False, attempt: int = 0) -> bytes:
    error = {"type": "JudgeError", "blame": "grader"} if fails else None
    return encode({"example_id": example_id, "rollout": number, "error": error, "attempt": attempt})


def test_a_line_torn_at_any_byte_costs_itself_only(run: RunDir, make_record: Make) -> None:
    first, last = encode(make_record(1)), encode(make_record(2, text="é\n"))
    for length in range(len(last) + 1):
        run.results_path.write_bytes(first + last[:length])
        run.damaged_path.unlink(missing_ok=True)
        is_whole = length >= len(last) - 1  # only the newline is missing
        expected = {(1, 0), (2, 0)} if is_whole else {(1, 0)}
        assert set(run.load_index()) == expected
        assert [record["example_id"] for record in run.records()] == [1, 2][: len(expected)]
        with no_waiting_for_the_disk(), run.appender() as out:
            out.append(make_record(3))
        assert set(run.load_index()) == {*expected, (3, 0)}
        torn = last[:length] if not is_whole and length else b""
        assert lines_of(run.damaged_path) == ([torn + b"\n"] if torn else [])


def test_a_torn_line_is_reported(run: RunDir, make_record: Make, caplog: pytest.LogCaptureFixture) -> None:
    run.results_path.write_bytes(encode(make_record(1)) + b'{"example_id"')
    with caplog.at_level(logging.WARNING):
        run.compact()
    assert "incomplete last line (13 bytes)" in caplog.text


def test_failed_rollouts_are_moved_to_the_attempts_and_are_not_finished(run: RunDir) -> None:
    run.results_path.write_bytes(rollout(1) + rollout(2, fails=True) + rollout(3))
    result = run.compact()
    assert result.finished == {(1, 0), (3, 0)}
    assert (result.failed, result.duplicates, result.damaged) == (1, 0, 0)
    assert lines_of(run.results_path) == [rollout(1), rollout(3)]
    assert lines_of(run.attempts_path) == [rollout(2, fails=True)]


def test_of_several_good_results_of_one_rollout_the_last_stays(run: RunDir) -> None:
    lines = [rollout(1, attempt=0), rollout(2), rollout(1, attempt=1), rollout(1, fails=True, attempt=2)]
    run.results_path.write_bytes(b"".join(lines))
    assert run.load_index() == {(1, 0): "ok", (2, 0): "ok"}
    result = run.compact()
    assert (result.failed, result.duplicates) == (1, 1)
    assert lines_of(run.results_path) == [rollout(2), rollout(1, attempt=1)]
    assert lines_of(run.attempts_path) == [rollout(1, attempt=0), rollout(1, fails=True, attempt=2)]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00" * 50,
        b"[1, 2]",
        b"{}",
        b"null",
        b'{"example_id": 1, "x": "\xff"}',
        b"[" * 100_000,
        b'{"example_id": 1.5}',
    ],
    ids=["zeros", "array", "nobody's", "null", "bad utf-8", "deep", "bad id"],
)
def test_a_damaged_line_in_the_middle_is_skipped_counted_and_kept_aside(
    run: RunDir, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    run.results_path.write_bytes(rollout(1) + garbage + b"\n" + rollout(2))
    with caplog.at_level(logging.WARNING):
        assert run.load_index() == {(1, 0): "ok", (2, 0): "ok"}
        assert "1 damaged line(s)" in caplog.text
        assert run.compact().damaged == 1
    assert lines_of(run.results_path) == [rollout(1), rollout(2)]
    assert run.damaged_path.read_bytes() == garbage + b"\n"


def test_a_file_with_nothing_to_move_is_not_rewritten(run: RunDir) -> None:
    run.results_path.write_bytes(rollout(1) + rollout(2))
    before = run.results_path.stat()
    assert run.compact().finished == {(1, 0), (2, 0)}
    after = run.results_path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert not run.attempts_path.exists()


def test_a_run_without_a_rollout_is_finished_with_nothing(run: RunDir) -> None:
    assert run.compact().finished == frozenset()
    assert run.load_index() == {}
    assert list(run.records()) == []


def test_rows_of_0_1_x_have_no_rollout_number_and_are_not_taken_for_one_another(run: RunDir) -> None:
    run.results_path.write_bytes(b'{"example_id": 1, "reward": 1.0}\n{"example_id": 1, "reward": 0.0}\n')
    assert run.load_index() == {(1, 0): "ok", (1, 1): "ok"}
    assert run.compact().duplicates == 0


# --- crashes at every step ------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process is dead: nothing runs after this, clean-up neither."""


EFFECTS = ("write", "fsync", "replace", "ftruncate", "unlink")


@contextmanager
def crash_at(step: int) -> Iterator[list[str]]:
    """Die in the middle of the ``step``-th effect on the disk: half of a write is done, and nothing after it."""
    steps: list[str] = []
    real = {name: getattr(os, name) for name in EFFECTS}

    def effect(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            steps.append(name)
            if len(steps) <= step:
                return None if name == "fsync" else real[name](*args, **kwargs)
            if name == "write" and len(steps) == step + 1:
                real["write"](args[0], args[1][: len(args[1]) // 2])
            raise Crash

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in EFFECTS:
            patch.setattr(os, name, effect(name))
        yield steps


def no_waiting_for_the_disk() -> AbstractContextManager[object]:
    return crash_at(1_000_000)


def dies(step: int, work: Callable[[], object]) -> bool:
    with crash_at(step):
        try:
            work()
        except Crash:
            return True
    return False


MESS = [
    rollout(1),
    rollout(2, fails=True),
    b"\x00\x00garbage\n",
    rollout(3, 0, attempt=0),
    rollout(3, 1),
    rollout(3, 0, attempt=1),
    rollout(2, fails=True, attempt=1),
    b'{"example_id": 4, "roll',
]


def check_mess_is_mended(run: RunDir) -> None:
    assert run.compact().finished == {(1, 0), (3, 0), (3, 1)}
    assert lines_of(run.results_path) == [MESS[0], MESS[4], MESS[5]]
    assert sorted(lines_of(run.attempts_path)) == sorted([MESS[1], MESS[3], MESS[6]])
    assert sorted(lines_of(run.damaged_path)) == sorted([MESS[2], MESS[7] + b"\n"])


def test_a_crash_at_any_step_of_mending_and_another_at_any_step_of_mending_again_change_nothing(
    run: RunDir, tmp_path: Path
) -> None:
    run.results_path.write_bytes(b"".join(MESS))
    crashes = 0
    for first in itertools.count():
        once = RunDir(tmp_path / f"once-{first}")
        shutil.copytree(run.path, once.path)
        if not dies(first, once.compact):
            break
        for second in itertools.count():
            twice = RunDir(tmp_path / "twice")
            shutil.copytree(once.path, twice.path)
            died = dies(second, twice.compact)
            with no_waiting_for_the_disk():
                check_mess_is_mended(twice)
            shutil.rmtree(twice.path)
            crashes += 1
            if not died:
                break
    assert first >= 10
    assert crashes > 50


def test_everything_is_synced_before_the_new_file_takes_the_old_ones_place(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.results_path.write_bytes(b"".join(MESS))
    unsynced: set[int] = set()
    write, fsync, replace = os.write, os.fsync, os.replace

    def noted_write(fd: int, text: bytes) -> int:
        unsynced.add(os.fstat(fd).st_ino)
        return write(fd, text)

    def noted_fsync(fd: int) -> None:
        unsynced.discard(os.fstat(fd).st_ino)
        fsync(fd)

    def checked_replace(old: Path, new: Path) -> None:
        assert not unsynced
        replace(old, new)

    monkeypatch.setattr(os, "write", noted_write)
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", checked_replace)
    check_mess_is_mended(run)


appends = st.tuples(st.just("append"), st.integers(0, 3), st.integers(0, 1), st.booleans())
torn_appends = st.tuples(st.just("torn append"), st.integers(0, 3), st.integers(0, 1), st.integers(1, 80))
garbage = st.tuples(  # a blank line is none: it is passed over, and may stay
    st.just("garbage"), st.binary(min_size=1, max_size=8).filter(lambda text: b"\n" not in text and text.strip())
)
resumes = st.tuples(st.just("resume"), st.integers(0, 25))


@settings(max_examples=150)
@given(st.lists(appends | torn_appends | garbage | resumes, max_size=12))
def test_no_history_of_appends_crashes_and_resumes_loses_or_repeats_a_rollout(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[Any, ...]]
) -> None:
    run = RunDir(tmp_path_factory.mktemp("run"))
    good: dict[tuple[int, int], bytes] = {}
    failed: set[bytes] = set()
    run.results_path.touch()
    for number, (what, *about) in enumerate(history):
        if what == "append":
            line = seal(rollout(about[0], about[1], fails=about[2], attempt=number))
            with no_waiting_for_the_disk(), run.appender() as out:
                out.append({**read(line)})
            if about[2]:
                failed.add(line)
            else:
                good[about[0], about[1]] = line
        elif what == "torn append":
            line = rollout(about[0], about[1], attempt=number)
            with open(run.results_path, "ab") as file:  # the writer died half-way
                file.write(line[: min(about[2], len(line) - 2)])
        elif what == "garbage":
            with open(run.results_path, "ab") as file:
                file.write(about[0] + b"\n")
        else:
            dies(about[0], run.compact)
    with no_waiting_for_the_disk():
        assert run.compact().finished == good.keys()
    assert sorted(lines_of(run.results_path)) == sorted(good.values())
    moved = lines_of(run.attempts_path)
    assert len(moved) == len(set(moved))
    assert failed <= set(moved)
    shutil.rmtree(run.path)


def read(line: bytes) -> dict[str, Any]:
    import msgspec

    record: dict[str, Any] = msgspec.json.decode(line)
    del record[FIELD]
    return record


def test_attempts_are_read_like_results(run: RunDir) -> None:
    run.results_path.write_bytes(rollout(1, fails=True))
    run.compact()
    assert [record["example_id"] for record in read_records(run.attempts_path)] == [1]
