"""Run folders of strangers: FIFOs, devices, links and endless files are refused in a sentence, and nothing hangs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.store import RunDir, checksum
from verifiers.viewer.library import Library

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")

LIMIT_S = 60


@pytest.fixture(autouse=True)
def _alarm() -> Iterator[None]:
    """What hangs fails, and does not stop the other tests."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"nothing came of it in {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, repo: Path) -> Path:
    """A run as `vf eval` saves it."""
    path = tmp_path_factory.mktemp("runs") / "run"
    env = vf.load_environment("arithmetic", environments_dir=repo / "environments")
    env.evaluate(client=vf.FakeClient("4"), model="fake", num_examples=2, results_path=path, use_tqdm=False)
    return path


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def terminal(path: Path) -> None:
    path.symlink_to("/dev/tty")


def socket_file(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def endless(path: Path) -> None:
    """A terabyte without a line end; it is a hole, and takes no room."""
    with open(path, "wb") as file:
        file.truncate(1 << 40)


TRAPS = [fifo, device, terminal, socket_file, endless]


@pytest.fixture(params=TRAPS, ids=lambda trap: trap.__name__)
def trap(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    chosen: Callable[[Path], None] = request.param
    return chosen


@pytest.fixture
def trapped(made: Path, folder: Path, trap: Callable[[Path], None], request: pytest.FixtureRequest) -> Path:
    """The run, with something else in the place of one of its files."""
    path = folder / "foreign"
    shutil.copytree(made, path)
    (path / request.param).unlink()
    trap(path / request.param)
    return path


COMMANDS: dict[str, list[str]] = {
    "replay": ["replay", "RUN"],
    "rescore": ["rescore", "RUN"],
    "compare": ["compare", "RUN", "MADE"],
    "export": ["export", "RUN", "-o", "out.jsonl"],
    "resume": ["eval", "arithmetic", "-m", "fake", "-n", "2", "-r", "1", "--resume", "RUN"],
    "view": ["view", "RUN", "--export", "out.html"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("trapped", ["metadata.json", "results.jsonl"], indirect=True)
def test_no_command_hangs_on_a_run_of_a_stranger(command: str, trapped: Path, made: Path, folder: Path) -> None:
    from click.testing import CliRunner

    from verifiers.cli.main import vf as program

    words = [{"RUN": str(trapped), "MADE": str(made)}.get(word, word) for word in COMMANDS[command]]
    result = CliRunner().invoke(program, words, prog_name="vf")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output + result.stderr
    assert result.exit_code in (0, 1, 2)
    assert len(result.stderr.strip().splitlines()) < 12


@pytest.mark.parametrize("trapped", ["results.jsonl"], indirect=True)
def test_readers_of_the_library_raise_an_oserror_that_names_the_file(trapped: Path) -> None:
    run = RunDir(trapped)
    reads: list[Callable[[], Any]] = [lambda: list(run.records()), run.load_index, run.rows, run.compact, run.appender]
    for read in reads:
        with pytest.raises(OSError, match=r"regular file|longer than 256 MiB|No such device"):
            read()


@pytest.mark.parametrize("trapped", ["metadata.json", "results.jsonl"], indirect=True)
def test_the_viewer_says_what_is_wrong_and_goes_on(trapped: Path) -> None:
    from verifiers.viewer.figures import notices

    library = Library(roots=[], paths=[trapped])
    (run,) = library.runs()
    for _ in range(3):
        assert run.index.refresh(budget_s=5.0)
    said = " ".join(notices(run))
    assert "metadata.json cannot be read" in said or "results.jsonl cannot be read" in said
    assert run.is_live in (True, False)


def test_a_lock_that_is_a_trap_is_no_lock(made: Path, folder: Path) -> None:
    for place in (fifo, device):
        path = folder / place.__name__
        shutil.copytree(made, path)
        (path / ".lock").unlink()
        place(path / ".lock")
        with pytest.raises(OSError, match="it must be a regular file"):
            RunDir(path).compact()


@pytest.mark.parametrize("name", [".lock", "metadata.json.tmp", "results.jsonl", "damaged.txt", "attempts.jsonl"])
def test_nothing_is_written_through_a_link_in_a_run_of_a_stranger(name: str, made: Path, folder: Path) -> None:
    """Resuming would empty, cut or extend whatever file of ours the link points at."""
    mine = folder / "mine.txt"
    mine.write_text("my only copy, without a last line end")
    path = folder / "foreign"
    shutil.copytree(made, path)
    with open(path / "results.jsonl", "ab") as file:  # something for each of the side files
        file.write(b"no record\n" + b'{"example_id":7,"rollout":0,"error":{"type":"E","blame":"grader"}}\n' + b"torn")
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(mine)
    run = RunDir(path)
    write = (lambda: run.update_metadata({"note": "new"})) if name == "metadata.json.tmp" else run.compact
    with pytest.raises(OSError, match="symbolic link"):
        write()
    assert mine.read_text() == "my only copy, without a last line end"


def test_metadata_that_is_too_large_to_be_any_is_not_read(made: Path, folder: Path, run: Any) -> None:
    path = folder / "large"
    shutil.copytree(made, path)
    with open(path / "metadata.json", "r+b") as file:
        file.truncate(100 << 20)
    with pytest.raises(OSError, match="larger than the limit of 64 MiB"):
        _ = RunDir(path).metadata
    assert "larger than the limit of 64 MiB" in run("compare", str(path), str(made)).stderr


ODD = [
    ("example_id", {}),
    ("example_id", [1]),
    ("rollout", {}),
    ("task", {"a": 1}),
    ("stop_condition", ["x"]),
    ("total_ms", ["x"]),
    ("total_ms", 10**400),
    ("trajectory", True),
    ("metrics", [1]),
    ("metrics", "x"),
    ("metrics", {"exact": 10**400}),
    ("reward", []),
    ("reward", "1.0"),
    ("usage", "x"),
    ("error", 0),
    ("prompt", [3]),
    ("completion", True),
]


def with_odd_line(made: Path, path: Path, column: str, value: Any) -> Path:
    """A copy of a run whose first line has this value and, as another program would write it, no checksum."""
    shutil.copytree(made, path)
    lines = [json.loads(line) for line in (path / "results.jsonl").read_text().splitlines()]
    lines = [{name: one for name, one in line.items() if name != checksum.FIELD} for line in lines]
    lines[0][column] = value
    (path / "results.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.parametrize(("column", "value"), ODD)
def test_a_line_that_another_program_wrote_is_met_by_every_command(
    made: Path, folder: Path, run: Callable[..., Any], repo: Path, column: str, value: Any
) -> None:
    path = with_odd_line(made, folder / "odd", column, value)
    environments = str(repo / "environments")
    for words in (
        ("compare", str(path), str(made)),
        ("power", "0.1", "--run", str(path)),
        ("rescore", str(path), "-p", environments),
        ("rescore", str(path), "-p", environments, "--json"),
        ("replay", str(path), "-p", environments),
        *(("export", str(path), "-f", form, "-o", "-") for form in ("jsonl", "sft", "dpo")),
    ):
        run(*words, code=None)
    run("eval", "arithmetic", "-m", "fake", "-n", "2", "-r", "1", "--resume", str(path), "-p", environments, code=None)


@pytest.mark.parametrize(("column", "value"), [("completion", 5), ("prompt", [3]), ("trajectory", [5])])
def test_one_line_of_another_program_keeps_no_other_from_being_scored_or_played_again(
    made: Path, folder: Path, run: Callable[..., Any], repo: Path, column: str, value: Any
) -> None:
    path = with_odd_line(made, folder / "odd", column, value)
    again = json.loads(run("rescore", str(path), "-p", str(repo / "environments"), "--json", code=None).stdout)
    assert again["rollouts"] == len((path / "results.jsonl").read_text().splitlines())
    assert again["failed"] <= 1
    if column == "completion":
        assert run("replay", str(path), "-p", str(repo / "environments"), code=1).stdout


def test_a_run_whose_metadata_another_program_wrote_is_scored_again(
    made: Path, folder: Path, run: Callable[..., Any], repo: Path
) -> None:
    path = folder / "odd"
    shutil.copytree(made, path)
    metadata = json.loads((path / "metadata.json").read_text()) | {"config": 5, "state_columns": 5}
    (path / "metadata.json").write_text(json.dumps(metadata))
    assert "nothing was sampled again" in run("rescore", str(path), "-p", str(repo / "environments")).stdout
