"""What one cell gives: its output, its last expression, its error, and the time it took."""

from __future__ import annotations

import time

import pytest

from verifiers.sandbox import Sandbox

pytestmark = pytest.mark.usefixtures("full_level")


def test_a_cell_gives_what_it_printed_and_its_last_expression(sandbox: Sandbox) -> None:
    result = sandbox.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\n[1, 2] + [3]")
    assert (result.status, result.stdout, result.stderr) == ("ok", "out\n", "err\n")
    assert result.value == "[1, 2, 3]"
    assert result.error is None
    assert result.is_ok
    assert result.time_s > 0


def test_a_cell_without_a_last_expression_has_no_value(sandbox: Sandbox) -> None:
    assert sandbox.run("x = 1").value is None
    assert sandbox.run("None").value is None
    assert sandbox.run("").status == "ok"


REPLACED_OUTPUT = {
    "wrapped again": "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')\nprint('é')",
    "detached": "import codecs, sys\nsys.stdout = codecs.getwriter('utf-8')(sys.stdout.detach())\nprint('é')",
    "opened again": "import os, sys\nsys.stdout = os.fdopen(os.dup(1), 'w')\nprint('é')",
    "closed": "import sys\nprint('é')\nsys.stdout.close()\nsys.stderr.close()",
    "buffer closed": "import sys\nprint('é')\nsys.stdout.buffer.close()",
    "in a with block": "import sys\nwith sys.stdout as out: print('é', file=out)",
}


@pytest.mark.parametrize("code", REPLACED_OUTPUT.values(), ids=REPLACED_OUTPUT)
def test_a_cell_that_replaces_or_closes_its_output_loses_no_output_and_later_cells_have_theirs(
    code: str, sandbox: Sandbox
) -> None:
    with sandbox.session() as session:
        first, failed = session.run(code), session.run(f"{code}\n1 / 0")
        later = session.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\n3")
    assert (first.status, first.stdout) == ("ok", "é\n")
    assert (failed.status, failed.stdout) == ("error", "é\n")
    assert "ZeroDivisionError" in (failed.error or "")
    assert (later.status, later.value, later.stdout, later.stderr) == ("ok", "3", "out\n", "err\n")


def test_an_output_that_cannot_be_flushed_is_no_error_of_the_cell(sandbox: Sandbox) -> None:
    code = "import sys\nclass Out:\n    def write(self, text): ...\n    def flush(self): raise {}\nsys.stdout = Out()"
    for what in ("ValueError", "SystemExit(3)", "KeyboardInterrupt"):
        with sandbox.session() as session:
            assert session.run(code.format(what)).status in ("ok", "error")
            assert session.run(f"{code.format(what)}\n1 / 0").status == "error"
            assert session.run("print('out')").stdout == "out\n"
    assert sandbox.run("import sys\nsys.stdout = None\n4").value == "4"


def test_replaced_output_has_the_same_limit(sandbox: Sandbox) -> None:
    code = "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nsys.stdout.write('x' * (1 << 20)){}"
    with sandbox.session() as session:
        assert session.run(code.format("")).status == "output"
        assert session.run(code.format("\n1 / 0")).status in ("output", "error")
        assert session.run("print('out')").stdout == "out\n"


def test_an_error_comes_with_a_traceback_of_the_cell_only(sandbox: Sandbox) -> None:
    result = sandbox.run("def f():\n    return 1 / 0\nprint('before')\nf()")
    assert (result.status, result.stdout) == ("error", "before\n")
    assert result.error is not None
    assert result.error.endswith("ZeroDivisionError: division by zero")
    assert "return 1 / 0" in result.error
    assert "cells.py" not in result.error


