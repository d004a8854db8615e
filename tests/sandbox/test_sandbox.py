"""What the sandbox promises to those who use it: results, sessions, files, limits, both languages, sync and async."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.arena import descendants, wait_until, why_not
from verifiers.errors import SandboxError
from verifiers.sandbox import Level, Result, Sandbox, level
from verifiers.sandbox.drive import Gate, drive, drive_async

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def isolation() -> None:
    if reason := why_not("full"):
        pytest.skip(reason)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(warm=0) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def shell() -> Iterator[Sandbox]:
    with Sandbox(language="bash", warm=0) as sandbox:
        yield sandbox


# --- results ------------------------------------------------------------------------------------------------------


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


# --- sessions -----------------------------------------------------------------------------------------------------


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
        (lambda session: session.call("f", [object()]), "the arguments of 'f' must be plain values"),
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


# --- calls: the answer stays outside --------------------------------------------------------------------------------


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


# --- files ----------------------------------------------------------------------------------------------------------


def test_files_go_in_and_out(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.write("in.txt", "text")
        session.write("deep/er/in.bin", b"\x00\xff")
        session.run("open('out.txt', 'w').write(open('in.txt').read().upper())")
        assert session.read("out.txt") == b"TEXT"
        assert session.read("deep/er/in.bin") == b"\x00\xff"
        assert session.files() == ["deep/er/in.bin", "in.txt", "out.txt"]


def test_the_sandboxes_files_are_there_from_the_start_and_after_a_crash() -> None:
    with Sandbox(files={"a.txt": "A", "b/c.bin": b"C"}) as sandbox, sandbox.session() as session:
        assert session.run("open('a.txt').read() + open('b/c.bin').read()").value == "'AC'"
        session.run("import os; os.remove('a.txt'); os._exit(0)")
        assert session.files() == ["a.txt", "b/c.bin"]


def test_reading_what_is_not_there_raises_what_open_would(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        with pytest.raises(FileNotFoundError, match=r"none\.txt"):
            session.read("none.txt")
        with pytest.raises(IsADirectoryError):
            session.read(".")


def test_a_file_that_does_not_fit_raises_what_write_would() -> None:
    with Sandbox(disk_mb=1) as sandbox, sandbox.session() as session:
        with pytest.raises(OSError, match=r"No space left|File too large"):
            session.write("big", b"x" * (2 << 20))
        assert session.run("1 + 1").value == "2"


def test_a_large_file_makes_the_round_trip(sandbox: Sandbox) -> None:
    content = os.urandom(8 << 20)
    with sandbox.session() as session:
        session.write("big", content)
        assert session.read("big") == content


# --- bash -----------------------------------------------------------------------------------------------------------


def test_a_shell_keeps_its_variables_and_its_folder(shell: Sandbox) -> None:
    with shell.session() as session:
        assert session.run("x=5; mkdir d; cd d; f() { echo f$1; }").exit_code == 0
        assert session.run("echo $x; basename $PWD; f 1").stdout == "5\nd\nf1\n"


def test_a_command_that_fails_is_an_error_with_its_code(shell: Sandbox) -> None:
    result = shell.run("echo before; ls /nowhere")
    assert (result.status, result.exit_code, result.stdout) == ("error", 2, "before\n")
    assert "/nowhere" in result.stderr
    assert shell.run("exit 7").exit_code == 7
    assert shell.run("kill -9 $$").exit_code == 137


def test_a_syntax_error_does_not_end_the_shell(shell: Sandbox) -> None:
    with shell.session() as session:
        session.run("x=1")
        assert session.run("if then").status == "error"
        assert session.run("echo $x").stdout == "1\n"


def test_a_shell_that_was_left_is_started_again(shell: Sandbox) -> None:
    with shell.session() as session:
        session.run("x=1; echo kept > file")
        assert session.run("exit 0").status == "ok"
        after = session.run("echo [$x]; cat file")
        assert (after.stdout, after.is_fresh) == ("[]\nkept\n", True)


def test_commands_that_read_find_nothing_to_read(shell: Sandbox) -> None:
    assert shell.run('cat; read line; echo "[$line]"').stdout == "[]\n"


def test_the_shell_finds_this_python(shell: Sandbox) -> None:
    result = shell.run("python -c 'import sys; print(sys.version_info[:2])'")
    assert result.stdout == f"{sys.version_info[:2]}\n", result


def test_long_input_reaches_the_shell_whole(shell: Sandbox) -> None:
    assert shell.run(f": {'x' * 500_000}\necho done").stdout == "done\n"


# --- limits ---------------------------------------------------------------------------------------------------------


def test_memory_is_limited_per_sandbox_and_per_call() -> None:
    code = "x = bytearray(100 << 20); 'fits'"
    with Sandbox(memory_mb=128) as sandbox:
        assert sandbox.run(code).status == "ok"
        assert sandbox.run(code, memory_mb=64).status == "memory"
        assert sandbox.run("x = bytearray(150 << 20); 'fits'", memory_mb=256).status == "ok"


def test_time_is_limited_per_sandbox_and_per_call() -> None:
    with Sandbox(timeout_s=0.2) as sandbox:
        assert sandbox.run("import time; time.sleep(60)").status == "timeout"
        assert sandbox.run("import time; time.sleep(0.5); 'slept'", timeout_s=30).value == "'slept'"


def test_output_is_limited_and_what_fits_is_kept() -> None:
    with Sandbox(output_kb=8) as sandbox:
        result = sandbox.run("print('x' * 100_000)")
        assert result.status == "output"
        assert set(result.stdout) == {"x"}
        assert 4096 <= len(result.stdout) <= 8192


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"language": "perl"}, "language must be 'python' or 'bash'; got 'perl'"),
        ({"memory_mb": 0}, "memory_mb must be a whole number of at least 1; got 0"),
        ({"output_kb": "64"}, "output_kb must be a whole number of at least 1; got '64'"),
        ({"timeout_s": -1}, "timeout_s must be a positive number of seconds; got -1"),
        ({"timeout_s": float("inf")}, "timeout_s must be a positive number"),
        ({"level": "some"}, "level must be 'full', 'reduced' or 'none'; got 'some'"),
        ({"level": "none"}, "say allow_unsafe=True as well"),
        ({"warm": -1}, "warm must be a whole number of at least 0; got -1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_nonsense_is_refused_when_the_sandbox_is_built(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sandbox(**settings)


def test_packages_is_a_list_and_not_a_name() -> None:
    with pytest.raises(TypeError, match="packages must be a list of names"):
        Sandbox(packages="numpy")


def test_packages_are_there_and_preloaded() -> None:
    pytest.importorskip("numpy")
    with Sandbox(packages=("numpy", "no_such_package"), timeout_s=60) as sandbox:
        result = sandbox.run(
            "import sys; loaded = 'numpy' in sys.modules\nimport numpy; loaded, int(numpy.arange(4).sum())"
        )
        assert result.value == "(True, 6)", result
        draws = {sandbox.run("import numpy; float(numpy.random.rand())").value for _ in range(3)}
        assert len(draws) == 3


# --- levels ---------------------------------------------------------------------------------------------------------


def test_the_level_is_known() -> None:
    found = level()
    assert found.name == "full"
    assert found.reasons == () or not found.landlock
    assert str(Level(name="none", reasons=("a", "b"))) == "none: a; b"


def test_bash_is_refused_where_processes_cannot_be_held() -> None:
    if reason := why_not("reduced"):
        pytest.skip(reason)
    with (
        Sandbox(language="bash", level="reduced") as sandbox,
        pytest.raises(SandboxError, match="bash needs processes"),
    ):
        sandbox.run("echo")


def test_without_isolation_code_runs_only_when_asked_for_by_name() -> None:
    with Sandbox(level="none", allow_unsafe=True) as sandbox:
        assert sandbox.start().name == "none"
        assert sandbox.run("6 * 7").value == "42"
        assert sandbox.run("while True: pass", timeout_s=0.2).status == "timeout"


WITHOUT_KERNEL_HELP = """
import sys
import verifiers.sandbox.host as host
host.BOOT = host.BOOT.replace("main(config)", '''
from verifiers.sandbox.inside import kernel, namespaces
def no(*args): raise PermissionError(1, "forbidden here")
namespaces.enter = no
if {no_landlock}: kernel.landlock_version = lambda: 0
main(config)
''')
from verifiers.sandbox import Sandbox, SandboxError, level
try:
    with Sandbox(allow_unsafe={allow_unsafe}) as sandbox:
        print(sandbox.start(), sandbox.run("1 + 1").value)
