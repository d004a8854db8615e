"""What was appended is in the file, whatever happens next."""

from __future__ import annotations

import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from verifiers.store import ResultsGoneError, RunDir, keeping, read_records
from verifiers.store.appender import LOOK_EVERY_S

Make = Callable[..., dict[str, Any]]


@contextmanager
def disk_full_at(size: int) -> Iterator[None]:
    """Files of this process can grow to ``size`` bytes only: a write is short there, and the next one fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def counted_fsyncs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    calls: list[float] = []
    fsync = os.fsync

    def counting(fd: int) -> None:
        calls.append(time.monotonic())
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", counting)
        yield calls


def test_a_record_is_in_the_file_when_append_returns(run: RunDir, make_record: Make) -> None:
    with run.appender() as out:
        out.append(make_record(1))
        assert list(run.records()) == [make_record(1)]
        out.append(make_record(2))
        assert [record["example_id"] for record in run.records()] == [1, 2]


def test_a_full_disk_raises_and_leaves_whole_lines_only(run: RunDir, make_record: Make) -> None:
    with run.appender() as out:
        out.append(make_record(1))
        before = run.results_path.read_bytes()
        with disk_full_at(len(before) + 10), pytest.raises(OSError, match="File too large"):
            out.append(make_record(2))
        assert run.results_path.read_bytes() == before
        out.append(make_record(3))  # there is room again
    assert [record["example_id"] for record in run.records()] == [1, 3]


def test_a_partial_line_that_could_not_be_cut_off_is_cut_off_before_the_next(
    run: RunDir, make_record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, size: int) -> None:
        raise OSError(5, "the disk is away")

    with run.appender() as out:
        out.append(make_record(1))
        with monkeypatch.context() as patch, disk_full_at(run.results_path.stat().st_size + 10):
            patch.setattr(os, "ftruncate", fail)
            with pytest.raises(OSError, match="the disk is away"):
                out.append(make_record(2))
        out.append(make_record(3))
    assert [record["example_id"] for record in run.records()] == [1, 3]


def test_appends_from_many_threads_are_all_whole_lines(run: RunDir, make_record: Make) -> None:
    def work(number: int) -> None:
        for rollout in range(50):
            out.append(make_record(number, rollout, padding="x" * 5000))

    with run.appender() as out:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert run.load_index() == {(number, rollout): "ok" for number in range(8) for rollout in range(50)}


def test_many_appends_share_a_sync_that_comes_by_itself(
    run: RunDir, make_record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run.appender(sync_every_s=0.05) as out, counted_fsyncs(monkeypatch) as calls:
        for number in range(500):
            out.append(make_record(number))
        appended = time.monotonic()
        while not calls or calls[-1] < appended:
            assert time.monotonic() < appended + 5, "the appended lines were never synced"
            time.sleep(0.01)
        time.sleep(0.15)
        assert len(calls) < 25
        seen = len(calls)
        time.sleep(0.15)
        assert len(calls) == seen, "nothing is unsynced, so nothing is to be synced"


def test_flush_and_close_sync_what_is_left(run: RunDir, make_record: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted_fsyncs(monkeypatch) as calls:
        out = run.appender(sync_every_s=60)
        opened = len(calls)
        out.append(make_record(1))
        out.flush()
        assert len(calls) == opened + 1
        out.append(make_record(2))
        out.close()
        assert len(calls) == opened + 2
        out.close()
    with pytest.raises(ValueError, match="closed"):
        out.append(make_record(3))


def test_a_sync_that_failed_is_raised_and_never_forgotten(
    run: RunDir, make_record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    out = run.appender(sync_every_s=60)
    out.append(make_record(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="could not sync"):
            out.flush()
    with pytest.raises(OSError, match="could not sync"):
        out.append(make_record(2))
    with pytest.raises(OSError, match="could not sync"):
        out.close()
    with run.appender() as again:  # the lock was given back all the same
        again.append(make_record(2))


def test_an_open_appender_keeps_compaction_and_a_second_one_away(run: RunDir, make_record: Make) -> None:
    with run.appender() as out:
        out.append(make_record(1))
        with pytest.raises(RuntimeError, match="open appender"):
            run.compact()
        with pytest.raises(RuntimeError, match="open appender"):
            run.appender()
    assert run.compact().finished == {(1, 0)}


APPEND_UNTIL_KILLED = """
import os, sys
from verifiers.store import RunDir

run = RunDir.open(sys.argv[1])
with run.lock():
    finished = run.compact().finished
    with run.appender() as out:
        for number in range(int(sys.argv[2])):
            if (number, 0) not in finished:
                fails = number % 7 == 3 and not os.path.exists(run.path / f"tried-{number}")
                if fails:
                    open(run.path / f"tried-{number}", "x").close()
                error = {"type": "E", "blame": "grader"} if fails else None
                out.append({"example_id": number, "rollout": 0, "error": error, "text": "x" * (number * 37 % 9000)})
                os.write(1, b"%d %d\\n" % (number, fails))