def test_a_syntax_error_is_an_error_of_the_cell(sandbox: Sandbox) -> None:
    result = sandbox.run("def (")
    assert result.status == "error"
    assert "SyntaxError" in (result.error or "")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("exit()", "ok"),
        ("import sys; sys.exit(0)", "ok"),
        ("exit(3)", "error"),
        ("import sys; sys.exit('no')", "error"),
    ],
)
def test_exit_ends_the_cell_and_not_the_session(code: str, status: str, sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.run("x = 1")
        assert session.run("from site import *" if code.startswith("exit") else "0").status == "ok"
        assert session.run(code).status in (status, "error")
        assert session.run("x").value == "1"


def test_a_program_that_dies_leaves_what_it_had_printed(sandbox: Sandbox) -> None:
    result = sandbox.run("import os\nprint('so far')\nos._exit(3)")
    assert (result.status, result.stdout) == ("killed", "so far\n")
    assert "with code 3" in (result.error or "")


def test_text_of_all_kinds_comes_out_as_it_went_in(sandbox: Sandbox) -> None:
    text = "äöü 漢字 🙂 \u2028 \x00"
    assert sandbox.run(f"print({text!r}, end='')").stdout == text
    assert sandbox.run(repr(text)).value == repr(text)


def test_fresh_calls_share_nothing(sandbox: Sandbox) -> None:
    sandbox.run("import builtins; builtins.left = 1; open('left', 'w')")
    assert (
        sandbox.run("import builtins, os; hasattr(builtins, 'left'), os.path.exists('left')").value == "(False, False)"
    )


def test_random_numbers_differ_between_calls() -> None:
    code = "import random; random.random()"
    with Sandbox() as sandbox:
        assert len({sandbox.run(code).value for _ in range(5)}) == 5


def test_time_in_the_result_is_measured_outside() -> None:
    with Sandbox() as sandbox:
        began = time.monotonic()
        result = sandbox.run("import time; time.monotonic = time.perf_counter = lambda: 0.0; time.sleep(0.2)")
        assert 0.1 <= result.time_s <= time.monotonic() - began  # the clock may start after the cell has


def test_annotations_in_a_cell_are_what_they_say_and_not_their_text(sandbox: Sandbox) -> None:
    assert sandbox.run("def f(x: int): pass\nf.__annotations__").value == "{'x': <class 'int'>}"


def test_the_rehearsal_before_the_first_cell_leaves_no_trace(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        assert session.run("sorted(globals())").value == "['__builtins__', '__name__']"
        assert '"<cell 2>"' in str(session.run("1 / 0").error)
        code = "import linecache; [name for name in linecache.cache if name.startswith('<cell')]"
        assert session.run(code).value == "['<cell 1>', '<cell 2>', '<cell 3>']"


def test_threads_and_locks_work_in_a_forked_process() -> None:
    code = """
import threading
assert threading.enumerate() == [threading.current_thread()] == [threading.main_thread()]
went, lock = threading.Event(), threading.Lock()
with lock:
    thread = threading.Thread(target=lambda: (lock.acquire(timeout=5), went.set()))
    thread.start()
went.wait(5)
thread.join(5)
threading.active_count()
"""
    with Sandbox(level="full") as sandbox:
        assert sandbox.run(code).value == "1"


def test_programs_that_lock_their_own_files_work(sandbox: Sandbox) -> None:
    result = sandbox.run(
        "import fcntl, sqlite3\n"
        "base = sqlite3.connect('data.db')\n"
        "base.execute('create table t (x)')\n"
        "for number in range(10): base.execute('insert into t values (?)', (number,)); base.commit()\n"
        "with open('lock', 'w') as file: fcntl.flock(file, fcntl.LOCK_EX); fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "sqlite3.connect('data.db').execute('select sum(x) from t').fetchone()"
    )
    assert result.value == "(45,)", result


def test_a_lock_on_its_own_file_keeps_out_who_opened_it_again(sandbox: Sandbox) -> None:
    result = sandbox.run(
        "import fcntl\n"
        "one, other = open('lock', 'w'), open('lock', 'w')\n"
        "fcntl.flock(one, fcntl.LOCK_EX)\n"
        "try: fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError: print('locked')\n"
        "fcntl.flock(one, fcntl.LOCK_UN); fcntl.flock(other, fcntl.LOCK_EX)\n"
    )
    assert (result.status, result.stdout) == ("ok", "locked\n"), result
    assert sandbox.run("import fcntl\nfcntl.flock(open('lock', 'w'), fcntl.LOCK_EX)").is_ok
    waiting = (
        "import fcntl\none, other = open('a', 'w'), open('a')\n[fcntl.flock(f, fcntl.LOCK_EX) for f in (one, other)]"
    )
    assert sandbox.run(waiting, timeout_s=0.5).status == "timeout"