except SandboxError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize(
    ("no_landlock", "allow_unsafe", "said"),
    [
        (False, False, "reduced: namespaces cannot be used (forbidden here)"),
        (True, False, "refused: this machine cannot hold code that is not trusted (namespaces cannot be used"),
        (True, True, "none: namespaces cannot be used (forbidden here); this kernel has no Landlock"),
    ],
)
def test_what_a_machine_lacks_lowers_the_level_and_never_silently(
    no_landlock: bool, allow_unsafe: bool, said: str
) -> None:
    code = WITHOUT_KERNEL_HELP.format(no_landlock=no_landlock, allow_unsafe=allow_unsafe)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(said), done.stdout
    assert allow_unsafe or "allow_unsafe=True" in done.stdout or done.stdout.strip().endswith("2")


# --- sync and async, one and many -----------------------------------------------------------------------------------


def test_inside_a_loop_calls_are_awaited() -> None:
    async def main() -> None:
        async with Sandbox() as sandbox:
            assert (await sandbox.run("1 + 1")).value == "2"
            async with sandbox.session() as session:
                await session.run("x = 1")
                await session.write("f", "x")
                assert await session.files() == ["f"]
                assert await session.read("f") == b"x"
                assert (await session.run("x")).value == "1"

    asyncio.run(main())


