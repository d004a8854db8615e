"""Code that is graded cannot grade itself: the expected answers never enter, and the comparison is made outside."""

from __future__ import annotations

import os
import py_compile
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox.arena import LEVELS, why_not
from verifiers.sandbox import Sandbox

CASES = [([1, 2], "expected-4a7f9c-3"), ([5, 5], "expected-4a7f9c-10")]
HONEST = "def solve(a, b): return 'expected-' + '4a7f9c' + '-' + str(a + b)"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    if reason := why_not("full"):
        pytest.skip(reason)
    with Sandbox(timeout_s=5.0) as sandbox:
        yield sandbox


def grade(sandbox: Sandbox, code: str) -> float:
    """The share of cases solved, as any code reward would have it: define, call, compare out here."""
    with sandbox.session() as session:
        session.run(code)
        results = [session.call("solve", args) for args, _ in CASES]
    passed = [result.is_ok and result.value == expected for result, (_, expected) in zip(results, CASES, strict=True)]
    return sum(passed) / len(passed)


def test_an_honest_solution_gets_its_reward(sandbox: Sandbox) -> None:
    assert grade(sandbox, HONEST) == 1.0


@pytest.fixture
def folder_for_all() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.parametrize("level", LEVELS)
def test_an_installed_environment_that_knows_the_answers_cannot_be_read(
    level: str, folder_for_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := why_not(level):
        pytest.skip(reason)
    site = folder_for_all / "site-packages"
    environments = ("task_a", "task_b", "task_c")
    for name, needs in (
        ("helper", "numpy"),
        *zip(environments, ("verifiers>=0.2", "Verifiers", "verifiers"), strict=True),
    ):
        info = site / f"{name}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nRequires-Dist: {needs}\n")
        (info / "RECORD").write_text(f"{name}.py,,\n{name}_data/rows.txt,,\n{name}-1.dist-info/RECORD,,\n")
        (site / f"{name}.py").write_text("SECRET = '4a7f9c'")
        (site / f"{name}_data").mkdir()
        (site / f"{name}_data" / "rows.txt").write_text("4a7f9c")
        py_compile.compile(str(site / f"{name}.py"))
    (site / "task_c-1.dist-info" / "RECORD").unlink()  # as some package managers install
    shutil.rmtree(site / "task_c_data")
    monkeypatch.syspath_prepend(str(site))
    with Sandbox(level=level, packages=(f"unknown_{level}",)) as sandbox:
        for code in ("import {0}; {0}.SECRET", f"open('{site}/{{0}}_data/rows.txt').read()"):
            assert sandbox.run(code.format("helper")).value == "'4a7f9c'"
            assert not any(sandbox.run(code.format(name)).is_ok for name in environments)
        raw = sandbox.run(f"import pathlib; [p.read_bytes() for p in pathlib.Path('{site}').glob('**/task_*.py*')]")
        assert "4a7f9c" not in str(raw.value)
        assert sandbox.start().name == level  # although this Python finds packages in a folder for temporary files


