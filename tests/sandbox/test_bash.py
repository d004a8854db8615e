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