def test_inside_a_loop_a_call_may_be_used_without_await() -> None:
    async def main() -> str:
        with Sandbox() as sandbox:
            return str(sandbox.run("6 * 7").value)

    assert asyncio.run(main()) == "42"


def test_many_calls_at_once_wait_for_a_place() -> None:
    async def main(sandbox: Sandbox) -> list[Result]:
        return list(await asyncio.gather(*[sandbox.run(f"{n}", timeout_s=60) for n in range(200)]))

    with Sandbox(warm=0) as sandbox:
        sandbox.start()
        assert sandbox._host is not None
        sandbox._host.places.limit = 8
        results = asyncio.run(main(sandbox))
    assert [result.value for result in results] == [str(n) for n in range(200)]


def test_many_sessions_at_once_keep_their_own_state() -> None:
    async def one(sandbox: Sandbox, number: int) -> bool:
        async with sandbox.session() as session:
            for _ in range(3):
                await session.run(f"x = globals().get('x', {number}) + 1", timeout_s=60)
            return (await session.run("x", timeout_s=60)).value == str(number + 3)

    async def main() -> None:
        async with Sandbox() as sandbox:
            assert all(await asyncio.gather(*[one(sandbox, 10 * n) for n in range(40)]))

    asyncio.run(main())


def test_calls_from_many_threads() -> None:
    found: list[str] = []
    with Sandbox(warm=2) as sandbox:

        def client(number: int) -> None:
            found.extend(sandbox.run(f"{number}", timeout_s=60).value for _ in range(5))

        threads = [threading.Thread(target=client, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == sorted(str(n) for n in range(6) for _ in range(5))


def test_a_cancelled_call_ends_its_process_and_frees_its_place() -> None:
    async def main() -> None:
        async with Sandbox(warm=0) as sandbox:
            await sandbox.start()
            assert sandbox._host is not None
            places = sandbox._host.places
            task = asyncio.create_task(sandbox.run("import time; time.sleep(600)", timeout_s=600))
            while not places._inside:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert places._inside == 0
            assert (await sandbox.run("1")).value == "1"

    asyncio.run(main())


def test_a_place_given_up_while_waiting_goes_to_the_next_in_line() -> None:
    async def main() -> None:
        gate = Gate(1)
        await drive_async(gate.enter())
        first, second = (asyncio.create_task(drive_async(gate.enter())) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        gate.leave()
        await asyncio.wait_for(second, 20)
        gate.leave()
        assert gate._inside == 0

    asyncio.run(main())
    gate = Gate(1)
    drive(gate.enter())
    gate.leave()
    drive(gate.enter())


def test_a_forgotten_session_frees_its_place_and_its_process() -> None:
    with Sandbox(warm=0) as sandbox:
        session = sandbox.session()
        session.run("1")
        assert sandbox._host is not None
        assert sandbox._host.places._inside == 1
        del session
        assert sandbox._host.places._inside == 0


# --- what goes wrong underneath -----------------------------------------------------------------------------------


def test_a_sandbox_whose_zygote_is_gone_raises_and_then_starts_anew() -> None:
    with Sandbox(level="full", packages=("fractions",)) as sandbox, sandbox.session() as session:
        session.run("x = 1")
        assert sandbox._host is not None
        assert sandbox._host._popen is not None
        sandbox._host._popen.kill()
        assert wait_until(lambda: not sandbox._host.is_alive())  # type: ignore[union-attr]
        with pytest.raises(SandboxError, match="the sandbox's first process is gone"):
            session.run("x")
        assert session.run("1 + 1").value == "2"
        assert sandbox.run("1 + 1").value == "2"


def test_a_zygote_that_cannot_start_is_an_error_of_the_infrastructure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with Sandbox(packages=("decimal",)) as sandbox, pytest.raises(SandboxError, match="could not be started") as caught:
        sandbox.run("1")
    assert caught.value.blame == "infrastructure"


def test_a_zygote_that_breaks_at_once_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifiers.sandbox.host.BOOT", "raise RuntimeError('broken on purpose')")
    with Sandbox(packages=("statistics",)) as sandbox, pytest.raises(SandboxError, match="broken on purpose"):
        sandbox.run("1")


def test_running_out_of_descriptors_is_an_error_of_the_infrastructure_and_passes() -> None:
    code = """
import os, resource
from verifiers.sandbox import Sandbox, SandboxError
with Sandbox(warm=0) as sandbox:
    sandbox.start()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2, limits[1]))
    for _ in range(3):
        try: sandbox.run("1")
        except SandboxError as error: print("Too many open files" in str(error))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    print(sandbox.run("1 + 1").value, sandbox._host.places.is_busy())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True", "2", "False"], done


def test_closing_ends_every_process_and_using_it_again_starts_anew() -> None:
    sandbox = Sandbox(packages=("heapq",), warm=2)
    sandbox.start()
    before = set(descendants(os.getpid()))
    session = sandbox.session()
    session.run("x = 1")
    sandbox.close()
    sandbox.close()
    assert wait_until(lambda: set(descendants(os.getpid())) < before)
    assert session.run("'x' in globals()").value == "False"
    assert sandbox.run("1 + 1").value == "2"
    sandbox.close()


def test_a_few_zygotes_that_nobody_uses_are_kept_for_the_next_sandbox() -> None:
    hosts = []
    for name in ("bisect", "calendar", "colorsys", "csv"):
        with Sandbox(packages=(name,), warm=0) as sandbox:
            sandbox.start()
            hosts.append(sandbox._host)
    assert [host is not None and host.is_alive() for host in hosts] == [False, False, True, True]
    with Sandbox(packages=("csv",), warm=0) as sandbox:
        sandbox.start()
        assert sandbox._host is hosts[-1]


def test_a_fork_of_the_application_uses_a_zygote_of_its_own() -> None:
    with Sandbox() as sandbox, sandbox.session() as session:
        session.run("x = 1")
        child = os.fork()
        if child == 0:
            try:
                works = sandbox.run("2").value == "2"
                session.close()
                sandbox.close()
                os._exit(0 if works else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert session.run("x").value == "1"


def test_importing_starts_nothing_and_is_quick() -> None:
    code = (
        "import sys, time, asyncio; before = time.process_time(); import verifiers.sandbox;"
        "print(time.process_time() - before, 'numpy' in sys.modules, 'ctypes' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    took_s, *loaded = done.stdout.split()
    assert loaded == ["False", "False"]
    assert float(took_s) < 0.5


def test_time_in_the_result_is_measured_outside() -> None:
    with Sandbox() as sandbox:
        began = time.monotonic()
        result = sandbox.run("import time; time.monotonic = time.perf_counter = lambda: 0.0; time.sleep(0.2)")
        assert 0.2 <= result.time_s <= time.monotonic() - began