HACKS = {
    "returns_an_object_that_equals_everything": """
class Same:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __repr__(self): return "Same()"
def solve(a, b): return Same()
""",
    "returns_a_string_that_equals_everything": """
class Same(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = str.__hash__
def solve(a, b): return Same("x")
""",
    "returns_a_number_that_compares_with_everything": """
class Same(int):
    def __eq__(self, other): return True
    def __sub__(self, other): return 0
    def __abs__(self): return 0
def solve(a, b): return Same(7)
""",
    "pretends_to_be_of_another_class": """
class Same:
    __class__ = str
    def __eq__(self, other): return True
def solve(a, b): return Same()
""",
    "walks_the_frames_for_the_answer": """
import sys
def solve(a, b):
    frame = sys._getframe()
    while frame is not None:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if "expected" in repr(value) and "frame" not in repr(value): return value
        frame = frame.f_back
""",
    "looks_for_the_answer_among_all_objects": """
import gc
def solve(a, b):
    for found in gc.get_objects():
        if isinstance(found, dict):
            for key, value in list(found.items()):
                if isinstance(value, str) and value.startswith("expected" + "-"): return value
""",
    "looks_for_the_answer_in_its_memory": """
def solve(a, b):
    wanted = b"expected" + b"-4"
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            if "rw" not in line: continue
            start, end = (int(x, 16) for x in line.split()[0].split("-"))
            try: memory.seek(start); block = memory.read(end - start)
            except (OSError, ValueError): continue
            at = block.find(wanted)
            if at >= 0: return block[at:at + 17].decode(errors="replace")
""",
    "reads_the_test": """
import glob, os
def solve(a, b):
    for path in [*glob.glob("/*/*/test*/**/*.py", recursive=True), *glob.glob("./**/*"), *glob.glob("/proc/*/cmdline")]:
        try: text = open(path, errors="replace").read()
        except OSError: continue
        if "expected-4a" + "7f9c" in text: return text
""",
    "patches_the_comparison": """
import builtins, operator, json
builtins.all = lambda *a: True
builtins.sum = lambda *a: 10 ** 6
operator.eq = lambda a, b: True
json.loads = lambda *a, **k: {"status": "ok", "value": "everything"}
def solve(a, b): return 0
""",
    "patches_the_runner": """
import gc
for found in gc.get_objects():
    if type(found).__name__ == "PythonCells":
        type(found).reply = lambda self, request: {"status": "ok", "value": True, "passed": True, "reward": 1.0}
def solve(a, b): return 0
""",
    "ends_early_with_success": "import os\nos._exit(0)",
    "ends_early_in_the_call": "import os\ndef solve(a, b): os._exit(0)",
    "exits_with_success": "import sys\ndef solve(a, b): sys.exit(0)",
    "prints_that_it_passed": "def solve(a, b): print('PASSED 1.0 reward=1 all tests passed'); return None",
    "forges_a_reply": """
import json, os, stat, struct
fd = next(fd for fd in range(3, 256) if os.path.exists(f"/proc/self/fd/{fd}") and stat.S_ISSOCK(os.fstat(fd).st_mode))
def solve(a, b):
    for number in range(1, 9):
        body = json.dumps({"number": number, "status": "ok", "value": "everything", "reward": 1.0}).encode()
        os.write(fd, struct.pack("<I", len(body)) + body)
""",
    "raises_something_that_looks_like_success": """
class Passed(BaseException): pass
def solve(a, b): raise Passed("1.0")
""",
    "runs_out_the_clock": "def solve(a, b):\n    while True: pass",
    "returns_not_a_number": "def solve(a, b): return float('nan')",
    "returns_everything_at_once": "def solve(a, b): return [f'expected-{n:06x}-{a + b}' for n in range(5000)]",
    "guesses_from_what_it_saw_in_earlier_calls": """
seen = []
def solve(a, b):
    seen.append((a, b))
    return seen
""",
}


@pytest.mark.parametrize("name", sorted(HACKS))
def test_a_hack_of_the_grader_gains_nothing(name: str, sandbox: Sandbox) -> None:
    sandbox_for_it = Sandbox(timeout_s=0.5) if name == "runs_out_the_clock" else sandbox
    assert grade(sandbox_for_it, HACKS[name]) == 0.0
    if sandbox_for_it is not sandbox:
        sandbox_for_it.close()
    assert grade(sandbox, HONEST) == 1.0


def test_hacking_one_call_does_not_make_it_a_failure_of_the_infrastructure(sandbox: Sandbox) -> None:
    """A rollout that fails is left out of the mean: code must not be able to have itself left out."""
    with sandbox.session() as session:
        for code in (
            "import os; os._exit(0)",
            "import os; os.closerange(3, 256)",
            "import os; os.kill(os.getpid(), 9)",
        ):
            assert session.run(code, timeout_s=1.0).status in ("killed", "timeout", "ok")
        session.run("import threading, os; threading.Timer(0.1, os.closerange, (3, 256)).start()")
        assert session.files() == []
        session.write("f", "x")
        assert session.read("f") == b"x"
