"""Nothing is left behind: when a call ends, when thousands have, and when the application is killed in the middle."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox.arena import LEVELS, ROOT, descendants, wait_until, why_not
from verifiers.sandbox import Result, Sandbox
from verifiers.sandbox.host import ENVIRONMENT

HOSTILE = [
    ("import os; os._exit(1)", {"killed"}),
    ("x = bytearray(8 << 30)", {"memory"}),
    ("while True: print('x' * 1000)", {"output"}),
    ("while True:\n    try:\n        while True: x = 1\n    except BaseException: y = 1", {"timeout"}),
    ("import ctypes; ctypes.string_at(0)", {"killed"}),
    (
        "import os\nfor fd in range(3, 256):\n    try: os.write(fd, b'\\xff' * 100)\n    except OSError: pass",
        {"killed"},
    ),
    ("kept = []\nwhile True: kept.append(open('/dev/null'))", {"error"}),
    ("import os; os.fork()", {"error"}),
]
APPLICATION = """
import sys, threading, time
from verifiers.sandbox import Sandbox
sandbox = Sandbox(level={level!r}, warm=2)
sessions = [sandbox.session() for _ in range(3)]
for session in sessions: session.run("x = 1")
threading.Thread(target=sandbox.run, args=("while True: pass",), kwargs={{"timeout_s": 600}}, daemon=True).start()
threading.Thread(target=sandbox.run, args=("import signal, time; signal.pthread_sigmask(0, range(1, 65))\\n"
                 "while True: time.sleep(1)",), kwargs={{"timeout_s": 600}}, daemon=True).start()
if {fork}:
    import os
    if os.fork() == 0:  # a child that outlives the application, with all its descriptors
        time.sleep(600)
time.sleep(0.5)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module", params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    if reason := why_not(request.param):
        pytest.skip(reason)
    return str(request.param)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_whole_tree_dies_with_the_application_even_when_it_is_killed(level: str) -> None:
    code = APPLICATION.format(level=level, fork=False)
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as application:
        assert application.stdout is not None
        assert application.stdout.readline() == "ready\n"
        tree = list(descendants(application.pid))
        assert len(tree) >= 6
        application.kill()
    assert wait_until(lambda: not any(map(is_alive, tree)))


def test_a_child_that_outlives_the_application_keeps_nothing_alive(level: str) -> None:
    code = APPLICATION.format(level=level, fork=True)
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as application:
        assert application.stdout is not None
        assert application.stdout.readline() == "ready\n"
        children = Path(f"/proc/{application.pid}/task/{application.pid}/children").read_text().split()
        heir = next(int(pid) for pid in children if "zygote" not in Path(f"/proc/{pid}/cmdline").read_text())
        tree = [pid for pid in descendants(application.pid) if pid != heir]
        application.kill()
        try:
            assert wait_until(lambda: not any(map(is_alive, tree)))
        finally:
            os.kill(heir, signal.SIGKILL)


def test_an_application_that_just_ends_leaves_nothing(level: str) -> None:
    code = f"from verifiers.sandbox import Sandbox\ns = Sandbox(level={level!r})\nprint(s.run('6 * 7').value)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=100
    )
    assert (done.stdout, done.stderr) == ("42\n", "")


def test_a_zygote_outlives_the_thread_that_started_it(level: str) -> None:
    with Sandbox(level=level, packages=("bisect",)) as sandbox:  # type: ignore[arg-type]
        thread = threading.Thread(target=sandbox.run, args=("1",))
        thread.start()
        thread.join()
        host = sandbox._host
        assert sandbox.run("1 + 1").value == "2"
        assert sandbox._host is host


def test_a_session_that_is_closed_is_gone(level: str) -> None:
    with Sandbox(level=level, warm=0) as sandbox:  # type: ignore[arg-type]
        sandbox.start()
        before = set(descendants(os.getpid()))
        with sandbox.session() as session:
            session.run("1")
            new = set(descendants(os.getpid())) - before
            assert new
        assert wait_until(lambda: not new & set(descendants(os.getpid())))


class Footprint:
    """Processes, descriptors and memory of the application and of the zygote's tree."""

    def __init__(self) -> None:
        gc.collect()
        self.tree = set(descendants(os.getpid()))
        self.descriptors = {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in [os.getpid(), *self.tree]}
        self.memory_mb = sum(resident_mb(pid) for pid in [os.getpid(), *self.tree])


def resident_mb(pid: int) -> float:
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith(("RssAnon", "RssShmem"))) / 1024


async def many(sandbox: Sandbox, calls: int, at_once: int) -> None:
    """So many calls, a tenth of them hostile, in an order that is the same every time."""
    chance = random.Random(0)
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with gate:
            if chance.random() < 0.1:
                code, statuses = chance.choice(HOSTILE)
                timeout_s = 0.1 if "timeout" in statuses else 60.0
                result: Result = await sandbox.run(code, timeout_s=timeout_s)
                assert result.status in statuses, (code, result)
            else:
                result = await sandbox.run(f"print({number}); {number} * 2", timeout_s=60)
                assert (result.stdout, result.value) == (f"{number}\n", str(number * 2)), result

    await asyncio.gather(*[one(number) for number in range(calls)])


@pytest.fixture
def folders() -> Iterator[Path]:
    """Where sessions without a file system of their own get their folders."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture
def sandbox(level: str, folders: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(folders))
    own = (folders.name,)  # not there to be imported: a zygote that an earlier test has used knows other folders
    with Sandbox(level=level, warm=0, memory_mb=256, packages=own) as sandbox:  # type: ignore[arg-type]
        yield sandbox


def leaves_nothing(sandbox: Sandbox, folders: Path, calls: int) -> None:
    sandbox.start()
    tree = set(descendants(os.getpid()))
    asyncio.run(many(sandbox, 60, 8))  # what is made once is there before anything is counted
    # A process of an earlier test (a zygote that nobody uses any more) may end meanwhile; none may be added.
    assert wait_until(lambda: set(descendants(os.getpid())) <= tree)
    before = Footprint()
    asyncio.run(many(sandbox, calls, 8))
    assert wait_until(lambda: set(descendants(os.getpid())) <= tree), "stray processes"
    assert wait_until(lambda: not list(folders.iterdir()))
    after = Footprint()
    kept = {pid: count for pid, count in before.descriptors.items() if pid in after.descriptors}
    assert after.descriptors == kept
    assert after.memory_mb - before.memory_mb < 20


def test_300_calls_a_tenth_of_them_hostile_leave_nothing_behind(sandbox: Sandbox, folders: Path) -> None:
    leaves_nothing(sandbox, folders, 300)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_5000_calls_a_tenth_of_them_hostile_leave_nothing_behind(sandbox: Sandbox, folders: Path) -> None:
    leaves_nothing(sandbox, folders, 5000)
