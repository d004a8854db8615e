"""What a session keeps from cell to cell, and what its functions return when they are called."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from verifiers.sandbox import Result, Sandbox

pytestmark = pytest.mark.usefixtures("full_level")


def test_a_session_keeps_its_state(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        first = session.run("x = 20\ndef double(y): return 2 * y")
        second = session.run("double(x) + 2")
        assert second.value == "42"
        assert (first.is_fresh, second.is_fresh) == (True, False)


def test_a_cell_that_runs_out_of_time_keeps_the_session(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.run("x = 1")
        assert session.run("while True: pass", timeout_s=0.2).status == "timeout"
        assert session.run("x").value == "1"


def test_a_cell_that_ends_its_process_costs_the_state_and_says_so(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.run("x = 1")
        assert session.run("import os; os._exit(1)").status == "killed"
        after = session.run("'x' in globals()")
        assert (after.value, after.is_fresh) == ("False", True)


def test_output_of_one_cell_is_not_in_the_next(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        assert session.run("print('a' * 100_000)").status == "output"
        assert session.run("print('b')").stdout == "b\n"
        session.run("import sys; sys.stdout.write('c')")
        assert session.run("print('d')").stdout == "d\n"


def test_a_closed_session_says_so(sandbox: Sandbox) -> None:
    session = sandbox.session()
    session.run("1")
    session.close()
    session.close()
    with pytest.raises(ValueError, match="the session is closed"):
        session.run("1")


@pytest.mark.parametrize("what", ["session", "sandbox"])
def test_closing_in_the_middle_of_a_cell_kills_it(what: str) -> None:
    sandbox = Sandbox(warm=0, packages=("colorsys",))
    session = sandbox.session()
    session.run("1")
    timer = threading.Timer(0.3, session.close if what == "session" else sandbox.close)
    timer.start()
    result = session.run("import time; print('so far'); time.sleep(600)", timeout_s=600)
    timer.join()
    assert (result.status, result.stdout) == ("killed", "so far\n")
    if what == "sandbox":
        assert session.run("1 + 1").value == "2"
    sandbox.close()


def test_closing_a_session_while_a_task_waits_for_its_cell() -> None:
    async def main() -> Result:
        async with Sandbox() as sandbox:
            session = sandbox.session()
            await session.run("1")
            task = asyncio.create_task(session.run("import time; time.sleep(600)", timeout_s=600))
            await asyncio.sleep(0.2)
            session.close()
            return await task

    assert asyncio.run(main()).status == "killed"


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda session: session.run(b"1"), "code must be a string; got bytes"),
        (lambda session: session.call("f", [object()]), "the arguments of 'f' must be plain JSON values"),
    ],
    ids=["code", "arguments"],
)
def test_what_cannot_be_sent_is_refused_and_costs_no_state(ask: Any, message: str, sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.run("x = 1")
        with pytest.raises(TypeError, match=message):
            ask(session)
        with pytest.raises(ValueError, match="timeout_s must be a positive number"):
            session.run("1", timeout_s=float("inf"))
        assert session.run("x").value == "1"


def test_a_cell_with_an_alarm_of_its_own_does_not_silence_the_next(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.run("import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN); x = 1")
        assert session.run("while True: pass", timeout_s=0.2).status == "timeout"
        assert session.run("x").value == "1"


def test_cells_of_one_session_wait_for_one_another(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.run("import time; log = []")
        code = "log.append('in'); time.sleep(0.05); log.append('out')"
        threads = [threading.Thread(target=session.run, args=(code,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert session.run("log == ['in', 'out'] * 4").value == "True"


def test_a_call_gives_what_the_function_returned(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.run("def f(a, *, b=1): return {'sum': a + b, 'pair': (a, b), 'set': {2, 1}, 3: None}")
        result = session.call("f", [1], {"b": 2})
        assert result.value == {"sum": 3, "pair": [1, 2], "set": [1, 2], "3": None}


def test_a_call_that_raises_or_is_not_there_is_an_error(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.run("def f(): raise KeyError('no')")
        assert session.call("f").status == "error"
        assert "NameError" in (session.call("g").error or "")
        assert "TypeError" in (session.call("f", [1]).error or "")


def test_what_json_cannot_say_comes_as_its_repr(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.run("from fractions import Fraction\ndef f(): return [Fraction(1, 3), 1j, b'x', float('inf')]")
        assert session.call("f").value == ["Fraction(1, 3)", "1j", "b'x'", float("inf")]


def test_a_value_too_long_to_send_is_said_to_be(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.run("def f(): return 'x' * 10_000_000")
        result = session.call("f")
        assert (result.status, result.value) == ("output", None)
        assert "10000002 bytes" in (result.error or "")


def test_a_function_can_be_called_in_python_only(shell: Sandbox) -> None:
    with shell.session() as session, pytest.raises(ValueError, match="this one is bash"):
        session.call("f")