"""


@pytest.mark.parametrize("seed", range(4))
def test_kill_minus_9_loses_nothing_that_was_appended(run: RunDir, repo: Path, seed: int) -> None:
    chance, n = random.Random(seed), 3000
    said: set[tuple[int, bool]] = set()
    for attempt in range(40):
        command = [sys.executable, "-c", APPEND_UNTIL_KILLED, str(run.path), str(n)]
        child = subprocess.Popen(command, cwd=repo, stdout=subprocess.PIPE)
        said |= read_until_killed(child, after_lines=chance.randrange(1, 1200) if attempt < 4 else n)
        index = run.load_index()
        assert {number for number, fails in said if not fails} <= {key[0] for key in index if index[key] == "ok"}
        if child.returncode == 0 and len(run.compact().finished) == n:
            break
    assert sorted(record["example_id"] for record in run.records(["example_id"])) == list(range(n))
    moved = [record["example_id"] for record in read_records(run.attempts_path)]
    assert len(moved) == len(set(moved))
    assert {number for number, fails in said if fails} <= set(moved) <= set(range(3, n, 7))


def read_until_killed(child: subprocess.Popen[bytes], *, after_lines: int) -> set[tuple[int, bool]]:
    """What a child says it has appended, up to its end or to our killing it after so many lines."""
    assert child.stdout is not None
    said = b""
    while chunk := os.read(child.stdout.fileno(), 512):
        said += chunk
        if said.count(b"\n") >= after_lines:
            child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    pairs = (line.split() for line in said.split(b"\n")[:-1])
    return {(int(number), fails == b"1") for number, fails in pairs}


HOLD = """
import os, sys, time
from verifiers.store import RunDir

with RunDir.open(sys.argv[1]).appender() as out:
    out.append({"example_id": 0, "rollout": 0})
    if "fork" in sys.argv and os.fork() == 0:
        os.write(1, b"%d\\n" % os.getpid())
        time.sleep(60)
    os.write(1, b"ready\\n")
    time.sleep(60)
"""


def hold(run: RunDir, repo: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", HOLD, str(run.path), *options]
    return subprocess.Popen(command, cwd=repo, stdout=subprocess.PIPE)


def said_lines(child: subprocess.Popen[bytes], n: int) -> list[bytes]:
    """The first lines a child says, read past any buffer, for which ``select`` would not wake up."""
    assert child.stdout is not None
    said = b""
    while said.count(b"\n") < n:
        assert select.select([child.stdout], [], [], 30)[0], "the other process said nothing"
        said += os.read(child.stdout.fileno(), 1)
    return said.splitlines()


def kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


def test_a_second_process_is_refused_by_name_until_the_first_is_dead(run: RunDir, repo: Path) -> None:
    other = hold(run, repo)
    try:
        assert said_lines(other, 1) == [b"ready"]
        for write in (run.appender, run.compact):
            with pytest.raises(RuntimeError, match=f"process {other.pid} .*start a new run directory"):
                write()
        assert len(list(run.records())) == 1, "reading needs no lock"
    finally:
        kill(other)
    with run.appender() as out:
        out.append({"example_id": 1, "rollout": 0})
    assert run.compact().finished == {(0, 0), (1, 0)}


def test_a_forked_worker_that_outlives_its_parent_does_not_hold_the_run(run: RunDir, repo: Path) -> None:
    parent = hold(run, repo, "fork")
    worker = next(int(line) for line in said_lines(parent, 2) if line != b"ready")
    try:
        kill(parent)
        os.kill(worker, 0)
        run.appender().close()
    finally:
        os.kill(worker, signal.SIGKILL)


# --- a file that goes away --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deleted", "with its folder", "replaced"])
def test_a_file_that_is_deleted_while_it_is_written_is_noticed_by_a_next_append(
    how: str, run: RunDir, make_record: Make
) -> None:
    out = run.appender()
    out.append(make_record(1))
    if how == "deleted":
        run.results_path.unlink()
    elif how == "with its folder":
        shutil.rmtree(run.path)
    else:
        other = run.path / "other"
        other.write_bytes(b"")
        other.rename(run.results_path)
    time.sleep(2 * LOOK_EVERY_S)
    with pytest.raises(ResultsGoneError, match="this file was deleted or replaced while the run wrote to it"):
        out.append(make_record(2))
    with pytest.raises(ResultsGoneError):
        out.close()


def test_a_file_that_is_moved_away_is_noticed_when_it_is_synced(run: RunDir, make_record: Make) -> None:
    out = run.appender(sync_every_s=0.01)
    out.append(make_record(1))
    run.results_path.rename(run.path / "elsewhere.jsonl")
    with pytest.raises(ResultsGoneError):
        out.flush()
    with pytest.raises(ResultsGoneError):
        out.append(make_record(2))
    with pytest.raises(ResultsGoneError):
        out.close()


def test_a_run_can_be_deleted_from_a_full_disk(tmp_path: Path) -> None:
    run = RunDir.create_at(tmp_path / "run", env_id="e", model="m", config={})
    with disk_full_at(0):
        with pytest.raises(OSError, match=r"metadata\.json\.tmp"):
            keeping.note(run, "there is no space for this")
        keeping.delete(run)
    assert not run.path.exists()
