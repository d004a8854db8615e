"""Cells of bash: one shell, that keeps its variables and its folder."""

from __future__ import annotations

import sys

import pytest

from verifiers.sandbox import Sandbox

pytestmark = pytest.mark.usefixtures("full_level")


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


def test_a_program_that_takes_the_shells_place_is_the_cell(shell: Sandbox) -> None:
    with shell.session() as session:
        session.run("x=1; echo kept > file")
        result = session.run("exec cat file")
        assert (result.status, result.stdout, result.exit_code) == ("ok", "kept\n", 0)
        after = session.run("echo [$x]; exec sh -c 'exit 4'")
        assert (after.stdout, after.is_fresh, after.exit_code) == ("[]\n", True, 4)


def test_a_shell_that_something_in_the_background_ended_is_started_again(shell: Sandbox) -> None:
    with shell.session() as session:
        session.run("(sleep 0.1; kill -9 $$) & x=1")
        session.run("sleep 10")
        after = session.run("echo [$x]")
        assert (after.stdout, after.is_fresh, after.status) == ("[]\n", True, "ok")


def test_a_lock_on_its_own_file_keeps_other_programs_of_the_shell_out(shell: Sandbox) -> None:
    with shell.session() as session:
        result = session.run("exec 5>file; flock 5; flock -n file echo in || echo out; flock -u 5; flock file echo in")
        assert result.stdout == "out\nin\n", result
        count = "n=$(cat count); echo $((n + 1)) > count"
        result = session.run(f"echo 0 > count; for i in 1 2 3 4 5 6 7 8; do flock file sh -c '{count}' & done; wait %2")
        assert session.run("wait; cat count").stdout == "8\n"


LOCKED_DATABASE = """
import sqlite3, subprocess, sys
base = sqlite3.connect('data.db', timeout=0)
if len(sys.argv) == 1:
    base.execute('create table t (x)')
    base.execute('begin exclusive')
    print(subprocess.run([sys.executable, sys.argv[0], 'second'], capture_output=True, text=True).stdout, end='')
    base.execute('commit')
try: base.execute('insert into t values (1)'); base.commit(); print('written')
except sqlite3.OperationalError as error: print(error)
"""


def test_a_database_that_one_program_writes_is_locked_for_another(shell: Sandbox) -> None:
    with shell.session() as session:
        session.write("base.py", LOCKED_DATABASE)
        assert session.run("python3 base.py").stdout == "database is locked\nwritten\n"
